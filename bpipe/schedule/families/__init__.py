"""Families: who computes what, in which order; one module per family, all of them in `families.py`."""
