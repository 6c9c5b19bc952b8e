"""1F1B with backwards in halves, and ZB-H1, with one stage per rank.

In 1F1B's order with I in place of B: the stage before gets its gradient while this one still
computes W. The W of a micro-batch comes directly after its own I or, with a delay of N, after the I of the one N later,
and the remaining W at the end. A rank holds what 1F1B holds and, from I to W, N micro-batches more: min(p - rank + N,
m). With durations f, i, w of a forward and the halves an iteration takes m (f + i + w) + (p - 1)(f + i), (p - 1) w less
than 1F1B, whatever the delay: all ranks delay alike. Early ranks still hold most, so balancing pays as in 1F1B. Source:
the split of Qi et al., "Zero Bubble Pipeline Parallelism", 2024, on the order of Narayanan et al., 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import Family, FamilyOptions, one_stage_a_rank
from bpipe.schedule.families.one_f_one_b import in_turn, sliced_warm_up
from bpipe.schedule.families.shards import BESIDE_HALVES, further_forwards
from bpipe.schedule.families.turns import in_slices
from bpipe.schedule.program import Exchange


def orders(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    return defer_wgrads(num_ranks, num_microbatches, [options.delay] * num_ranks, options.slices)


def defer_wgrads(num_ranks: int, num_microbatches: int, delays: Sequence[int], slices: int = 1) -> list[list[Action]]:
    """Return 1F1B with split backwards, one order per rank.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of an iteration.
        delays: Per rank, the number of micro-batches, or slices, whose I comes between an I and its W.
        slices: Slices of a sequence.
    """
    width, orders = num_microbatches * slices, []
    for rank, (whole, delay) in enumerate(zip(in_turn(num_ranks, num_microbatches, slices), delays, strict=True)):
        order: list[Action] = []
        for action in whole:
            if action.kind is Kind.FORWARD:
                order.append(action)
                continue
            order.append(Action(rank, Kind.BACKWARD_INPUT, action.microbatch))
            if action.microbatch >= delay:
                order.append(Action(rank, Kind.BACKWARD_WEIGHT, action.microbatch - delay))
        left = range(max(0, width - delay), width)
        orders.append([*order, *(Action(rank, Kind.BACKWARD_WEIGHT, microbatch) for microbatch in left)])
    return in_slices(orders, slices)


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
    summary="1F1B with backwards in halves",
)


def delayed_by_rank(num_ranks: int, num_microbatches: int, _: int, options: FamilyOptions) -> list[list[Action]]:
    """Return ZB-H1's orders, in which the W of a micro-batch follows the I of the one `rank` later.

    A rank has `rank` of them left after its last I, and they fill 1F1B's wait at the end. A rank holds p - rank
    micro-batches as in 1F1B and `rank` that wait for their W: min(p, m) everywhere, and balancing moves nothing unless
    less of a micro-batch is held after its I. With durations f, i, w of a forward and the halves an iteration takes
    m (f + i + w) + (p - 1)(f + i - w) if w is at most f and at most i, for m >= p. Source: Qi et al., "Zero Bubble
    Pipeline Parallelism", 2024.
    """
    return defer_wgrads(num_ranks, num_microbatches, range(num_ranks), options.slices)


ZB_H1 = Family(
    "zb-h1",
    one_stage_a_rank,
    delayed_by_rank,
    Exchange.POSTED,
    splits=True,
    takes_slices=True,
    fill=2,
    ahead=lambda p, m, v, g: min(p, m),
    sliced_warm_up=sliced_warm_up,
    sharded=further_forwards(delayed_by_rank, BESIDE_HALVES),
    summary="ZB-H1: 1F1B with backwards in halves, each W delayed by one micro-batch per earlier rank",
)
