"""Pictures of schedules: what is drawn where (`picture`), and its writers."""
