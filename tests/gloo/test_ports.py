"""A node's memory through two ports in the unmodified trainer: no bit changes, and devices hold what was predicted.

A rank that sends nothing passes every second micro-batch on. Freed and refilled memory is poisoned, so what came back too late, or was
brought from the wrong place, would tell. On a CPU there are no ports: nothing here says how fast it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bpipe.cli import main
from bpipe.ir.host_buffers import STAGING, num_own_buffers, num_passed_on
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import write_csv
from bpipe.program import BalanceConfig, ScheduleConfig, build
from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_parallelism import INTERLEAVED
from tests.gloo.test_placed import ALIKE, CHUNKS, FOUR, alike, as_predicted
from tests.gloo.test_tiers import Run, holds_what_was_predicted, rows_of, trained
from tests.gloo.test_training import same

PORTS = ("--bpipe-hosts", "ports")
BATCH = ("--global-batch-size", "16")


def bound(number: int) -> tuple[str, ...]:
    return (*PORTS, "--bpipe-bound", str(number))


# Stock's flags, and by name those of ours that come behind them.
PLAIN: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "even": (
        BATCH,
        {
            "ports": bound(3),
            "own_loop": (*bound(3), "--bpipe-executor", "--bpipe-transport", "gloo"),
            "synchronous": (*bound(3), "--bpipe-sync-transfers"),
            "timed": (*bound(3), "--timing-log-level", "2"),
            "budget": (*PORTS, "--bpipe-memory", "0.00495"),
            "learned": (*PORTS, "--bpipe-memory", "auto:0.0045"),
        },
    ),
    "chunks": ((*INTERLEAVED, *BATCH), {"interleaved": bound(8), "interleaved_budget": (*PORTS, "--bpipe-memory", "0.00962")}),
    "split": (("--clip-grad", "0", *BATCH), {"halves": ("--bpipe-schedule", "1f1b-split", *bound(3))}),
}
# Weights have names here: stages are elsewhere than stock's.
NAMED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "groups": ((*ALIKE, *BATCH, *FOUR), {"grouped": ("--bpipe-schedule", "grouped-interleaved", *CHUNKS, *bound(5))}),
}


@pytest.fixture(scope="module")
def plain(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(PLAIN, run_cases, request, timeout_s=600)


@pytest.fixture(scope="module")
def named(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(NAMED, run_cases, request, timeout_s=600, worker="named_worker.py")


@pytest.mark.timeout(660)
@pytest.mark.parametrize(("stock", "name"), rows_of(PLAIN, always=("ports",)))
def test_it_changes_no_bit_and_devices_hold_what_was_predicted(plain: Outcome, stock: str, name: str) -> None:
    same(plain, stock, name, 4)
    holds_what_was_predicted(plain, stock, name)
    passes_on(plain, name)


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize(("stock", "name"), rows_of(NAMED))
def test_so_does_a_schedule_with_stages_elsewhere(named: Outcome, stock: str, name: str) -> None:
    alike(named, stock, name)
    as_predicted(named, name, 4, moves=True)
    passes_on(named, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_file_that_says_so_is_trained(run_cases: Run, tmp_path: Path) -> None:
    """Two ranks pass on, each for another, and nobody gave --bpipe-hosts."""
    by_two = build(ScheduleConfig("1f1b", 6, 12, balance=BalanceConfig((4,), hosts="ports")))
    assert sum(num_passed_on(by_two, rank) > 0 for rank in range(6)) == 2
    path = tmp_path / "by_two.csv"
    path.write_text(write_csv(by_two))
    batch = ("--global-batch-size", "24")
    flags = (*batch, "--bpipe-schedule", str(path), *BPIPE, "--bpipe-report", "{folder}/file")
    outcome = run_cases(6, [Case("stock", batch), Case("file", flags)], 280)
    same(outcome, "stock", "file", 6)
    as_predicted(outcome, "file", 6, moves=True)
    assert [report.get("passed_on_buffers", 0) for report in outcome.reports("file")] == [num_passed_on(by_two, rank) for rank in range(6)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_pipeline_of_tensor_parallelism_has_a_rank_that_passes_on(run_cases: Run) -> None:
    size = ("--num-layers", "4", "--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "2", *BATCH)
    flags = (*size, *bound(3), *BPIPE, "--bpipe-report", "{folder}/wide")
    outcome = run_cases(8, [Case("stock", size), Case("wide", flags)], 280)
    same(outcome, "stock", "wide", 8)
    reports = outcome.reports("wide")
    assert len(reports) == 8
    for report in reports:
        assert report["peak_bytes"] == report["predicted_bytes"] > 0
        assert (report.get("passed_on_buffers", 0) > 0) is (report["stage"] == 3)


def passes_on(outcome: Outcome, name: str) -> None:
    """The last rank has slots for others in its node's memory, and keeps nothing of its own there; who sends has both."""
    reports = outcome.reports(name)
    assert reports[3]["passed_on_bytes"] >= 1024 * reports[3]["passed_on_buffers"] > 0
    assert "own_buffers" not in reports[3]
    assert reports[0]["own_buffers"] > 0
    assert all("passed_on_buffers" not in report for report in reports[:3])


def schedule() -> Schedule:
    return build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig((3,), hosts="ports")))


@pytest.mark.timeout(660)
@pytest.mark.parametrize(("stock", "name"), [("even", "ports")])
def test_the_log_the_record_and_the_report_say_who_passes_on(
    plain: Outcome, stock: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = plain.reports(name)
    # Rank 3 has one micro-batch of its own, and two buffers for what passes.
    assert [report["peak_microbatches"] for report in reports] == [3, 3, 2, 1 + STAGING]
    assert [report.get("passed_on_buffers", 0) for report in reports] == [num_passed_on(schedule(), rank) for rank in range(4)]
    assert [report.get("own_buffers", 0) for report in reports] == [num_own_buffers(schedule(), rank) for rank in range(4)]
    said = plain.logs[0].split(f"=== {name}\n")[1].split("===")[0]
    assert (
        "at most 3 held; evicting 0 -> its own memory (2 of 8, 1 host buffers), "
        "0 -> a node's memory through 3 (1 of 8, 1 host buffers and 2 on the device of 3)"
    ) in said
    assert "stages 0 and 3: gloo " in said
    assert "(peer not: one of the two passes on what comes to it into its node's memory, and would not hear when it has come)" in said
    assert "stage 3 and its node's memory: host " in said
    assert main(["report", plain.report_folder(name)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Stage 0 keeps 2 of its 8 micro-batches in its own node's memory, in 1 host buffer of " in text
    assert "Stage 0 sends 1 of its 8 micro-batches through stage 3 into that one's node's memory, in 1 host buffer of " in text
