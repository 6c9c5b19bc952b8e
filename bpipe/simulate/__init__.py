"""Simulation: what running a schedule costs, in time and memory."""
