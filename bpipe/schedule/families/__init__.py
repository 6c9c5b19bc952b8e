"""Families: who computes what, in which order; all of them are in the table of `families.py`."""
