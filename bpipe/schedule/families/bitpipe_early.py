"""BitPipe with early forwarding: more micro-batches let in, the more the nearer a rank is to the middle.

With a forward of 1 and a backward of 2, of all chunks, an iteration of 2 p, 3 p or 4 p micro-batches takes
3 m + 3 (p - 2) / 2 v for p up to 16, at times up to half a forward more with three or four chunks of more than 10
ranks: a quarter less waiting than BitPipe's. A rank holds at most p + (min(r, p - 1 - r) + 2) / v micro-batches of its
share, with two chunks 9.5 of 8 ranks and 19.5 of 16; the paper says 3 (p - 1) / 2. One unit, of p micro-batches, is
BitPipe's unless something is shorter. Source: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for
Accelerating Large Models Training", 2024; the rules are our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bpipe.schedule.families.bidirectional import PipesRule, Weights, first_of_two, from_ends, layout, shortest
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> Sequence[Order]:
    willing = [num_chunks * num_ranks + from_ends(rank, num_ranks) for rank in range(num_ranks)]
    rule = PipesRule(Weights(4, 0, -10), Weights(2, 6, 13), willing.__getitem__)
    most, bubble = [count + 2 for count in willing], Fraction(3 * (num_ranks - 2), 2 * num_chunks)
    return shortest(num_ranks, num_microbatches, num_chunks, options.costs, most, [rule], bubble)


FAMILY = Family(
    "bitpipe-early",
    layout,
    orders,
    Exchange.POSTED,
    min_chunks=2,
    max_chunks=None,
    fill=3,
    ahead=first_of_two,
    num_pipes=2,
)
