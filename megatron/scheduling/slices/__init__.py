"""Train micro-batches whose sequences are cut into slices, in Megatron's own layers and by any script."""
