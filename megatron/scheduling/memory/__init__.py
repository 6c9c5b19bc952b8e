"""Measure what a rank holds, and plan anew from it."""
