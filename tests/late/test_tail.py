"""The long tail of draws keeps what came out, whatever ends it, and says of each case how it came out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.late import watching
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw
from tests.late.pipeline import KINDS, LatePipeline
from tests.late.pipelined import LISTED
from tests.late.sharded import SHARDED
from tests.late.tail import (
    DIFFERING,
    FAILED,
    FIRST,
    OWN,
    RIGHT,
    ROOT,
    SEEDS,
    WRONG,
    Counts,
    Tail,
    cases,
    outcome,
)

DONE = SimpleNamespace(schedule=None, differing=False, model=SimpleNamespace(expected=lambda schedule, iterations: {}))


def runs(does: Any) -> Any:
    return lambda: SimpleNamespace(**vars(DONE), run=lambda draw, iterations: does())


def say_that_nobody_goes_on() -> None:
    raise RuntimeError("late: nobody can go on: a host waits")


MADE = {
    "goes well": runs(dict),
    "ends its process": runs(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "waits for ever": runs(lambda: threading.Event().wait()),
    "stands still": runs(say_that_nobody_goes_on),
}


def of_table(tail: Tail) -> dict[str, list[int]]:
    """Return directed orders, seeds and outcomes by case."""
    return {line[:16].strip(): [*map(int, line[16:].split())] for line in [*tail.table([*MADE])][1:]}


def test_what_ends_a_process_or_hangs_costs_no_other_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "ASLEEP", 3)
    monkeypatch.setattr("tests.late.tail.DIRECTED", ())
    tail = Tail(Counts(tmp_path / "counts.jsonl", "code"), 0, MADE)
    tail._draws = (Draw(0), Draw(1))
    tail.run([*MADE], time.monotonic() + 60)
    #                   directed, seeds, right, wrong, hung, failed
    assert of_table(tail) == {
        "goes well": [0, 2, 2, 0, 0, 0],
        "ends its process": [0, 2, 0, 0, 0, 2],
        "waits for ever": [0, 2, 0, 0, 2, 0],
        "stands still": [0, 2, 0, 0, 2, 0],
    }
    assert tail.bad([*MADE]) == 6
    said = [json.loads(line) for line in (tmp_path / "counts.jsonl").read_text().splitlines()]
    assert {one["said"] for one in said if one["case"] == "ends its process"} == {
        f"{FAILED}: its process ended with -9"
    }


def test_a_fork_ends_with_its_parent(tmp_path: Path) -> None:
    """One whose parent had been ended went on alone."""
    tail = Tail(Counts(tmp_path / "counts.jsonl", "code"), 0, MADE)
    tail._work([("goes well", 0)], time.monotonic() + 60, parent=os.getpid())
    assert not (tmp_path / "counts.jsonl").read_text()


def test_who_was_interrupted_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "counts.jsonl"
    counts = Counts(path, "code")
    with counts.writer() as file:
        file.write(counts.line(("goes well", 0), RIGHT, "", Draw(0), 1.0))
        file.write(counts.line(("goes well", 1), WRONG, "rank and stage: [(0, 0)]", Draw(1), 1.0)[:20])
    tail = Tail(Counts(path, "code"), 0, {"goes well": MADE["goes well"]})
    assert [*tail.pending(["goes well"])] == [("goes well", number) for number in range(1, len(DIRECTED))]
    tail.run(["goes well"], time.monotonic() + 60)
    assert not [*tail.pending(["goes well"])]
    other = Tail(Counts(path, "other code"), 0, {"goes well": MADE["goes well"]})
    assert len([*other.pending(["goes well"])]) == len(DIRECTED)


def test_every_path_is_a_case_over_every_transport() -> None:
    names = cases()
    for name in FIRST:
        for kind in KINDS if name not in OWN else ("host",):
            assert f"{name}, {kind}" in names
            assert f"{name}, {kind}{DIFFERING}" in names


def test_what_is_called_differing_differs() -> None:
    """Three paths had a case of differing sizes of which none differed."""
    made = cases()
    for name in ("interleaved", "vocabulary 1"):
        assert outcome(made[f"{name}, host{DIFFERING}"](), Draw(1)) == (RIGHT, "")
    alike = LatePipeline(SCHEDULES["slices"](), "host", differing=True)
    assert outcome(alike, Draw(1)) == (FAILED, "no sizes differed")


def table_of(*arguments: str) -> list[list[int]]:
    """Run the tail; return of each case directed orders, seeds and outcomes."""
    command = [sys.executable, "-m", "tests.late.tail", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [[*map(int, line.split()[-6:])] for line in ended.stdout.splitlines()[1:]]


@pytest.mark.parametrize("word", ["vocabulary 1, peer, sizes", "interleaved, host, sizes"])
def test_directed_orders_of_a_case_are_right(word: str, tmp_path: Path) -> None:
    table = table_of("500", word, "--seeds", "1", "--counts", str(tmp_path / "counts"))
    assert table
    assert all(case == [len(DIRECTED), 1, len(DIRECTED) + 1, 0, 0, 0] for case in table)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", [*SCHEDULES, *SHARDED, *LISTED])
def test_two_hundred_seeds_of_a_path_are_right(path: str) -> None:
    """What was counted stays in runs/late, so an interrupted test goes on there."""
    table = table_of("7000", f"{path}, ")
    assert table
    assert all(case == [len(DIRECTED), SEEDS, len(DIRECTED) + SEEDS, 0, 0, 0] for case in table)
