"""How fast a link must be for balancing to hide behind computation.

In: bytes and seconds. Out: bytes a second. Knows no link.

Kim et al. 2023: a transfer has to end within a forward. In the steady phase an eviction and a load share a forward and
a backward, which takes about twice as long, so two transfers in three forwards are enough.
"""

from __future__ import annotations


def required_bytes_per_s(moved_bytes: int, forward_s: float) -> float:
    """Return the bandwidth at which every transfer ends within one forward, as in the warm-up."""
    return moved_bytes / forward_s


def steady_bytes_per_s(moved_bytes: int, forward_s: float) -> float:
    """Return the bandwidth at which an eviction and a load end within a forward and a backward."""
    return required_bytes_per_s(moved_bytes, forward_s) * 2 / 3
