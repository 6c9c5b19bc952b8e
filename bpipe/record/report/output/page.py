"""Write a view, the plain values of a run's or a simulation's page, as one HTML file.

A simulation (`is_run` false) has no measured side: ranks have names for what is `under` their activations, and stages
say what they hold in `parts`. The page loads nothing from the network: it has its styles, scripts and data. Actions
are columns of whole numbers (ticks of 0.1 microseconds, each column in the shortest of four forms), because the timeline
of a large pipeline has a hundred thousand of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any, NamedTuple

from bpipe.schedule.action import Kind
from bpipe.schedule.files.text import read_action

TICK_S = 1e-7
# Stands for no host buffer, and for no bytes.
NOTHING = -1

SCRIPTS = "data.js format.js tables.js bars.js paint.js lanes.js layout.js timeline.js input.js main.js".split()
_KINDS = tuple(kind.value for kind in Kind)
# A table of distinct values pays only while its indices are shorter than the values.
_MOST_DISTINCT = 1000


def render(view: Mapping[str, Any]) -> str:
    """Return the page. Raises ValueError for a number that is not finite."""
    tracks = _Tracks()
    iterations = [
        {**iteration, "ranks": [_rank(rank, tracks) for rank in iteration["ranks"]]} for iteration in view["iterations"]
    ]
    data = {
        "title": view["title"],
        "is_run": view.get("is_run", True),
        **{name: view[name] for name in ("figures", "facts", "answers", "bottleneck", "stages", "differences")},
        "tick_s": TICK_S,
        "kinds": _KINDS,
        "tracks": tracks.packed,
        "iterations": iterations,
    }
    parts = {
        "TITLE": escape(data["title"]),
        "STYLE": _asset("page.css"),
        "DATA": embed(data),
        "SCRIPT": "\n".join(_asset(name) for name in SCRIPTS),
    }
    # One pass, so that a title cannot insert another part.
    pieces = _asset("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def embed(value: object) -> str:
    """Write JSON for a script element: without `<`, which could end it, and without numbers that JSON lacks."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def column(values: Sequence[int]) -> dict[str, Any]:
    """Write whole numbers in the shortest form: themselves, differences, or indices into either's distinct values."""
    differences = [value - before for before, value in zip([0, *values], values, strict=False)]
    candidates: list[dict[str, Any]] = []
    for name, numbers in (("values", list(values)), ("differences", differences)):
        candidates.append({name: numbers})
        distinct = sorted(set(numbers))
        if len(distinct) == 1:
            candidates.append({name: distinct, "times": len(numbers)})
        elif len(distinct) <= _MOST_DISTINCT:
            places = {value: place for place, value in enumerate(distinct)}
            candidates.append({name: distinct, "of": [places[number] for number in numbers]})
    return min(candidates, key=lambda candidate: len(json.dumps(candidate, separators=(",", ":"))))


class _Tracks:
    """Every track once: all iterations have the same simulation, which is half of the data."""

    def __init__(self) -> None:
        self.packed: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}

    def place(self, track: Mapping[str, Any] | None) -> int | None:
        """Return the track's index in `packed`."""
        if track is None:
            return None
        if id(track) not in self._places:
            self._places[id(track)] = len(self.packed)
            self.packed.append(_track(track))
        return self._places[id(track)]


def _rank(rank: Mapping[str, Any], tracks: _Tracks) -> dict[str, Any]:
    packed = {name: rank[name] for name in ("rank", "label", "bound_bytes")}
    return (
        packed
        | {"under": rank.get("under", [])}
        | {side: tracks.place(rank[side]) for side in ("measured", "simulated")}
    )


def _track(track: Mapping[str, Any]) -> dict[str, Any]:
    """Return one side of one rank as columns."""
    rows = [_packed(*row) for row in track["actions"]]
    return {
        **{name: column([getattr(row, name) for row in rows]) for name in _Packed._fields},
        "memory_time": column([_ticks(time) for time, _ in track["memory"]]),
        "memory_held": column([int(held) for _, held in track["memory"]]),
    }


class _Packed(NamedTuple):
    """An action as whole numbers, each in its column of the track: the kind's index in `_KINDS`, times in ticks."""

    kind: int
    stage: int
    microbatch: int
    start: int
    length: int
    wait: int
    bytes: int
    slot: int


def _packed(text: str, start_s: float, end_s: float, wait_s: float, num_bytes: int | None, slot: int | None) -> _Packed:
    action, start = read_action(text), _ticks(start_s)
    return _Packed(
        kind=_KINDS.index(action.kind.value),
        stage=action.stage,
        microbatch=action.microbatch,
        start=start,
        length=_ticks(end_s) - start,
        wait=_ticks(wait_s),
        bytes=NOTHING if num_bytes is None else int(num_bytes),
        slot=NOTHING if slot is None else int(slot),
    )


def _ticks(seconds: float) -> int:
    return round(seconds / TICK_S)


def _asset(name: str) -> str:
    return resources.files("bpipe.record.report.output").joinpath("assets", name).read_text(encoding="utf-8")
