"""Read launches of Megatron's trainer, from command lines, scripts and logs, and write them."""
