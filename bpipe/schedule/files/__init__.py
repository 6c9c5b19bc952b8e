"""Files: schedules in CSV and JSON, and printed grids."""
