"""Say what the page draws.

In: a `Report`. Out: plain JSON values: head, rows, differences, and every iteration measured and simulated.

Measured memory is what was seen during each computation and at its end. Computes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bpipe.record.report.answers import bottleneck
from bpipe.record.report.compare import StageRow
from bpipe.record.report.output.facts import facts, figures, hosts, run_name
from bpipe.record.report.replay import Prediction
from bpipe.record.report.report import Report
from bpipe.record.report.selection import Lane, Measured, Timeline
from bpipe.schedule.action import Kind
from bpipe.simulate.report import Level, Simulation, with_host_buffers

_KEYS = (
    "stage",
    "rank",
    "measured_bytes",
    "predicted_bytes",
    "bound_bytes",
    "unbalanced_bytes",
    "weights_bytes",
    "measured_microbatches",
    "predicted_microbatches",
    "evictions",
    "loads",
    "bubble",
    "exposed_s",
    "bytes_per_s",
)


def view(report: Report) -> dict[str, Any]:
    comparison = report.comparison
    simulated = [_simulated(comparison.prediction, row.stage) for row in comparison.stages]
    fullest = bottleneck(comparison)
    notes = [["note", note] for note in comparison.measured.notes]
    return {
        "title": _title(comparison.measured),
        "figures": [list(one) for one in figures(comparison)],
        "facts": [[label, value] for label, value in facts(comparison, beside_figures=True)] + notes,
        "answers": list(report.answers),
        "bottleneck": None if fullest is None else fullest.stage,
        "stages": [{key: getattr(row, key) for key in _KEYS} for row in comparison.stages],
        "differences": [
            {
                "what": one.what,
                "measured": one.measured_text,
                "predicted": one.predicted_text,
                "beside": "; ".join(one.beside),
                "iteration": one.iteration,
            }
            for one in report.differences
        ],
        "iterations": [_iteration(timeline, comparison.stages, simulated) for timeline in comparison.measured.shown],
    }


def _title(measured: Measured) -> str:
    """What tells one open page from another: the run, its day and its machine."""
    parts = [run_name(measured), (measured.run.info.started or "")[:10], hosts(measured)]
    return f"bpipe report: {', '.join(part for part in parts if part)}"


def _iteration(timeline: Timeline, rows: tuple[StageRow, ...], simulated: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "iteration": timeline.iteration,
        "end_s": max(timeline.end_s, *(action[2] for row in simulated for action in row["actions"])),
        "ranks": [
            {
                "rank": row.rank,
                "label": f"stage {row.stage} ({'no record' if row.rank is None else f'rank {row.rank}'})",
                "bound_bytes": row.bound_bytes,
                "measured": None if lane is None else _measured(lane),
                "simulated": planned,
            }
            for row, lane, planned in zip(rows, timeline.lanes, simulated, strict=True)
        ],
    }


def _measured(lane: Lane) -> dict[str, Any]:
    actions = sorted((*lane.computations, *lane.transfers), key=lambda row: row.start_s)
    memory = [(0.0, lane.source.host_bytes), *lane.levels] if lane.levels else []
    return {
        "actions": [[str(row.action), row.start_s, row.end_s, row.wait_s, row.bytes, row.slot] for row in actions],
        "memory": [list(step) for step in memory],
    }


def _simulated(prediction: Prediction, place: int) -> dict[str, Any]:
    return simulated_track(prediction.report, place, prediction.levels(place))


def simulated_track(simulation: Simulation, rank: int, levels: Iterable[Level], under: int = 0) -> dict[str, Any]:
    """Return one rank's actions and what it holds over time, on top of what is `under` it all the time."""
    size_of = simulation.costs.of
    rows: list[list[Any]] = []
    for timed in simulation.computations[rank]:
        kind, stage, microbatch = timed.action.kind, timed.action.stage, timed.action.microbatch
        size = size_of(stage, microbatch).saved_bytes if kind is Kind.FORWARD else None
        rows.append([str(timed.action), float(timed.start_s), float(timed.end_s), 0.0, size, None])
    for timed, buffer in with_host_buffers(simulation, rank):
        size = size_of(timed.action.stage, timed.action.microbatch).moved_bytes
        rows.append([str(timed.action), float(timed.start_s), float(timed.end_s), 0.0, size, buffer])
    return {
        "actions": sorted(rows, key=lambda row: (row[1], row[2])),
        "memory": [[float(level.start_s), under + level.held_bytes] for level in levels],
    }
