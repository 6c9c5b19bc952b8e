"""MixPipe: Chimera's two pipes with more micro-batches let in.

Backwards are whole. Rank r holds at most p + 1 + min(r, p - 1 - r) micro-batches, of both pipes together: the ranks in
the middle 3 p / 2. With a forward of 1 and a backward of 2 an iteration of 2 p micro-batches, 3 p and so on takes
3 m + 3 (p - 2) / 2. Up to p micro-batches are Chimera's unit unless something is shorter. Source: Zhang et al.,
"MixPipe: Efficient Bidirectional Pipeline Parallelism for Training Large-Scale Models", 2023, which regulates how many
are let in; this slope is a reading of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bpipe.schedule.families.bidirectional import PipesRule, Weights, first_of_two, from_ends, layout, shortest
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.program import Exchange

_RULE = PipesRule(forwards=Weights(8, 0, -1), backwards=Weights(8, 0, 1))


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> Sequence[Order]:
    most = [num_ranks + 1 + from_ends(rank, num_ranks) for rank in range(num_ranks)]
    bubble = Fraction(3 * (num_ranks - 2), 2)
    return shortest(num_ranks, num_microbatches, num_chunks, options.costs, most, (_RULE,), bubble)


FAMILY = Family("mixpipe", layout, orders, Exchange.POSTED, fill=3, ahead=first_of_two, num_pipes=2)
