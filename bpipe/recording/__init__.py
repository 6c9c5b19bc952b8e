"""Fill a run's record from what an engine measured, whoever runs the loop."""
