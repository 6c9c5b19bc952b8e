"""Read launches of Megatron's trainer, from command lines and logs, capture those of scripts, and write them."""
