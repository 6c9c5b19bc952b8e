"""A run that differs in a known way from its prediction: the difference is found, with what was measured beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.record.report.context import beside_waiting
from bpipe.record.report.differences import MOST, Difference
from bpipe.record.report.report import report_of
from bpipe.schedule.action import Kind
from tests.unit.record.report.recorded import MOVED, SAVED, edit_rows, write_run


def found(folder: Path, iteration: int | None = None, **changes: Any) -> dict[str, Difference]:
    return {one.kind: one for one in report_of(write_run(folder, **changes), iteration).differences}


def test_a_run_as_predicted_has_no_differences(tmp_path: Path) -> None:
    assert found(tmp_path, message_s=0.0005, noise=0.001) == {}


def test_a_warm_up(tmp_path: Path) -> None:
    (one,) = found(tmp_path, warm_up=5).values()
    assert one.what == "iteration 5, pipeline time"
    assert one.measured == pytest.approx(1.5 * one.predicted)
    assert one.share == pytest.approx(0.5)
    assert one.beside[0] == "the first recorded iteration, whose stages computed 1.50 times as long as later"


def test_a_slow_iteration_that_is_not_the_first_is_no_warm_up(tmp_path: Path) -> None:
    one = found(tmp_path, warm_up=6)["iteration"]
    assert one.what == "iteration 6, pipeline time"
    assert one.beside[1].endswith("computed 240 ms longer than its medians")


def test_one_slow_micro_batch(tmp_path: Path) -> None:
    """It shows in the iteration, in its stage's mean, and in what another stage waits."""
    changes = found(tmp_path, 6, slow={(6, "3B7"): 0.06})
    stage = "stage 3 computed 60 ms longer than its medians"
    assert changes["iteration"].beside == ("3B7 took 60 ms longer than the median of its stage", stage)
    assert changes["backward"].what == "stage 3, backward (mean)"
    assert changes["backward"].beside[0] == "the slowest of 16, 3B7 in iteration 6, took 80 ms"
    assert changes["waiting"].beside == (stage,)


def test_times_that_vary(tmp_path: Path) -> None:
    facts = [fact for one in found(tmp_path / "a", noise=0.4).values() for fact in one.beside]
    assert any(fact.startswith("a quarter took less than ") for fact in facts)
    assert not any("cores" in fact for fact in facts)
    crowded = found(tmp_path / "b", noise=0.4, cores=2)
    assert all(one.beside[-1] == "8 ranks share 2 cores on node-0" for one in crowded.values())


def test_transfers_slower_than_the_probe(tmp_path: Path) -> None:
    one = found(tmp_path, probe=4e9, speed=0.4e9)["exposed"]
    assert (one.stage, one.predicted) == (0, 0.0)
    assert one.beside[0] == "transfers reached 0.4 GB/s, the link's probe 4 GB/s"
    hidden = found(tmp_path / "hidden", probe=4e9, speed=1.2e9)["transfer"]
    assert hidden.measured == pytest.approx(MOVED / 1.2e9)
    assert hidden.beside == ("transfers reached 1.2 GB/s, the link's probe 4 GB/s",)


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


def test_hand_overs_that_take_longer_than_predicted(tmp_path: Path) -> None:
    """When stage 0 waits for its first gradient, everything stands still for a tenth of a second, and nobody
    computes longer."""
    write_run(tmp_path, iterations=(5,), message_s=0.0005)
    rows = report_of(tmp_path).comparison.measured.timelines[0].present[0].computations
    (start_s,) = (row.start_s for row in rows if str(row.action) == "0B0")

    def late(row: dict[str, Any]) -> None:
        if row["start_s"] >= start_s:
            row["start_s"] += 0.1
            row["end_s"] += 0.1

    for rank in range(8):
        edit_rows(tmp_path, rank, late)
    (fact,) = beside_waiting(report_of(tmp_path).comparison, 0)
    assert fact == (
        "messages from its neighbours took 100 ms longer than predicted in total, the longest delay, 100 ms, before "
        "0B0 in iteration 5"
    )


def test_micro_batches_that_differ_in_size(tmp_path: Path) -> None:
    def smaller(row: dict[str, Any]) -> None:
        if row["action"] in ("4F5", "4F6"):
            row["bytes"] = 8_000_000

    one = edited(tmp_path, 4, smaller, extra_bytes={4: -3_000_000})["peak"]
    assert one.beside[1] == "micro-batches of 7.6 MiB to 10.5 MiB"


def test_an_eviction_that_was_not_over_in_time(tmp_path: Path) -> None:
    def late(row: dict[str, Any]) -> None:
        if row["action"] == "0EVICT3":
            row["end_s"] += 0.012

    one = edited(tmp_path, 0, late, extra_bytes={0: MOVED})["peak"]
    assert one.beside[0] == "6 micro-batches at once, 5 in the schedule"


@pytest.mark.parametrize(
    ("place", "extra", "facts"),
    [
        (
            0,
            6 * (SAVED - MOVED),
            ("5 micro-batches at once, 5 in the schedule", "488.3 KiB of each of 6 evicted micro-batches stay"),
        ),
        (5, 10_000_000, ("5 micro-batches at once, 5 in the schedule",)),
    ],
)
def test_a_peak_above_its_prediction(tmp_path: Path, place: int, extra: int, facts: tuple[str, ...]) -> None:
    one = found(tmp_path, extra_bytes={place: extra})["peak"]
    assert (one.stage, one.unit) == (place, "bytes")
    assert one.measured - one.predicted == extra
    assert one.beside == facts


def test_what_the_model_still_refers_to(tmp_path: Path) -> None:
    """Recomputed experts keep the input of their last recomputation."""

    def kept(row: dict[str, Any]) -> None:
        if row["action"] == "4B15":
            row["left_bytes"] += 3_000_000

    one = edited(tmp_path, 4, kept, extra_bytes={4: 2_500_000})["peak"]
    assert one.beside[-1] == "2.9 MiB of saved activations still in memory after the last backward"


def test_three_at_most_and_the_largest_first(tmp_path: Path) -> None:
    report = report_of(
        write_run(
            tmp_path, warm_up=5, probe=4e9, speed=0.4e9, slow={(6, "2F3"): 0.1}, extra_bytes={5: 30_000_000}, noise=0.1
        )
    )
    shares = [one.share for one in report.differences]
    assert len(shares) == MOST
    assert shares == sorted(shares, reverse=True)
    assert len({one.kind for one in report.differences}) == MOST
