"""What is replaced in Megatron, repaired, and read of it."""
