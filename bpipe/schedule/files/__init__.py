"""Files: schedules in CSV and JSON, printed grids, and listings of messages."""
