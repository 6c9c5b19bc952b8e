"""Carry bytes between the two ranks of a pair."""

# Two-sided over process groups, one-sided into the partner's memory, one-sided into one's own host memory; or whichever
# measures best.
AUTO = "auto"
NAMES = ("nccl", "gloo", "peer", "host")
