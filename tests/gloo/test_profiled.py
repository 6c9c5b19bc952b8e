"""Megatron's own `--profile` shows the schedule: every computation and transfer is a range in torch's trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.ranges import name_of
from bpipe.schedule.schedule import Schedule
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE

PROFILE = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 0"
BALANCED, SPLIT = "balanced", "split_in_slices"
RUNS = {
    BALANCED: BPIPE,
    SPLIT: "--bpipe-schedule 1f1b-split --bpipe-slices 2 --attention-dropout 0",
}


@pytest.fixture(scope="module")
def profiled(run_cases: Callable[..., Outcome]) -> Outcome:
    cases = [Case("stock", "--global-batch-size 16")]
    for name, flags in RUNS.items():
        written = f"--tensorboard-dir {{folder}}/{name}/board"
        cases.append(Case(name, f"--global-batch-size 16 {PROFILE} {written} {flags}"))
    return run_cases(4, cases, 300)


def schedule_of(case: str) -> Schedule:
    if case == BALANCED:
        return build(ScheduleConfig("1f1b", 4, 8, balance=named_balance("bpipe")))
    return build(ScheduleConfig("1f1b-split", 4, 8, slices=2))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", RUNS)
def test_the_trace_shows_the_schedule(profiled: Outcome, case: str) -> None:
    trace = Path(profiled.folder / case / "torch_profile/rank-0.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("name", "").startswith("bpipe ")]
    assert {event["cat"] for event in found} == {"user_annotation"}
    plan = schedule_of(case)
    expected = [name_of(action, plan.layout.slices) for slot in plan.ranks[0] for action in slot.computations]
    moved = [name_of(action, plan.layout.slices) for slot in plan.ranks[0] for action in slot.transfers]
    assert bool(moved) == (case == BALANCED)
    by_begin = [event["name"] for event in sorted(found, key=lambda event: event["ts"])]
    assert [name for name in by_begin if name not in moved] == expected
    assert sorted(name for name in by_begin if name in moved) == sorted(moved)
    backward = next(event for event in found if event["name"].split()[1] in ("backward", "dgrad"))
    end = backward["ts"] + backward["dur"]
    assert any(
        backward["ts"] < event["ts"] < end for event in events if event.get("name", "").startswith("autograd::")
    ), "autograd's own work stands within it"


@pytest.mark.timeout(300)
def test_a_profiled_training_is_stocks(profiled: Outcome) -> None:
    for rank in range(4):
        stock, found = (profiled.record(case, rank) for case in ("stock", BALANCED))
        assert found["iterations"] == stock["iterations"]
        assert found["weights"] == stock["weights"]
