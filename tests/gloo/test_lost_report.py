"""A report that cannot be written ends no training and changes no bit of it: one line says so, and what can be
written is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from bpipe.record.report.report import report_of
from tests.gloo.compare import same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE

COMMON = f"--stand-in lost_report --global-batch-size 16 {BPIPE} --bpipe-report-iterations 2-3"
CASES = [
    Case("stock", "--global-batch-size 16"),
    *(Case(name, f"{COMMON} --bpipe-report {{folder}}/{name}") for name in ("full", "gone")),
]


@pytest.fixture(scope="module")
def lost(run_cases: Callable[..., Outcome]) -> Outcome:
    return run_cases(4, CASES, 240)


def said(outcome: Outcome, case: str) -> list[str]:
    """What all ranks said of the report of a case."""
    parts = [re.split(r"^=== (\w+)\n", log, flags=re.MULTILINE) for log in outcome.logs]
    return [line for part in parts for line in part[part.index(case) + 1].splitlines() if "recording stops" in line]


@pytest.mark.timeout(300)
def test_a_full_disk_ends_no_training(lost: Outcome) -> None:
    """Two ranks cannot write their records. One of them says so, and the records of the others are whole."""
    same(lost, "stock", "full", 4)
    (line,) = said(lost, "full")
    assert re.fullmatch(
        r"bpipe: rank [12]: /.*/full/record_0000[12]\.jsonl: No space left on device; recording stops on ranks with this error, "
        r"training continues",
        line,
    )
    for rank in (1, 2):
        # Such a device has no end when it is read.
        (lost.folder / f"full/record_{rank:05d}.jsonl").unlink()
    report = report_of(lost.report_folder("full"))
    assert [record.rank for record in report.comparison.measured.run.ranks if record.iterations] == [0, 3]
    assert "no record of ranks 1, 2 (of 4)" in report.comparison.measured.notes


@pytest.mark.timeout(300)
def test_a_folder_that_vanishes_ends_no_training(lost: Outcome) -> None:
    same(lost, "stock", "gone", 4)
    (line,) = said(lost, "gone")
    assert "No such file or directory; recording stops" in line
