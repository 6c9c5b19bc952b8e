"""V-Half: two chunks a rank in a V that hold half of what 1F1B does. In: sizes, costs. Out: every rank's order.

No rank holds more than (p + 2) // 2 micro-batches of its share, and all hold alike: balancing moves nothing. With F, I and W of equal
length every rank computes without a pause once the pipeline is full: in slots of half a micro-batch an iteration takes 6 m and, from p = 3
on, for even p 3 p - 7 more, for odd p 3 p - 4. At other costs the order is the shortest of those that `shift` finds.
Source of the building block: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.generate.ahead import later_microbatch
from bpipe.generate.family import Asked, Family
from bpipe.generate.v_shape import half, layout, orders_within
from bpipe.ir.action import Action
from bpipe.ir.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, asked: Asked) -> Sequence[Sequence[Action]]:
    return orders_within(num_ranks, num_microbatches, half, 2 * ((num_ranks + 2) // 2), asked.costs)


FAMILY = Family(
    "v-half",
    layout,
    orders,
    Exchange.POSTED,
    min_chunks=2,
    max_chunks=2,
    splits=True,
    fill=2,
    # From there on the pipeline is full, and the bound above is what every rank holds.
    ahead=lambda p, m, v, g: 2 * ((p + 2) // 2) if m >= 2 * p else 1,
    sharded=later_microbatch(orders),
)
