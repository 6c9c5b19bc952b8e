"""What a run writes down about itself, and reading it. Every file, key and column is defined in `format`. Needs no torch."""
