"""Lowering of schedules to one program per rank: computations, messages, transfers and what each waits for."""
