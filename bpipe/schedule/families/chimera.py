"""Chimera: two pipes in opposite directions, one stage a rank of each.

Backwards are whole. A rank holds at most p micro-batches, of both pipes together; of m = p, one unit, rank r holds
p / 2 + 1 + min(r, p - 1 - r): the ranks in the middle hold most, and mirror images alike. With a forward of 1 and a
backward of 2 an iteration of a multiple of p micro-batches takes 3 m + 2 (p - 2). With more than p micro-batches ranks
compute a forward whenever there is room for it. Source: Li and Hoefler, "Chimera: Efficiently Training Large-Scale
Neural Networks with Bidirectional Pipelines", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bpipe.schedule.families.bidirectional import PipesRule, Weights, first_of_two, layout, shortest
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.program import Exchange

_RULE = PipesRule(forwards=Weights(4, 0, 1), backwards=Weights(4, 0, 1))


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> Sequence[Order]:
    most, bubble = [num_ranks] * num_ranks, Fraction(2 * (num_ranks - 2))
    return shortest(num_ranks, num_microbatches, num_chunks, options.costs, most, (_RULE,), bubble)


FAMILY = Family("chimera", layout, orders, Exchange.POSTED, fill=2, ahead=first_of_two, num_pipes=2, early="mixpipe")
