"""Carry bytes between the two ranks of a pair."""
