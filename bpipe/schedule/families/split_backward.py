"""Put the weights' halves of 1F1B's backwards off.

In: sizes, and for each rank a number of micro-batches. Out: every rank's order.

A rank runs 1F1B with I in place of B; the W of a micro-batch stands right behind the I of the one so many later, and
what is left of them at the end. The I of a stage is all that the stage before waits for. Rules that differ only in
these numbers are families of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families import one_f_one_b
from bpipe.schedule.families.slices import in_slices

_BACKWARD, _INPUT, _WEIGHT = Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def defer_wgrads(num_ranks: int, num_microbatches: int, delays: Sequence[int], slices: int = 1) -> list[list[Action]]:
    """Return 1F1B with split backwards, one order per rank.

    `delays[rank]`: micro-batches' I, or slices', that stand between an I and its W.
    """
    whole = one_f_one_b.in_turn(num_ranks, num_microbatches, slices)
    split = [
        _split(order, rank, num_microbatches * slices, delay)
        for rank, (order, delay) in enumerate(zip(whole, delays, strict=True))
    ]
    return in_slices(split, slices)


def _split(order: Sequence[Action], rank: int, num_microbatches: int, delay: int) -> list[Action]:
    found = []
    for action in order:
        if action.kind is not _BACKWARD:
            found.append(action)
            continue
        found.append(Action(rank, _INPUT, action.microbatch))
        if action.microbatch >= delay:
            found.append(Action(rank, _WEIGHT, action.microbatch - delay))
    return found + [
        Action(rank, _WEIGHT, microbatch) for microbatch in range(max(0, num_microbatches - delay), num_microbatches)
    ]
