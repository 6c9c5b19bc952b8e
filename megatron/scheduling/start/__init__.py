"""Prepare a process for a training, and end it with one error where it cannot start."""
