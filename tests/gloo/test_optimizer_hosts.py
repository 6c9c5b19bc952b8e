"""Optimizer's moments wait on other ranks while micro-batches are computed, and no bit of a training changes, nor of
its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import FP16, INTERLEAVED
from tests.gloo.test_placed import RESUMED
from tests.gloo.test_training import same

FLAG = "--bpipe-optimizer-hosts"
# What asks for it, and which rank's moments wait on which.
TWO = ((FLAG, "0:3:0.0004,1:2:0.0001"), ("0:3", "1:2"))
SHARDED = ("--use-distributed-optimizer", "--bf16", "--global-batch-size", "16")
# By row: flags of both, of ours alone, and who waits where in every replica.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "balanced": (SHARDED, (*BPIPE, *TWO[0]), TWO[1]),
    "sharded": (SHARDED, *TWO),
    "whole": (("--global-batch-size", "16"), *TWO),
    "overlaps": ((*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather"), *TWO),
    # Updates that are skipped, with no state to send.
    "skips": ((*FP16, "--global-batch-size", "16", "--train-iters", "6", "--clip-grad", "0.5"), *TWO),
    "evaluates": ((*SHARDED, "--eval-interval", "1", "--eval-iters", "2"), *TWO),
    "chunks": ((*SHARDED, *INTERLEAVED), *TWO),
    "to_several": (SHARDED, (FLAG, "0:3:0.0002,0:2:0.0001"), ("0:2", "0:3")),
    "replicas": (
        (*SHARDED, "--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        (FLAG, "0:1:0.0004"),
        ("0:1", "0:1"),
    ),
    "schedule": (SHARDED, ("--bpipe-schedule", "zb-h1", *TWO[0]), TWO[1]),
}
ALWAYS = ("balanced",)


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    cases = []
    for (row,) in sorted(asked_for(request, "row")):
        both, ours, _ = ROWS[row]
        cases += [Case(row, both), Case(f"{row}_hosted", (*both, *ours))]
    return run_cases(4, cases, timeout_s=540)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in ALWAYS else pytest.mark.slow) for row in ROWS])
def test_moments_that_wait_elsewhere_change_no_bit(four: Outcome, row: str) -> None:
    same(four, row, f"{row}_hosted", 4)
    logs = [log.split(f"=== {row}_hosted\n")[1].split("===")[0] for log in four.logs]
    waiting = [
        found
        for log in logs
        for found in re.findall(r"optimizer: (\S+) GiB of rank (\d)'s moments wait on rank (\d)", log)
    ]
    assert tuple(sorted(f"{giver}:{host}" for _, giver, host in waiting)) == ROWS[row][2]
    assert all(float(gib) >= 0.0001 for gib, _, _ in waiting)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_has_all_of_it_and_a_run_goes_on_from_there(run_cases: Callable[..., Outcome]) -> None:
    common, hosted = (*SHARDED, *RESUMED), TWO[0]
    saved = ("--train-iters", "2", "--save-interval", "2", "--save")
    loaded = ("--train-iters", "3", "--load")
    cases = [
        Case("stock", (*common, *saved, "{folder}/stock")),
        Case("hosted", (*common, *hosted, *saved, "{folder}/hosted")),
        Case("stock_on", (*common, *loaded, "{folder}/stock")),
        Case("from_hosted", (*common, *loaded, "{folder}/hosted")),
        Case("hosted_on", (*common, *hosted, *loaded, "{folder}/hosted")),
    ]
    outcome = run_cases(4, cases, timeout_s=240)
    same(outcome, "stock", "hosted", 4)
    same(outcome, "stock_on", "from_hosted", 4)
    same(outcome, "stock_on", "hosted_on", 4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_there_is_ends_every_rank_and_says_how_much_there_is(run_cases: Callable[..., Outcome]) -> None:
    outcome = run_cases(2, [Case("much", ("--global-batch-size", "8", FLAG, "0:1:3"))], timeout_s=200)
    assert all(code not in (0, None) for code in outcome.codes)
    asked = f"{FLAG} 0:1: 3.000 GiB of rank 0's moments are to wait on rank 1"
    assert f"{asked}, but only 0.00" in outcome.logs[0]
    assert f"{asked}, but it has less" in outcome.logs[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((FLAG, "0:4:1"), f"{FLAG} names rank 4, but a pipeline has ranks 0 to 3"),
        (
            (FLAG, "0:3:1", *BPIPE, "--bpipe-memory", "1"),
            f"{FLAG} with --bpipe-memory, whose plan assumes that all state stays on its rank",
        ),
    ],
)
def test_what_it_cannot_stand_beside_is_refused(
    run_cases: Callable[..., Outcome], flags: tuple[str, ...], reason: str
) -> None:
    outcome = run_cases(4, [Case("refused", ("--global-batch-size", "8", *flags))], timeout_s=120)
    assert outcome.codes == [2] * 4
    assert reason in outcome.logs[0]
