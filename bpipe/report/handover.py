"""Tell how long a stage stood ready although its input was computed. In: a timeline and its prediction. Out: seconds by computation.

A computation can start when the one before it is over, its neighbour has computed its input, and the transfers that its rank waited for
have ended. What passes from then on is the hand-over: the message, and with exchanges that block also whoever it is exchanged with. A
prediction has hand-overs, too, so only what is more than predicted is late. Knows no cause.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bpipe.ir.action import Action, Kind
from bpipe.report.compare import Comparison
from bpipe.report.measured import Timeline


class Late(NamedTuple):
    """How much longer than predicted the hand-over before a computation took."""

    seconds: float
    action: Action


def late_starts(comparison: Comparison, timeline: Timeline, place: int) -> list[Late]:
    """Those of one place that were late at all."""
    lane = timeline.lanes[place]
    if lane is None:
        return []
    owner, report = comparison.measured.schedule.layout.only_placement, comparison.prediction.report
    around = _around(owner, place)
    rows = [timeline.lanes[other] for other in around]
    ends = {row.action: row.end_s for other in rows if other is not None for row in other.computations}
    waits = sorted(row.end_s for row in lane.transfers if row.wait_s > 0)
    run = [_Ran(row.action, row.start_s, row.end_s) for row in lane.computations]
    planned_ends = {timed.action: float(timed.end_s) for other in around for timed in report.computations[other]}
    plan = [_Ran(timed.action, float(timed.start_s), float(timed.end_s)) for timed in report.computations[place]]
    # The simulation does not say where a rank waits for transfers; there such a wait counts as a hand-over, and less is called late.
    planned = _handovers(plan, planned_ends, [])
    found = [Late(seconds - planned.get(action, 0.0), action) for action, seconds in _handovers(run, ends, waits).items()]
    return [late for late in found if late.seconds > 0]


class _Ran(NamedTuple):
    action: Action
    start_s: float
    end_s: float


def _around(owner: Sequence[int], place: int) -> list[int]:
    """The place and those that compute its stages' inputs."""
    stages = [stage + step for stage, of in enumerate(owner) if of == place for step in (-1, 0, 1)]
    return sorted({owner[stage] for stage in stages if 0 <= stage < len(owner)})


def _handovers(rows: Sequence[_Ran], ends: Mapping[Action, float], waits: Sequence[float]) -> dict[Action, float]:
    """Seconds before every computation whose input a neighbour made; those whose neighbour left no record are left out.

    `waits` are when waits for transfers were over, in order.
    """
    found = {}
    for before, row in pairwise(rows):
        made = ends.get(_input_of(row.action))
        if made is not None:
            waited = bisect_right(waits, row.start_s)
            found[row.action] = row.start_s - max(before.end_s, made, waits[waited - 1] if waited else made)
    return found


def _input_of(action: Action) -> Action:
    step = -1 if action.kind is Kind.FORWARD else 1
    return Action(action.stage + step, action.kind, action.microbatch)
