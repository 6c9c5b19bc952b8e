"""Balancing: choose what leaves which rank, for which host, and when it returns."""
