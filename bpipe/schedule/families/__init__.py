"""Generators: who computes what, in which order; one file per family, all of them in `families.py`."""
