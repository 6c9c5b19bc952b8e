"""What the page draws, as plain JSON values: head, rows, differences, and every iteration measured and simulated.

Measured memory is what was seen during each computation and at its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bpipe.record.report.answers import bottleneck
from bpipe.record.report.compare import StageRow
from bpipe.record.report.output.facts import facts, figures, hosts, run_name
from bpipe.record.report.report import Report
from bpipe.record.report.selection import Lane, Timeline
from bpipe.schedule.action import Kind
from bpipe.simulate.report import Level, Simulation, with_host_buffers

_KEYS = (
    "stage rank measured_bytes predicted_bytes bound_bytes unbalanced_bytes baseline_bytes weights_bytes measured_microbatches "
    "predicted_microbatches evictions loads bubble exposed_s bytes_per_s"
).split()


def view(report: Report) -> dict[str, Any]:
    comparison = report.comparison
    measured, prediction = comparison.measured, comparison.prediction
    simulated = [
        simulated_track(prediction.report, row.stage, prediction.levels(row.stage)) for row in comparison.stages
    ]
    fullest = bottleneck(comparison)
    # Tell one open page from another: the run, its day and its machine.
    title = ", ".join(filter(None, (run_name(measured), (measured.run.info.started or "")[:10], hosts(measured))))
    pairs = [*facts(comparison, on_page=True), *(("note", note) for note in measured.notes)]
    return {
        "title": f"bpipe report: {title}",
        "figures": [list(figure) for figure in figures(comparison)],
        "facts": [[label, value] for label, value in pairs],
        "answers": list(report.answers),
        "bottleneck": None if fullest is None else fullest.stage,
        "stages": [{key: getattr(row, key) for key in _KEYS} for row in comparison.stages],
        "differences": [
            {
                "what": difference.what,
                "measured": difference.measured_text,
                "predicted": difference.predicted_text,
                "beside": "; ".join(difference.beside),
                "iteration": difference.iteration,
            }
            for difference in report.differences
        ],
        "iterations": [_iteration(timeline, comparison.stages, simulated) for timeline in measured.shown],
    }


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


def simulated_track(simulation: Simulation, rank: int, levels: Iterable[Level], under: int = 0) -> dict[str, Any]:
    """Return one rank's actions and what it holds over time, in addition to `under` bytes that it always holds."""
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
