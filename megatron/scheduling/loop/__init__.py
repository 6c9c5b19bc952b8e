"""Run an iteration: the driver, our own loop, and its parts."""
