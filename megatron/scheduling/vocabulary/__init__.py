"""Split embedding and output layer over all ranks of a pipeline."""
