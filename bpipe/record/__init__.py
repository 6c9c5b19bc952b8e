"""What a run writes down of itself, and reading it back: every file, key and column is defined once, in `format`.

Needs no torch.
"""
