"""Find how few layers of every stage have to be recomputed. In: what a number of them needs. Out: the number.

Each layer more that is recomputed saves less and takes longer, so the fewest that are enough are the fastest: found by
halving. Knows no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bpipe.predict.layout import Setup
from bpipe.predict.recompute import BLOCK, Recompute

# A setup of which nobody has asked yet how many.
OPEN = f"{BLOCK}:1"


def with_block(setup: Setup, num_layers: int) -> Setup:
    """Return the setup with the first layers of every stage recomputed."""
    return replace(setup, recompute=Recompute(method="block", num_layers=num_layers).text)


def fewest_layers(most: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number from 1 to `most` that is enough, where more are, too; None where not even `most`
    is."""
    if most < 1 or not is_enough(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high
