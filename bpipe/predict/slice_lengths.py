"""How long the slices of a sequence are, for the trainer and for predictions.

Later slices attend to more keys: slices of one length take ever longer, and slices of equal work get ever shorter.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt
from typing import NamedTuple

# A forward and a backward, in forwards: attention's backward computes its scores again.
_LINEAR, _ATTENTION = 3, 3.5


class Growth(NamedTuple):
    """Work of a whole sequence in any unit: the part that grows with its tokens, and the part with their square."""

    line: float
    square: float


def even_bounds(length: int, slices: int, unit: int = 1) -> tuple[int, ...]:
    """Return bounds of nearly even slices, multiples of `unit`. Raises ValueError if there are none."""
    units, left = divmod(length, unit)
    if left:
        raise ValueError(f"a sequence of {length} tokens is not a multiple of {unit}, but each slice must be one")
    if units < slices:
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut into {slices} slices of {unit} or more: use at most "
            f"{units} slices"
        )
    return tuple(units * number // slices * unit for number in range(slices + 1))


def listed_bounds(lengths: Sequence[int], length: int, slices: int, unit: int = 1) -> tuple[int, ...]:
    """Return the bounds of slices of these lengths. Raises ValueError where they are not a sequence's."""
    if len(lengths) != slices:
        raise ValueError(f"{len(lengths)} lengths for {slices} slices: give one for each")
    if sum(lengths) != length:
        raise ValueError(f"the lengths add up to {sum(lengths)} tokens, but a sequence has {length}")
    wrong = next((length_of_one for length_of_one in lengths if length_of_one % unit), None)
    if wrong is not None:
        raise ValueError(f"a slice of {wrong} tokens is not a multiple of {unit}, which tensor-parallel ranks need")
    return (0, *accumulate(lengths))


def equal_bounds(length: int, slices: int, unit: int, growth: Growth) -> tuple[int, ...]:
    """Return bounds between which as much of what grows so is done. Raises ValueError as `even_bounds` does."""
    even_bounds(length, slices, unit)
    line, square = growth
    bounds = [0]
    for number in range(1, slices):
        part = (line + square) * number / slices
        # Of line x + square x**2 = part, written so that nothing is divided by a square of 0.
        place = 2 * part / (line + sqrt(line * line + 4 * square * part))
        left = (slices - number) * unit
        bounds.append(min(max(round(place * length / unit) * unit, bounds[-1] + unit), length - left))
    return (*bounds, length)


def lengths_of(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of each slice."""
    return tuple(end - begin for begin, end in pairwise(bounds))


def work_of(share: float) -> Growth:
    """Return the FLOPs of a forward and a backward; `share`: attention's of a whole sequence's forward."""
    return Growth(_LINEAR * (1 - share), _ATTENTION * share)


def attention_share(length: int, hidden: int, queries: int, keys: int, ffn: int, matrices: int) -> float:
    """Return attention's share of a layer's forward FLOPs. `ffn`: channels of a token's MLPs, `matrices` each."""
    products = hidden * (2 * queries + 2 * keys) + hidden * ffn * matrices
    # Scores and sums of values, of half the tokens on average.
    attention = queries * length
    return float(attention / (products + attention))
