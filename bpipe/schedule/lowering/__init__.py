"""Lower a schedule to one program a rank: computations, messages, transfers and what each waits for."""
