"""Every wait of the protocol, taken out of the code one at a time, is noticed on late devices; or it is said why it
cannot be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, DRAWN, Draw
from tests.late.every_wait import FURTHER, ORDERED_ANYWAY, late_waits
from tests.late.mutations import ROOT, TABLE
from tests.late.pipeline import LatePipeline
from tests.late.waits import WAITS


def test_each_wait_is_run_or_said_not_to_be() -> None:
    waits = {(Path(mutation.file).stem, mutation.line, mutation.nth) for mutation in (*TABLE, *FURTHER)}
    assert not ORDERED_ANYWAY.keys() - waits
    run = {(Path(mutation.file).stem, mutation.line, mutation.nth) for mutation in late_waits()}
    # No thread copies on a device.
    assert {module for module, _, _ in waits - run - ORDERED_ANYWAY.keys()} == {"lanes"}
    for mutation in FURTHER:
        compile(mutation.apply(), mutation.file, "exec")


def noticed(folder: Path, word: str = "") -> dict[str, str]:
    command = [sys.executable, "-m", "tests.late.every_wait", str(folder / "found.json"), word]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, str] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("word", ["edges: works.wait()", "collectives: passing"])
def test_a_message_that_nobody_waits_for_is_noticed(word: str, tmp_path: Path) -> None:
    found = noticed(tmp_path, word)
    assert all(found.values())
    assert found


# A pool of hosts, both tiers, sizes that differ, and two pipes: by what moves, and whether sizes differ.
PATHS = (
    ("pool", "two-sided", False),
    ("own memory", "host", False),
    ("behind devices", "peer", False),
    ("1f1b of 6", "two-sided", True),
    ("bidirectional", "two-sided", False),
)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_is_noticed_on_every_path(name: str) -> None:
    for wait in WAITS[name]:
        one_sided = wait.kind != "two-sided"
        for schedule, kind, differing in PATHS:
            if name.startswith("[8]") and (one_sided or kind != wait.kind):
                # Of copies `test_pipelines.py` has the case: it takes a buffer that is filled again while it is read.
                continue
            with wait.taken_out():
                assert is_wrong(schedule, kind, differing), f"{name}, in {schedule} by {kind}: nobody noticed"
        if not name.startswith("[8]"):
            break


def is_wrong(schedule: str, kind: str, differing: bool) -> bool:
    """By wrong bits or an error, in one of a few draws."""
    for draw in (*reversed(DIRECTED[:5]), Draw(0, DRAWN), Draw(1, DRAWN)):
        pipeline = LatePipeline(SCHEDULES[schedule](), kind, differing=differing)
        try:
            found = pipeline.run(draw, 2)
        except RuntimeError:
            return True
        expected = pipeline.model.expected(pipeline.schedule, 2)
        if any(not torch.equal(found[place], expected[place]) for place in expected):
            return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_wait_is_noticed(tmp_path: Path) -> None:
    found = noticed(tmp_path)
    assert found.pop("") == "", "something is wrong with every wait in its place"
    assert [name for name, by in found.items() if not by] == []
