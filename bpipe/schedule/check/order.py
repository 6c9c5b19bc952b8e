"""Judge whether a schedule trains the very bits that Megatron's own do.

In: a checked Schedule. Out: nothing, or a `ScheduleError`.

A rule of whoever trains, not of `rules.RULES`: a schedule that breaks it is sound, can be printed, drawn and simulated.
Knows no trainer.

Megatron's loops take the micro-batches of every stage in order: forwards, which draw data and random numbers, and
backwards, each of which adds to the gradients of the stage's weights. Sums in floating point depend on their order. Of
a backward in halves the inputs' half adds to the weights whose gradients cost nothing to compute at once, the weights'
half to all others, so each keeps the order. Of a micro-batch cut into slices the backwards come from the last slice to
the first.
"""

from __future__ import annotations

from bpipe.schedule.action import OF_THE_INPUT, OF_THE_WEIGHTS, Action, Kind
from bpipe.schedule.check.case import Case
from bpipe.schedule.layout import reversed_slice
from bpipe.schedule.schedule import Schedule

RULE = "order of micro-batches"
# What runs once for every micro-batch, and in order: forwards, what passes gradients on, and what completes the
# weights'.
_PASSES = (frozenset({Kind.FORWARD}), OF_THE_INPUT, OF_THE_WEIGHTS)


def check_microbatch_order(schedule: Schedule) -> None:
    """Check that every rank takes the micro-batches of each of its stages in order, in each pass.

    With several pipes a rank takes only its replica's micro-batches, in order. Raises ScheduleError that names the
    first late one.
    """
    slices = schedule.layout.slices
    for rank, row in enumerate(schedule.ranks):
        latest: dict[tuple[int, frozenset[Kind]], Action] = {}
        for slot, cell in enumerate(row):
            for action in cell.computations:
                for kinds in _PASSES:
                    if action.kind not in kinds:
                        continue
                    before = latest.setdefault((action.stage, kinds), action)
                    if _turn(before, slices) > _turn(action, slices):
                        reason = (
                            f"comes after {before}, but Megatron's own schedules compute a stage's micro-batches in "
                            "order, so gradient sums would differ in their last bits. Reorder the file; it can be "
                            "shown and simulated as it is"
                        )
                        raise Case(schedule).error(RULE, rank, slot, action, reason)
                    latest[action.stage, kinds] = action


def _turn(action: Action, slices: int) -> int:
    """The place of a pass among those of its stage and kind."""
    return action.microbatch if action.kind is Kind.FORWARD else reversed_slice(action.microbatch, slices)
