"""Balanced training equals stock Megatron's to the last bit, on real processes, and holds what the schedule predicts.

Stock is Megatron without our patches. The balanced runs poison memory that they free or load into, so a missing byte or
wait would change a loss.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.build import build
from bpipe.record.format import read_program
from bpipe.record.report.report import report_of
from tests.gloo.compare import same
from tests.gloo.conftest import Case, Outcome
from tests.gloo.flags import BPIPE, MEASURED, REPORT

pytestmark = pytest.mark.timeout(300)

EIGHT = "--global-batch-size 16"
SAVED = f"{EIGHT} --train-iters 4 --save-interval 2 --save"
RESUMED = f"{EIGHT} --train-iters 4 --ckpt-step 2 --load"
FOUR_STAGES = {
    "m8": EIGHT,
    **{
        f"m8_{name}": f"{EIGHT} {BPIPE} {flags} {REPORT}"
        for name, flags in {
            "balanced": "",
            "gloo": "--bpipe-transport gloo",
            "peer": "--bpipe-transport peer --bpipe-report-iterations 2-3",
            "host": "--bpipe-transport host",
            # Only rank 1 exceeds its bound.
            "bounds": "--bpipe-transport gloo --bpipe-bound 4,2,4,1",
            "gloo_synchronous": "--bpipe-transport gloo --bpipe-sync-transfers",
            "peer_synchronous": "--bpipe-transport peer --bpipe-sync-transfers",
            "gloo_small": "--bpipe-transport gloo --bpipe-min-bytes 100000000",
            "peer_small": "--bpipe-transport peer --bpipe-min-bytes 100000000",
            "host_small": "--bpipe-transport host --bpipe-min-bytes 100000000",
        }.items()
    },
    "m8_measured": f"{EIGHT} {MEASURED}",
    "m4": "--global-batch-size 8",
    "m4_balanced": f"--global-batch-size 8 {BPIPE} {REPORT}",
    # The norm saves a 32-bit copy of the stage's input, not the 16-bit input itself.
    "bf16_measured": f"--normalization RMSNorm --bf16 {EIGHT} {BPIPE} {REPORT}",
    # As many micro-batches as the bound: nothing has to move.
    "m3": "--global-batch-size 6",
    "m3_balanced": f"--global-batch-size 6 {BPIPE}",
    "saved_stock": f"{SAVED} {{folder}}/s",
    "saved_balanced": f"{SAVED} {{folder}}/b {BPIPE}",
    "stock_from_balanced": f"{RESUMED} {{folder}}/b",
    "balanced_from_stock": f"{RESUMED} {{folder}}/s {BPIPE}",
}


# Cases that only slow tests use.
ONLY_SLOW = ("m4", "m4_balanced", "m8_peer_synchronous", "m8_peer_small", "m8_host_small", "balanced_from_stock")


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    slow = request.config.getoption("--slow")
    return run_cases(4, [Case(name, flags) for name, flags in FOUR_STAGES.items() if slow or name not in ONLY_SLOW])


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("microbatches", [8, slowly(4), 3])
def test_four_stages_train_as_stock_does(four: Outcome, microbatches: int) -> None:
    same(four, f"m{microbatches}", f"m{microbatches}_balanced", 4)


def test_with_a_bound_for_each_rank_only_what_must_leaves_and_no_bit_changes(four: Outcome) -> None:
    same(four, "m8", "m8_bounds", 4)
    assert "evicting 1 -> 2 (6 of 8, 2 host buffers)\n" in four.said("m8_bounds")


TRANSPORTS = ["gloo", "peer", "host", "gloo_synchronous", slowly("peer_synchronous")]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_carries_the_same_bits(four: Outcome, transport: str) -> None:
    same(four, "m8", f"m8_{transport}", 4)
    printed = four.said(f"m8_{transport}")
    assert f"bpipe:   stages 0 and 3: {transport.removesuffix('_synchronous')} " in printed
    assert printed.count("bpipe: batch_p2p_sync is off in this run: ") == 1


@pytest.mark.parametrize(("case", "synchronous"), [("m8_gloo", False), ("m8_gloo_synchronous", True)])
def test_the_report_knows_whether_transfers_were_waited_for(four: Outcome, case: str, synchronous: bool) -> None:
    comparison = report_of(four.report_folder(case))
    assert comparison.measured.run.info.synchronous is synchronous
    assert (comparison.stages[0].predicted_exposed_s > 0) or not synchronous


@pytest.mark.parametrize(
    ("case", "peaks", "evictions"),
    [
        ("m8_measured", [4, 3, 2, 1], [0, 0, 0, 0]),
        ("m8_balanced", [3, 3, 2, 3], [3, 0, 0, 0]),
        ("m8_gloo", [3, 3, 2, 3], [3, 0, 0, 0]),
        ("m8_peer", [3, 3, 2, 3], [3, 0, 0, 0]),
        # With this transport, the acceptor's memory is not used.
        ("m8_host", [3, 3, 2, 1], [3, 0, 0, 0]),
        ("m8_bounds", [4, 2, 4, 1], [0, 6, 0, 0]),
        slowly("m4_balanced", [3, 3, 2, 3], [1, 0, 0, 0]),
        ("bf16_measured", [3, 3, 2, 3], [3, 0, 0, 0]),
    ],
)
def test_measured_peaks_are_the_predicted(four: Outcome, case: str, peaks: list[int], evictions: list[int]) -> None:
    reports = four.reports(case)
    if case == "m4_balanced":
        peaks = [3, 3, 2, 2]  # the acceptor hosts one of four
    assert [report["peak_microbatches"] for report in reports] == peaks
    assert [report["predicted_microbatches"] for report in reports] == peaks
    assert [report["evictions"] for report in reports] == [report["loads"] for report in reports] == evictions
    for report in reports:
        assert report["peak_bytes"] == report["predicted_bytes"] > 0, f"stage {report['stage']}"


@pytest.mark.parametrize(("case", "iterations"), [("m8_gloo", [3]), ("m8_peer", [2, 3]), ("m8_measured", [3])])
def test_the_record_holds_every_action_of_the_program(four: Outcome, case: str, iterations: list[int]) -> None:
    """A rank's rows are its program, computations in order; one-sided copies are only in the evictor's rows."""
    folder = Path(four.report_folder(case))
    firsts = [json.loads(path.read_text().splitlines()[0]) for path in folder.glob("[rm]*_0000*.jsonl")]
    whole = [json.loads(path.read_text()) for path in folder.glob("r*.json")]
    runs = {line["run"] for line in (*firsts, *whole)}
    assert (len(firsts), len(whole), len(runs)) == (8, 5, 1), "one name in all files of a run"
    for rank in range(4):
        path = folder / f"record_{rank:05d}.jsonl"
        header, *lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert (header["rank"], header["place"], header["pipeline"]) == (rank, rank, 0)
        assert header["weights_bytes"] > 0
        assert [line["iteration"] for line in lines] == iterations
        schedule = build(read_program(lines[-1]["program"]))
        program = [str(slot.compute) for slot in schedule.ranks[rank] if slot.compute is not None]
        rows = [dict(zip(lines[-1]["columns"], row, strict=True)) for row in lines[-1]["actions"]]
        computed = [row for row in rows if row["slot"] is None]
        assert [row["action"] for row in computed] == program
        assert all(before["end_s"] <= after["start_s"] for before, after in itertools.pairwise(computed))
        moved = sorted(str(action) for slot in schedule.ranks[rank] for action in slot.transfers)
        if case == "m8_peer":
            moved = [action for action in moved if "HOST" not in action and "RETURN" not in action]
        assert sorted(row["action"] for row in rows if row["slot"] is not None) == moved
        assert all(0 <= row["start_s"] <= row["end_s"] and 0 <= row["wait_s"] <= lines[-1]["elapsed_s"] for row in rows)
        assert max(row["live_bytes"] for row in computed) == four.reports(case)[rank]["peak_bytes"]


def test_evicted_bytes_are_really_freed(four: Outcome) -> None:
    """Stage 0 holds three micro-batches instead of four, and of the fourth only what is too small to move."""
    plain, balanced = four.reports("m8_measured")[0], four.reports("m8_balanced")[0]
    a_microbatch = plain["peak_bytes"] / 4
    assert plain["peak_bytes"] - balanced["peak_bytes"] > 0.97 * a_microbatch


def test_where_nothing_moves_one_line_says_so(four: Outcome) -> None:
    printed = four.said("m3_balanced")
    why = "pairing stages cannot get all of them below the 3 micro-batches that the fullest stage holds alone"
    assert f"bpipe: 1f1b, 4 stages, 3 micro-batches: {why}; training as usual" in printed
    assert "batch_p2p_sync" not in printed, "what waits in stock waits here too"


def test_what_part_of_a_micro_batch_moves_is_said_and_recorded(four: Outcome) -> None:
    """The middle stages evict nothing, so they print nothing."""
    printed = four.said("m8_gloo", None)
    (line,) = re.findall(r"^bpipe: stage \d moves [01]\.\d\d of what a forward keeps .*", printed, re.MULTILINE)
    fraction = float(line.split()[4])
    assert line.startswith("bpipe: stage 0 ")
    assert "MB, counted over the storages that its graph shows)" in line
    assert line.endswith(" MB are attention scores: attention runs unfused"), "the local layers run it so"
    assert fraction > 0.9, "dropout masks and scores move; some small norms' means stay"
    fractions = [report["moved_fraction"] for report in four.reports("m8_gloo")]
    assert [None if share is None else round(share, 2) for share in fractions] == [fraction, None, None, None]
    assert [report["moved_fraction"] for report in four.reports("m8_measured")] == [None] * 4
    assert report_of(four.report_folder("m8_gloo")).stages[0].moved_fraction == fractions[0]
    assert "moves 0.00" not in "".join(four.logs)


@pytest.mark.parametrize("transport", ["gloo", slowly("peer"), slowly("host")])
def test_a_model_too_small_to_move_trains_as_stock_does(four: Outcome, transport: str) -> None:
    """Both ends of a pair know that nothing is sent, and the reports say so; this once ended with an error."""
    case = f"m8_{transport}_small"
    same(four, "m8", case, 4)
    printed = four.said(f"{case}", None)
    assert (
        printed.count("bpipe: stage 0 moves nothing: no storage that a forward saves is both at least 100000000 bytes")
        == 1
    )
    reports, unbalanced = four.reports(case), four.reports("m8_measured")
    assert [report["evictions"] for report in reports] == [report["loads"] for report in reports] == [0, 0, 0, 0]
    for report, plain in zip(reports, unbalanced, strict=True):
        assert report["peak_microbatches"] == report["predicted_microbatches"] == plain["peak_microbatches"]
        assert report["peak_bytes"] == report["predicted_bytes"] == plain["peak_bytes"]
    rows = report_of(four.report_folder(case)).stages
    assert [(row.measured_microbatches, row.predicted_microbatches, row.evictions) for row in rows] == [
        (4, 4, 0),
        (3, 3, 0),
        (2, 2, 0),
        (1, 1, 0),
    ]


@pytest.mark.parametrize(
    ("saved", "resumed"), [("saved_balanced", "stock_from_balanced"), slowly("saved_stock", "balanced_from_stock")]
)
def test_a_checkpoint_does_not_know_of_balancing(four: Outcome, saved: str, resumed: str) -> None:
    same(four, "saved_stock", saved, 4)
    same(four, saved, resumed, 4, last=2)


def test_eight_stages_hold_five_each(run_cases: Callable[..., Outcome]) -> None:
    """All ranks wait for NCCL's first batch of messages in a group, so runs with 8 stages deadlocked in iteration 1.

    Rank 6 waited for rank 1's first message, which waited for rank 0's, and rank 0 waited for rank 6.
    """
    outcome = run_cases(
        8,
        [
            Case("stock", "--stand-in births --global-batch-size 32"),
            Case("balanced", f"--stand-in births --global-batch-size 32 {BPIPE} --bpipe-report {{folder}}/balanced"),
        ],
    )
    same(outcome, "stock", "balanced", 8)

    def column(name: str) -> list[Any]:
        return [report[name] for report in outcome.reports("balanced")]

    assert column("peak_microbatches") == column("predicted_microbatches") == [5, 5, 5, 5, 4, 5, 5, 5]
    assert column("evictions") == [6, 6, 3, 0, 0, 0, 0, 0]
    assert column("peak_bytes") == column("predicted_bytes")


@pytest.mark.timeout(120)
def test_two_stages_train_as_usual(run_cases: Callable[..., Outcome]) -> None:
    outcome = run_cases(2, [Case("stock", "--global-batch-size 8"), Case("balanced", f"--global-batch-size 8 {BPIPE}")])
    same(outcome, "stock", "balanced", 2)
    why = "pairing stages cannot get all of them below the 2 micro-batches that the fullest stage holds alone"
    assert f"bpipe: 1f1b, 2 stages, 4 micro-batches: {why}; training as usual" in outcome.logs[0]
