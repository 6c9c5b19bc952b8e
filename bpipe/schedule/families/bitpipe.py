"""BitPipe: two pipes in opposite directions, each with several chunks a rank that go up the ranks and down again in
turn.

Backwards are whole. With two chunks per rank each pipe is a V.

A rank holds at most p micro-batches of its share, of both pipes together. With a forward of 1 and a backward of 2, of
all chunks, m = p micro-batches, one unit, take 3 m + 2 (p - 2) / v, and so do 2 p, 3 p and 4 p for p up to 16, except
for a third of a forward with p = 16, v = 3 and m = 64. The best rule depends on p and m: rules prefer deeper forwards,
and backwards of the last chunk or the oldest. Source: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline
Parallelism for Accelerating Large Models Training", 2024; the rules are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bpipe.schedule.families.bidirectional import PipesRule, Weights, first_of_two, layout, shortest
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.program import Exchange

_LAST_CHUNK_FIRST = Weights(1, -64, 0)
_OLDEST_FIRST = Weights(1, 0, 0)


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> Sequence[Order]:
    rules = (
        # The first of two equally long orders is taken: this rule sends least that is not needed soon.
        PipesRule(Weights(4 * num_ranks, num_ranks, -16), _OLDEST_FIRST),
        PipesRule(Weights(4 * num_ranks, num_ranks, -8), _LAST_CHUNK_FIRST),
        PipesRule(Weights(8, -16, -6), _OLDEST_FIRST),
    )
    most, bubble = [num_chunks * num_ranks] * num_ranks, Fraction(2 * (num_ranks - 2), num_chunks)
    return shortest(num_ranks, num_microbatches, num_chunks, options.costs, most, rules, bubble)


FAMILY = Family(
    "bitpipe",
    layout,
    orders,
    Exchange.POSTED,
    min_chunks=2,
    max_chunks=None,
    fill=2,
    ahead=first_of_two,
    num_pipes=2,
    early="bitpipe-early",
)
