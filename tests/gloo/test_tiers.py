"""A node's own memory in the unmodified trainer, alone and behind other devices: no bit changes, and devices hold what
was predicted.

Bounds are those that no pair keeps. Freed and refilled memory is poisoned, so what came back too late or to the wrong
place would tell.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.schedule.host_buffers import num_host_memory_buffers
from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import INPUT_BYTES, INTERLEAVED
from tests.gloo.test_placed import ALIKE, CHUNKS, FOUR, alike, as_predicted
from tests.gloo.test_training import same
from tests.gloo.test_two_pipes_trained import ALIKE as OF_TWO_PIPES
from tests.gloo.test_two_pipes_trained import batch, by, pipeline

BATCH = ("--global-batch-size", "16")
HOST, ALL = ("--bpipe-hosts", "host"), ("--bpipe-hosts", "all")
Run = Callable[..., Outcome]

# Stock's flags, and by name those of ours that come behind them.
PLAIN: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "even": (
        BATCH,
        {
            "host": (*HOST, "--bpipe-bound", "2"),
            "host_fewest": (*HOST, "--bpipe-transport", "host"),
            "own_loop": (*HOST, "--bpipe-executor"),
            "all_peer": (*ALL, "--bpipe-bound", "2", "--bpipe-transport", "peer"),
            "all_gloo": (*ALL, "--bpipe-transport", "gloo"),
            "synchronous": (*HOST, "--bpipe-sync-transfers"),
            "differing": (*HOST, "--bpipe-differing-sizes"),
        },
    ),
    "chunks": (
        (*INTERLEAVED, *BATCH),
        {
            "interleaved": (*HOST, "--bpipe-bound", "4"),
            "interleaved_all": (*ALL, "--bpipe-bound", "6", "--bpipe-transport", "peer"),
        },
    ),
}
# Weights have names here: stages are elsewhere than stock's.
NAMED: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "v": (
        (*ALIKE, *BATCH, *FOUR),
        {
            "v-half": ("--bpipe-schedule", "v-half", *HOST),
            "zb-v": ("--bpipe-schedule", "zb-v", *HOST),
            "v-min_all": ("--bpipe-schedule", "v-min", *ALL, "--bpipe-transport", "peer"),
            "grouped": ("--bpipe-schedule", "grouped-interleaved", "--bpipe-group", "2", *CHUNKS, *HOST),
        },
    ),
    "two": (
        (*OF_TWO_PIPES, *batch(8), *pipeline(2)),
        {"chimera": (*by("chimera"), *HOST), "bitpipe": (*by("bitpipe-2"), *ALL, "--bpipe-transport", "peer")},
    ),
}


def rows_of(
    groups: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]], always: tuple[str, ...] = ()
) -> list[object]:
    return [
        pytest.param(stock, name, marks=() if name in always else pytest.mark.slow)
        for stock, (_, rows) in groups.items()
        for name in rows
    ]


def trained(
    groups: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]],
    run: Run,
    request: pytest.FixtureRequest,
    timeout_s: float = 1200,
    **how: str,
) -> Outcome:
    wanted, cases = asked_for(request, "stock", "name"), []
    for stock, (common, rows) in groups.items():
        mine = {name: flags for name, flags in rows.items() if (stock, name) in wanted}
        cases += [Case(stock, common)] if mine else []
        cases += [
            Case(name, (*common, *flags, *BPIPE, "--bpipe-report", f"{{folder}}/{name}"))
            for name, flags in mine.items()
        ]
    return run(4, cases, timeout_s=timeout_s, **how)


@pytest.fixture(scope="module")
def plain(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(PLAIN, run_cases, request)


@pytest.fixture(scope="module")
def named(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(NAMED, run_cases, request, worker="named_worker.py")


@pytest.mark.timeout(1260)
@pytest.mark.parametrize(("stock", "name"), rows_of(PLAIN, always=("host",)))
def test_it_changes_no_bit_and_devices_hold_what_was_predicted(plain: Outcome, stock: str, name: str) -> None:
    same(plain, stock, name, 4)
    if name != "differing":
        holds_what_was_predicted(plain, stock, name)
    in_own_memory(plain, name)


def holds_what_was_predicted(outcome: Outcome, stock: str, name: str) -> None:
    if stock != "chunks":
        as_predicted(outcome, name, 4, moves=True)
        return
    # There the loop keeps an input more or less at times that nothing predicts.
    for report in outcome.reports(name):
        assert report["peak_microbatches"] == report["predicted_microbatches"]
        assert abs(report["peak_bytes"] - report["predicted_bytes"]) <= 2 * INPUT_BYTES


@pytest.mark.slow
@pytest.mark.timeout(1260)
@pytest.mark.parametrize(("stock", "name"), rows_of(NAMED))
def test_so_does_every_kind_of_schedule(named: Outcome, stock: str, name: str) -> None:
    alike(named, stock, name)
    as_predicted(named, name, 4, moves=True)
    in_own_memory(named, name)


def in_own_memory(outcome: Outcome, name: str) -> None:
    """Some rank has buffers there, and memory for them."""
    reports = outcome.reports(name)
    assert any("own_buffers" in report for report in reports)
    assert all(report.get("own_bytes", 0) >= 1024 * report.get("own_buffers", 0) for report in reports)


@pytest.mark.timeout(1260)
@pytest.mark.parametrize(("stock", "name"), [("even", "host")])
def test_two_are_held_where_pairs_hold_three(
    plain: Outcome, stock: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, schedule = (
        plain.reports(name),
        build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig((2,), hosts="host"))),
    )
    assert [report["peak_microbatches"] for report in reports] == [2, 2, 2, 1]
    assert (
        [report.get("own_buffers", 0) for report in reports]
        == [num_host_memory_buffers(schedule, rank) for rank in range(4)]
        == [3, 2, 0, 0]
    )
    said = plain.logs[0].split(f"=== {name}\n")[1].split("===")[0]
    assert (
        "at most 2 held; evicting 0 -> its own memory (7 of 8, 3 host buffers), 1 -> its own memory (6 of 8, 2 host "
        "buffers)" in said
    )
    assert "stage 0 and its node's CPU memory: host " in said
    assert "placement adjacent" not in said
    assert main(["report", plain.report_folder(name)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Stage 0 keeps 7 of its 8 micro-batches in its own node's CPU memory, in 3 host buffers of " in text
