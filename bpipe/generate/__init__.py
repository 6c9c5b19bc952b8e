"""Generators: who computes what, in which order; one file a family, all of them in `families.py`."""
