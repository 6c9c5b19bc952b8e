"""Generators: who computes what, in which order; one file a schedule, all of them in `registry.py`."""
