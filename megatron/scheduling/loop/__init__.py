"""Run an iteration: the driver, hooks in Megatron's loops, our own loop, and the log."""
