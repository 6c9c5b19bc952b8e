"""Carry bytes between the two ranks of a pair.

A **two-sided** transport (`distributed`) carries bytes between this rank and its partner, and both take part: what the
evictor puts, the acceptor must host; what the evictor gets, the acceptor must give back. With a **one-sided** transport
(`one_sided`) the evictor reaches into the host buffers by itself; a partner that lends their memory does so once, and
HOST and RETURN in its program move nothing. Neither end asks for a transfer of a stage whose list of sizes is empty.
"""

# Two-sided over process groups, one-sided into the partner's memory, one-sided into one's own host memory; or whichever
# measures best.
AUTO = "auto"
NAMES = ("nccl", "gloo", "peer", "host")
