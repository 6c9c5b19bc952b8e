"""ZB-V: two chunks a rank in a V that hold what 1F1B does, as short as can be. In: sizes, costs. Out: every rank's order.

Every rank holds at most p micro-batches of its share, as 1F1B's first does. With F, I and W of equal length the last rank never waits
between its first computation and its last, so no order is shorter: in slots of half a micro-batch an iteration takes 6 m and the p - 1
until the last rank begins. Earlier ranks begin before it, and wait for at most as long in between. At other costs the order is the shortest
of those that `shift` finds. It starts from V-Half's building block: more room is all that ZB-V has.
Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2024; the block is that of "Pipeline Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.generate.ahead import later_microbatch
from bpipe.generate.family import Asked, Family
from bpipe.generate.v_shape import half, layout, orders_within
from bpipe.ir.action import Action
from bpipe.ir.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, asked: Asked) -> Sequence[Sequence[Action]]:
    return orders_within(num_ranks, num_microbatches, half, 2 * num_ranks, asked.costs)


FAMILY = Family(
    "zb-v",
    layout,
    orders,
    Exchange.POSTED,
    min_chunks=2,
    max_chunks=2,
    splits=True,
    fill=2,
    ahead=lambda p, m, v, g: 2 * p if m >= 2 * p else 1,
    sharded=later_microbatch(orders),
)
