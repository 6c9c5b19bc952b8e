"""1F1B with backwards in halves.

In: number of ranks and micro-batches, a delay. Out: every rank's order. One stage per rank.

1F1B's order with I in place of B: the stage before gets its gradient while this one still computes W. The W of a
micro-batch stands right behind its own I, or with a delay of N behind the I of the one N later, and what is left at the
end. A rank holds what 1F1B holds and, from I to W, N micro-batches more: min(p - rank + N, m). With durations f, i, w
of a forward and the halves an iteration takes m (f + i + w) + (p - 1)(f + i), (p - 1) w less than 1F1B, whatever the
delay: all ranks put off alike. Early ranks still hold most, so balancing pays as in 1F1B. Source: the split of Qi et
al., "Zero Bubble Pipeline Parallelism", 2024, on the order of Narayanan et al., 2021.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.one_f_one_b import sliced_warm_up
from bpipe.schedule.families.run_ahead import BESIDE_HALVES, further_forwards
from bpipe.schedule.families.split_backward import defer_wgrads
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    """W's put off by `asked.delay` micro-batches on every rank, or slices."""
    return defer_wgrads(num_ranks, num_microbatches, [options.delay] * num_ranks, options.slices)


FAMILY = Family(
    "1f1b-split",
    one_stage_a_rank,
    orders,
    Exchange.POSTED,
    takes_delay=True,
    takes_slices=True,
    splits=True,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=further_forwards(orders, BESIDE_HALVES),
)
