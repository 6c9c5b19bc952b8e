"""ZB-H1: 1F1B with backwards in halves, W put off by as many micro-batches as ranks stand before.

One stage per rank. I takes the place of 1F1B's backward and passes its gradient on at once; the W of a micro-batch
follows the I of the one `rank` later, so a rank has `rank` of them left after its last I, and they fill 1F1B's wait at
the end. A rank holds p - rank micro-batches as in 1F1B and `rank` that wait for their W: min(p, m) everywhere, and
balancing moves nothing unless less of a micro-batch is held after its I. With durations f, i, w of a forward and the
halves an iteration takes m (f + i + w) + (p - 1)(f + i - w) if w is at most f and at most i, for m >= p. Source: Qi et
al., "Zero Bubble Pipeline Parallelism", 2024.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.one_f_one_b import sliced_warm_up
from bpipe.schedule.families.one_f_one_b_split import defer_wgrads
from bpipe.schedule.families.run_ahead import BESIDE_HALVES, further_forwards
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    return defer_wgrads(num_ranks, num_microbatches, range(num_ranks), options.slices)


FAMILY = Family(
    "zb-h1",
    one_stage_a_rank,
    orders,
    Exchange.POSTED,
    splits=True,
    takes_slices=True,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=further_forwards(orders, BESIDE_HALVES),
)
