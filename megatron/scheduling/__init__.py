"""Hooks from the installed Megatron into `bpipe`: the only code of this project that imports Megatron."""
