"""Traces by a reader that knows only the format: nested slices, ordered times, arrows that touch their slices."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bpipe.record.report.output.trace import write_trace
from bpipe.record.report.report import report_of
from bpipe.schedule.action import Kind
from bpipe.schedule.files.text import read_action
from tests.unit.record.report.recorded import edit_rows, write_run

Event = dict[str, Any]

# By phase: the keys every such event has, with their types.
SCHEMA: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"pid": int, "name": str, "args": dict},
    "X": {"pid": int, "tid": int, "name": str, "cat": str, "ts": float, "dur": float, "args": dict},
    "C": {"pid": int, "name": str, "ts": float, "args": dict},
    "s": {"pid": int, "tid": int, "name": str, "cat": str, "ts": float, "id": int},
    "t": {"pid": int, "tid": int, "name": str, "cat": str, "ts": float, "id": int},
    "f": {"pid": int, "tid": int, "name": str, "cat": str, "ts": float, "id": int, "bp": str},
}


def check_format(text: str) -> list[Event]:
    document = json.loads(text)
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    events: list[Event] = document["traceEvents"]
    for event in events:
        for key, kind in SCHEMA[event["ph"]].items():
            assert isinstance(event[key], kind), (key, event)
        assert event.get("dur", 0) >= 0
        # Whole nanoseconds, to the last bit: a reader that cuts off the rest finds no overlap where there is none.
        assert all((event.get(key, 0) * 1000).is_integer() for key in ("ts", "dur"))
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    return events


def slices(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def check_nesting(events: list[Event]) -> None:
    """Of two slices on a thread one ends before the other starts, or lies inside it."""
    for row in slices(events).values():
        open_ends: list[float] = []
        for event in row:
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], event
            open_ends.append(end)


def arrows(events: list[Event]) -> Iterator[list[Event]]:
    """The slices that each arrow touches, in order. The innermost slice around its end is the one."""
    rows = slices(events)
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            ends[event["id"]].append(event)
    for arrow in ends.values():
        assert [event["ph"] for event in arrow] in (["s", "t", "f"], ["s", "f"])
        touched = []
        for event in arrow:
            around = [
                one for one in rows[event["pid"], event["tid"]] if one["ts"] <= event["ts"] < one["ts"] + one["dur"]
            ]
            touched.append(min(around, key=lambda one: one["dur"]))
        yield touched


def threads(events: list[Event]) -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}


def check(text: str) -> list[Event]:
    events = check_format(text)
    check_nesting(events)
    assert set(slices(events)) <= set(threads(events))
    # Perfetto takes thread 0 and the one numbered as its process for one.
    numbers = [tid for _, tid in threads(events)]
    assert len(set(numbers)) == len(numbers)
    assert not set(numbers) & {0, *(event["pid"] for event in events)}
    return events


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transport": "gloo"},
        {"noise": 0.4, "speed": 0.4e9, "transport": "gloo"},
        {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
        {"clock_error_s": {0: 0.002, 7: -0.003}},
    ],
)
def test_a_measured_trace(tmp_path: Path, changes: dict[str, Any]) -> None:
    measured = report_of(write_run(tmp_path, **changes)).comparison.measured
    events = check(write_trace(measured))
    names = threads(events)
    evictions = [event for event in events if event.get("cat") == "evict"]
    followed = list(arrows(events))
    assert len(followed) == len(evictions) > 0
    for touched in followed:
        kinds = [read_action(event["args"]["action"]).kind for event in touched]
        assert kinds[0] is Kind.EVICT
        assert kinds[-1] is Kind.LOAD
        assert len({(event["args"]["stage"], event["args"]["microbatch"]) for event in touched}) == 1
        middle = touched[1]
        assert names[middle["pid"], middle["tid"]] == f"host buffer {middle['args']['slot']}"
        assert middle["pid"] == measured.records[(measured.schedule.partners or ())[touched[0]["pid"]]].rank  # type: ignore[union-attr]


def test_host_code_that_runs_ahead_has_slices_of_its_own(tmp_path: Path) -> None:
    """On a GPU the host issues a computation long before the device ends it."""

    def ahead(row: dict[str, Any]) -> None:
        row["host_end_s"] = row["host_start_s"] + 0.001

    write_run(tmp_path, iterations=(5,))
    edit_rows(tmp_path, 0, ahead)
    events = check(write_trace(report_of(tmp_path).comparison.measured))
    names = threads(events)
    host = [event for event in events if event["ph"] == "X" and names[event["pid"], event["tid"]] == "host code"]
    assert len([event for event in host if event["name"] == "forward-compute"]) == 16
    assert {event["pid"] for event in host if event["name"] != "forward-backward"} == {0}


def test_a_rank_without_a_record_leaves_out_its_end_of_the_arrow(tmp_path: Path) -> None:
    write_run(tmp_path, transport="gloo", iterations=(5,))
    (tmp_path / "record_00007.jsonl").unlink()
    (tmp_path / "record_00001.jsonl").unlink()
    followed = list(arrows(check(write_trace(report_of(tmp_path).comparison.measured))))
    assert {len(touched) for touched in followed if touched[0]["pid"] == 0} == {2}
    assert {len(touched) for touched in followed if touched[0]["pid"] == 2} == {3}
    assert not any(touched[0]["pid"] == 1 for touched in followed)
