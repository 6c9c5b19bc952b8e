"""What a schedule costs, computed from the schedule."""
