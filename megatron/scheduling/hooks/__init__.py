"""Replace functions of the installed Megatron: the table of patches, its loops, repairs, versions."""
