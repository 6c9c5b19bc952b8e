"""Tell how long a stage stood ready although its input was computed.

In: a timeline and its prediction. Out: seconds by computation.

A computation can start when the one before it is over, its neighbour has computed its input, and the transfers that its
rank waited for have ended. What passes from then on is the hand-over: the message, and with exchanges that block also
whoever it is exchanged with. A prediction has hand-overs, too, so only what is more than predicted is late. Judges
nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bpipe.record.report.compare import Comparison
from bpipe.record.report.selection import Timeline
from bpipe.schedule.action import Action
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.schedule import Schedule


class LateStart(NamedTuple):
    """Delay of the hand-over before a computation, beyond what was predicted."""

    seconds: float
    action: Action


def late_starts(comparison: Comparison, timeline: Timeline, place: int) -> list[LateStart]:
    """Return the late starts of one place."""
    lane = timeline.lanes[place]
    if lane is None:
        return []
    schedule, report = comparison.measured.schedule, comparison.prediction.report
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    makers = _makers(schedule, dependencies, place)
    rows = [timeline.lanes[other] for other in makers]
    ends = _ends(
        dependencies, ((row.action, row.end_s) for other in rows if other is not None for row in other.computations)
    )
    waits = sorted(row.end_s for row in lane.transfers if row.wait_s > 0)
    run = [_Ran(row.action, row.start_s, row.end_s) for row in lane.computations]
    planned_ends = _ends(
        dependencies, ((timed.action, float(timed.end_s)) for other in makers for timed in report.computations[other])
    )
    plan = [_Ran(timed.action, float(timed.start_s), float(timed.end_s)) for timed in report.computations[place]]
    # The simulation does not say where a rank waits for transfers; there such a wait counts as a hand-over, and less is
    # called late.
    planned = _handovers(dependencies, plan, planned_ends, [])
    found = [
        LateStart(seconds - planned.get(action, 0.0), action)
        for action, seconds in _handovers(dependencies, run, ends, waits).items()
    ]
    return [late for late in found if late.seconds > 0]


class _Ran(NamedTuple):
    action: Action
    start_s: float
    end_s: float


def _makers(schedule: Schedule, dependencies: Dependencies, place: int) -> list[int]:
    """Return the computations that make what the place's computations need."""
    needed = {dependencies.operand_of(action) for cell in schedule.ranks[place] for action in cell.computations}
    return sorted({rank for value in needed - {NOTHING} for rank in dependencies.route(value).makers})


def _ends(dependencies: Dependencies, computations: Iterable[tuple[Action, float]]) -> dict[int, float]:
    """When each value was made."""
    ends: dict[int, float] = {}
    for action, end in computations:
        value = dependencies.value_of(action)
        ends[value] = max(end, ends.get(value, end))
    ends.pop(NOTHING, None)
    return ends


def _handovers(
    dependencies: Dependencies, rows: Sequence[_Ran], ends: Mapping[int, float], waits: Sequence[float]
) -> dict[Action, float]:
    """Return the seconds before every computation whose input a neighbour made; those whose neighbour left no record
    are left out.

    `waits` are when waits for transfers were over, in order.
    """
    found = {}
    for before, row in pairwise(rows):
        made = ends.get(dependencies.operand_of(row.action))
        if made is not None:
            waited = bisect_right(waits, row.start_s)
            found[row.action] = row.start_s - max(before.end_s, made, waits[waited - 1] if waited else made)
    return found
