"""Judge the order of slices. In: a schedule under judgement. Out: nothing, or a `ScheduleError` that names the place.

Slice j of a micro-batch attends to the keys and values of the slices before it, and gives their gradients back to them.
So of every stage the forward of slice j comes behind that of j - 1, and its backward before.
"""

from __future__ import annotations

from bpipe.schedule.check.case import Case, ScheduleError

_RULE = "order of slices"


def check_slices(case: Case) -> None:
    """Check that every stage computes a micro-batch's slices forward from the first on, and backward from the last."""
    schedule, slices = case.schedule, case.schedule.layout.slices
    if slices == 1:
        return
    _check_sizes(case)
    width, spots = schedule.num_microbatches, case.spots
    for key in range(schedule.num_stages * width):
        if key % slices == 0:
            continue
        stage, number = divmod(key, width)
        rank = schedule.layout.rank_of(stage, number)
        if spots.forward[key] <= spots.forward[key - 1]:
            slot = spots.forward[key]
            reason = f"attends to the previous slice, whose forward comes only in slot {spots.forward[key - 1]}"
            raise case.error(_RULE, rank, slot, case.at(rank, slot, key), reason)
        if spots.need[key - 1] <= spots.need[key]:
            slot = spots.need[key - 1]
            reason = (
                f"needs gradients of its keys from the next slice, whose backward comes only in slot {spots.need[key]}"
            )
            raise case.error(_RULE, rank, slot, case.at(rank, slot, key - 1), reason)


def _check_sizes(case: Case) -> None:
    schedule, slices = case.schedule, case.schedule.layout.slices
    if slices < 1 or schedule.num_microbatches % slices:
        raise ScheduleError(
            _RULE, f"{schedule.num_microbatches} slices do not make whole micro-batches of {slices} slices"
        )
    if schedule.layout.num_pipes > 1:
        raise ScheduleError(
            _RULE,
            f"{slices} slices on {schedule.layout.num_pipes} pipes: slices are supported on one pipe only, use "
            "slices=1",
        )
