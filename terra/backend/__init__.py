"""Ways to run a block of operations."""
