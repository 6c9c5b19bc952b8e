"""Read and write schedules as CSV and JSON; print grids and listings of messages."""
