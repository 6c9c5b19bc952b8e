"""A run that differs in a known way from its prediction: the difference is found, with what was measured beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bpipe.record.report.differences import Difference
from bpipe.record.report.report import report_of
from bpipe.schedule.action import Kind
from tests.unit.record.report.recorded import edit_rows, write_run


def found(folder: Path, iteration: int | None = None, **changes: Any) -> dict[str, Difference]:
    return {one.kind: one for one in report_of(write_run(folder, **changes), iteration).differences}


def test_one_slow_micro_batch(tmp_path: Path) -> None:
    """It shows in the iteration, in its stage's mean, and in what another stage waits."""
    changes = found(tmp_path, 6, slow={(6, "3B7"): 0.06})
    stage = "stage 3 computed 60 ms longer than its medians"
    assert changes["iteration"].beside == ("3B7 took 60 ms longer than the median of its stage", stage)
    assert changes["backward"].what == "stage 3, backward (mean)"
    assert changes["backward"].beside[0] == "the slowest of 16, 3B7 in iteration 6, took 80 ms"
    assert changes["waiting"].beside == (stage,)


def edited(folder: Path, rank: int, change: Callable[[dict[str, Any]], None], **changes: Any) -> dict[str, Difference]:
    edit_rows(write_run(folder, **changes), rank, change)
    return {one.kind: one for one in report_of(folder).differences}


def waits(seconds: float, *actions: str) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        if row["action"] in actions:
            row["wait_s"] = seconds

    return change


def test_waits_for_transfers(tmp_path: Path) -> None:
    one = edited(tmp_path, 1, waits(0.05, "1LOAD3"), iterations=(5,))["exposed"]
    assert one.beside[-1] == "the longest of 1 wait, 50 ms, was for 1LOAD3 in iteration 5"
    several = waits(0.02, "0EVICT3", "0EVICT4", "0LOAD3")
    slow = edited(tmp_path / "slow", 0, several, probe=None, speed=0.9e9)["exposed"]
    assert slow.beside[0] == "a transfer took 11.7 ms, a forward 10 ms"
    assert slow.beside[1].startswith("the longest of 9 waits, 20 ms, was for 0")


def test_computations_beside_a_transfer_are_slower(tmp_path: Path) -> None:
    """The forwards of stage 0 that a transfer overlaps take 1.4 times as long as the others."""
    plain = (
        report_of(write_run(tmp_path / "plain", iterations=(5,), speed=1.2e9))
        .comparison.measured.timelines[0]
        .present[0]
    )
    forwards = [row for row in plain.computations if row.action.kind is Kind.FORWARD]
    during = [
        row.action
        for row in forwards
        if any(min(row.end_s, other.end_s) - max(row.start_s, other.start_s) > 0.005 for other in plain.transfers)
    ]
    assert 4 <= len(during) < 12
    one = found(
        tmp_path / "slow", iterations=(5,), speed=1.2e9, probe=None, slow={(5, str(action)): 0.004 for action in during}
    )["forward"]
    assert "those during a transfer took 14 ms on average, others 10 ms" in one.beside


def test_micro_batches_that_differ_in_size(tmp_path: Path) -> None:
    def smaller(row: dict[str, Any]) -> None:
        if row["action"] in ("4F5", "4F6"):
            row["bytes"] = 8_000_000

    one = edited(tmp_path, 4, smaller, extra_bytes={4: -3_000_000})["peak"]
    assert one.beside[1] == "micro-batches of 7.6 MiB to 10.5 MiB"


def test_what_the_model_still_refers_to(tmp_path: Path) -> None:
    """Recomputed experts keep the input of their last recomputation."""

    def kept(row: dict[str, Any]) -> None:
        if row["action"] == "4B15":
            row["left_bytes"] += 3_000_000

    one = edited(tmp_path, 4, kept, extra_bytes={4: 2_500_000})["peak"]
    assert one.beside[-1] == "2.9 MiB of saved activations still in memory after the last backward"
