"""What a user sets: flags, launches of Megatron's trainer, and which of its features are supported."""
