"""Measure what a rank holds, plan anew from it, and move optimizer state."""
