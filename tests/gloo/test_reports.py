"""Trainings with unwritable reports, profiles, or a single stage: no bit changes, and the output is right."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.output.table import table
from bpipe.record.report.report import report_of
from bpipe.runtime.recorder import name_of
from tests.gloo.compare import same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE, REPORT

pytestmark = pytest.mark.timeout(400)

BATCH = "--global-batch-size 16"
RECORDED = f"{BPIPE} --bpipe-report-iterations 2-3 {REPORT} --stand-in lost_report"
PROFILE = (
    "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 0 "
    "--tensorboard-dir {folder}/{case}/board"
)
CASES = {
    "stock": "",
    "full": RECORDED,
    "gone": RECORDED,
    "balanced": f"{PROFILE} {BPIPE}",
    "split_in_slices": f"{PROFILE} --bpipe-schedule 1f1b-split --bpipe-slices 2 --attention-dropout 0",
}


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome]) -> Outcome:
    return run_cases(4, [Case(name, f"{BATCH} {flags}") for name, flags in CASES.items()], 380)


@pytest.mark.parametrize("case", ["full", "gone", "balanced"])
def test_no_bit_changes(four: Outcome, case: str) -> None:
    same(four, "stock", case)


def test_a_full_disk_ends_no_training(four: Outcome) -> None:
    """Two ranks cannot write their records; one of them reports it, and the others' records are complete."""
    (line,) = (line for line in four.said("full", None).splitlines() if "recording stops" in line)
    assert re.fullmatch(
        r"bpipe: rank [12]: /.*/full/record_0000[12]\.jsonl: No space left on device; recording .*", line
    )
    for rank in (1, 2):
        # Reading this device would never end.
        (four.folder / f"full/record_{rank:05d}.jsonl").unlink()
    report = report_of(four.report_folder("full"))
    assert [record.rank for record in report.measured.run.ranks if record.iterations] == [0, 3]
    assert "no record of ranks 1, 2 (of 4)" in report.measured.notes


def test_a_folder_that_vanishes_ends_no_training(four: Outcome) -> None:
    (line,) = (line for line in four.said("gone", None).splitlines() if "recording stops" in line)
    assert "No such file or directory" in line


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("balanced", ScheduleConfig("1f1b", 4, 8, balance=named_balance("bpipe"))),
        ("split_in_slices", ScheduleConfig("1f1b-split", 4, 8, slices=2)),
    ],
)
def test_megatrons_profile_shows_the_schedule(four: Outcome, case: str, config: ScheduleConfig) -> None:
    """Every computation and transfer is a range in torch's trace."""
    trace = Path(four.folder / case / "torch_profile/rank-0.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ranges = sorted(
        (event for event in events if event.get("name", "").startswith("bpipe ")), key=lambda event: event["ts"]
    )
    assert {event["cat"] for event in ranges} == {"user_annotation"}
    plan = build(config)
    computed = [name_of(action, plan.layout.slices) for slot in plan.ranks[0] for action in slot.computations]
    moved = [name_of(action, plan.layout.slices) for slot in plan.ranks[0] for action in slot.transfers]
    assert bool(moved) == (case == "balanced")
    names = [event["name"] for event in ranges]
    assert [name for name in names if name not in moved] == computed
    assert sorted(name for name in names if name in moved) == sorted(moved)
    backward = next(event for event in ranges if event["name"].split()[1] in ("backward", "dgrad"))
    end = backward["ts"] + backward["dur"]
    assert any(
        backward["ts"] < event["ts"] < end for event in events if event.get("name", "").startswith("autograd::")
    ), "autograd's own work stands within it"


def test_one_stage_says_so_and_is_recorded(run_cases: Callable[..., Outcome]) -> None:
    """Two replicas of a model of one stage: there is nothing to balance."""
    flags = f"--pipeline-model-parallel-size 1 {BATCH}"
    outcome = run_cases(2, [Case("stock", flags), Case("asked", f"{flags} {BPIPE} {REPORT}")], 200)
    same(outcome, "stock", "asked", 2)
    message = "bpipe: 1f1b, 1 stage, 4 micro-batches: a single stage has no other to share with; training as usual"
    assert sum(log.count(message) for log in outcome.logs) == 1
    for row in outcome.reports("asked"):
        assert (row["peak_microbatches"], row["evictions"]) == (1, 0)
        assert row["peak_bytes"] == row["predicted_bytes"] > 0
    report = report_of(outcome.report_folder("asked"))
    assert report.measured.schedule.num_ranks == 1
    assert "With 1 stage and 4 micro-batches there was nothing to balance." in table(report)
