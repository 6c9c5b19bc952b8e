"""The long tail of draws keeps what came out, whatever ends a run, and every path is right in some draws of each kind."""

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

from tests.late import hosts
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw
from tests.late.pipeline import LatePipeline
from tests.late.pipelined import LISTED
from tests.late.sharded import SHARDED
from tests.late.tail import DIFFERING, FAILED, RIGHT, ROOT, Tail, cases, outcome

DONE = SimpleNamespace(
    schedule=None, differing=False, replays=0, model=SimpleNamespace(expected=lambda schedule, iterations: {})
)


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


def test_what_ends_a_process_or_hangs_costs_no_other_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run finds the results of the first, and repeats none."""
    monkeypatch.setattr(hosts, "ASLEEP", 3)
    monkeypatch.setattr("tests.late.tail.DIRECTED", ())
    for seconds in (60.0, 0.0):
        tail = Tail(tmp_path / "counts.jsonl", 0, MADE)
        tail._draws = (Draw(0), Draw(1))
        tail.run([*MADE], time.monotonic() + seconds)
        #                   directed, seeds, right, wrong, hung, failed
        assert {line[:16].strip(): [*map(int, line[16:].split())] for line in [*tail.table([*MADE])][1:]} == {
            "goes well": [0, 2, 2, 0, 0, 0],
            "ends its process": [0, 2, 0, 0, 0, 2],
            "waits for ever": [0, 2, 0, 0, 2, 0],
            "stands still": [0, 2, 0, 0, 2, 0],
        }
    assert tail.bad([*MADE]) == 6
    results = [json.loads(line) for line in (tmp_path / "counts.jsonl").read_text().splitlines()]
    said = {result["said"] for result in results if result["case"] == "ends its process"}
    assert said == {f"{FAILED}: its process ended with -9"}


def test_what_is_called_differing_differs() -> None:
    """Three paths had a case of differing sizes of which none differed."""
    made = cases()
    for name in ("interleaved", "vocabulary 1"):
        assert outcome(made[f"{name}, host{DIFFERING}"](), Draw(1)) == (RIGHT, "")
    alike = LatePipeline(SCHEDULES["slices"](), "host", differing=True)
    assert outcome(alike, Draw(1)) == (FAILED, "no sizes differed")


def all_are_right(seconds: int, word: str, seeds: int, folder: Path) -> None:
    """Run the tail over cases with a word in their names."""
    command = [sys.executable, "-m", "tests.late.tail", str(seconds), word, "--seeds", str(seeds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--counts", str(folder / "counts")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    table = [[*map(int, line.split()[-6:])] for line in ended.stdout.splitlines()[1:]]
    assert table
    assert all(case == [len(DIRECTED), seeds, len(DIRECTED) + seeds, 0, 0, 0] for case in table)


@pytest.mark.parametrize("word", ["vocabulary 1, peer, sizes", "interleaved, host, sizes"])
def test_directed_orders_of_a_case_are_right(word: str, tmp_path: Path) -> None:
    all_are_right(500, word, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [*SCHEDULES, *SHARDED, *LISTED])
def test_directed_orders_and_a_few_seeds_of_a_path_are_right(path: str, tmp_path: Path) -> None:
    """`python -m tests.late.tail` runs two hundred seeds, in a night."""
    all_are_right(580, f"{path}, ", 5, tmp_path)
