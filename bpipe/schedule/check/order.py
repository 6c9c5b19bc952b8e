"""Whether a schedule trains the same bits as Megatron's own schedules do.

Only training needs this rule, so it is not in `rules.RULES`: a schedule that breaks it can be printed, drawn and
simulated.

Megatron's loops take the micro-batches of every stage in order: forwards, which draw data and random numbers, and
backwards, each of which adds to the gradients of the stage's weights. Sums in floating point depend on their order. If
a backward is split, the inputs' half at once adds to the weights whose gradients cost nothing to compute, and the
weights' half to all others, so each half keeps the order. The backwards of a micro-batch cut into slices come from the
last slice to the first.
"""

from __future__ import annotations

from bpipe.schedule.action import OF_THE_INPUT, OF_THE_WEIGHTS, Action, Kind
from bpipe.schedule.check.case import Case
from bpipe.schedule.layout import reversed_slice
from bpipe.schedule.schedule import Schedule

# What runs once for every micro-batch, and in order: forwards, what passes gradients on, and what completes the
# gradients of weights.
_PASSES = (frozenset({Kind.FORWARD}), OF_THE_INPUT, OF_THE_WEIGHTS)


def check_microbatch_order(schedule: Schedule) -> None:
    """Check that every rank takes the micro-batches of each of its stages in order, in each pass.

    With several pipes a rank takes only its replica's micro-batches, in order.

    Raises:
        ScheduleError: Names the first computation that is late.
    """
    slices = schedule.layout.slices

    def turn(action: Action) -> int:
        """Return the place of a pass among those of its stage and kind."""
        return action.microbatch if action.kind is Kind.FORWARD else reversed_slice(action.microbatch, slices)

    for rank in range(schedule.num_ranks):
        latest: dict[tuple[int, frozenset[Kind]], Action] = {}
        for slot, action in schedule.computations(rank):
            for kinds in (kinds for kinds in _PASSES if action.kind in kinds):
                before = latest.setdefault((action.stage, kinds), action)
                if turn(before) > turn(action):
                    reason = (
                        f"comes after {before}, but Megatron's own schedules compute a stage's micro-batches in "
                        "order, so gradient sums would differ in their last bits. Reorder the file; it can be "
                        "shown and simulated as it is"
                    )
                    raise Case(schedule).error("order of micro-batches", rank, slot, action, reason)
                latest[action.stage, kinds] = action
