"""Turn flags into one validated configuration: schedule, budget, sizes."""
