"""Write a view, the plain values of a run's page, as one HTML file, and make that of a run.

The page loads nothing from the network: it has its styles, scripts and data. Actions
are columns of whole numbers (ticks of 0.1 microseconds), each as its differences, because the timeline of a large
pipeline has a hundred thousand of them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from bpipe.record.report.findings import answers, bottleneck, differences
from bpipe.record.report.output.table import facts, figures, hosts, run_name
from bpipe.record.report.report import Report, StageRow
from bpipe.record.report.selection import Lane, Timeline
from bpipe.schedule.action import Kind
from bpipe.schedule.files.text import read_action
from bpipe.simulate.report import Level, Simulation, with_host_buffers

TICK_S = 1e-7
# Stands for no host buffer, and for no bytes.
NOTHING = -1

SCRIPTS = "data.js format.js tables.js bars.js paint.js lanes.js layout.js timeline.js input.js main.js".split()
_KINDS = tuple(kind.value for kind in Kind)
_KEYS = (
    "stage rank measured_bytes predicted_bytes bound_bytes unbalanced_bytes baseline_bytes weights_bytes measured_microbatches "
    "predicted_microbatches evictions loads bubble exposed_s bytes_per_s"
).split()


def render(view: Mapping[str, Any]) -> str:
    """Return the page. Raises ValueError for a number that is not finite."""
    # Every track once: all iterations have the same simulation, which is half of the data.
    ranks = (rank for iteration in view["iterations"] for rank in iteration["ranks"])
    tracks = {id(rank[side]): rank[side] for rank in ranks for side in ("measured", "simulated") if rank[side]}
    places = {track: place for place, track in enumerate(tracks)}

    def packed(rank: Mapping[str, Any]) -> dict[str, Any]:
        sides = {side: places.get(id(rank[side])) for side in ("measured", "simulated")}
        return {name: rank[name] for name in ("rank", "label", "bound_bytes")} | sides

    data = {
        "title": view["title"],
        **{name: view[name] for name in ("figures", "facts", "answers", "bottleneck", "stages", "differences")},
        "tick_s": TICK_S,
        "kinds": _KINDS,
        "tracks": list(map(_track, tracks.values())),
        "iterations": [
            {**iteration, "ranks": list(map(packed, iteration["ranks"]))} for iteration in view["iterations"]
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    parts = {
        "TITLE": escape(data["title"]),
        "STYLE": _asset("page.css"),
        # A script element would end at a `<`, and a line of JavaScript at these two.
        "DATA": text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "SCRIPT": "\n".join(_asset(name) for name in SCRIPTS),
    }
    # One pass, so that a title cannot insert another part.
    pieces = _asset("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _track(track: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return one side of one rank as columns."""
    actions = [(read_action(text), *cells) for text, *cells in track["actions"]]
    columns = {
        "kind": [_KINDS.index(action.kind.value) for action, *_ in actions],
        "stage": [action.stage for action, *_ in actions],
        "microbatch": [action.microbatch for action, *_ in actions],
        "start": [_ticks(start_s) for _, start_s, *_ in actions],
        "length": [_ticks(end_s) - _ticks(start_s) for _, start_s, end_s, *_ in actions],
        "wait": [_ticks(wait_s) for _, _, _, wait_s, *_ in actions],
        "bytes": [NOTHING if num_bytes is None else int(num_bytes) for *_, num_bytes, _ in actions],
        "slot": [NOTHING if slot is None else int(slot) for *_, slot in actions],
        "memory_time": [_ticks(time) for time, _ in track["memory"]],
        "memory_held": [int(held) for _, held in track["memory"]],
    }
    return {name: _differences(values) for name, values in columns.items()}


def _differences(values: Sequence[int]) -> list[int]:
    """Return the differences of each value to the one before."""
    return [value - before for before, value in zip([0, *values], values, strict=False)]


def _ticks(seconds: float) -> int:
    return round(seconds / TICK_S)


def _asset(name: str) -> str:
    return resources.files("bpipe.record.report.output").joinpath("assets", name).read_text(encoding="utf-8")


def view(report: Report) -> dict[str, Any]:
    """Return head, rows, differences, and every iteration measured and simulated.

    Measured memory is what was seen during each computation and at its end.
    """
    measured, prediction = report.measured, report.prediction
    simulated = [simulated_track(prediction.report, row.stage, prediction.levels(row.stage)) for row in report.stages]
    fullest = bottleneck(report)
    # Tell one open page from another: the run, its day and its machine.
    title = ", ".join(filter(None, (run_name(measured), (measured.run.info.started or "")[:10], hosts(measured))))
    pairs = [*facts(report, on_page=True), *(("note", note) for note in measured.notes)]
    return {
        "title": f"bpipe report: {title}",
        "figures": [list(figure) for figure in figures(report)],
        "facts": [[label, value] for label, value in pairs],
        "answers": list(answers(report)),
        "bottleneck": None if fullest is None else fullest.stage,
        "stages": [{key: getattr(row, key) for key in _KEYS} for row in report.stages],
        "differences": [
            {
                "what": difference.what,
                "measured": difference.text(difference.measured),
                "predicted": difference.text(difference.predicted),
                "beside": "; ".join(difference.beside),
                "iteration": difference.iteration,
            }
            for difference in differences(report)
        ],
        "iterations": [_iteration(timeline, report.stages, simulated) for timeline in measured.timelines],
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


def simulated_track(simulation: Simulation, rank: int, levels: Iterable[Level]) -> dict[str, Any]:
    """Return one rank's actions and what it holds over time."""
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
        "memory": [[float(level.start_s), level.held_bytes] for level in levels],
    }
