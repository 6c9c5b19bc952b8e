"""Compare what a run recorded with what its schedule predicts. `output` prints the result."""
