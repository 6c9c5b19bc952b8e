"""A run that differs in a known way from its prediction: the difference is found, and its cause is the true one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.ir.action import Kind
from bpipe.report.causes import WaitingCauses
from bpipe.report.differences import MOST, Difference
from bpipe.report.report import report_of
from tests.unit.report.recorded import MOVED, RECEIVED, SAVED, edit_rows, write_run


def found(folder: Path, iteration: int | None = None, **changes: Any) -> dict[str, Difference]:
    return {one.kind: one for one in report_of(write_run(folder, **changes), iteration).differences}


def test_a_run_as_predicted_has_no_differences(tmp_path: Path) -> None:
    assert found(tmp_path, message_s=0.0005, noise=0.001) == {}


def test_a_warm_up(tmp_path: Path) -> None:
    (one,) = found(tmp_path, warm_up=5).values()
    assert one.what == "iteration 5, pipeline time"
    assert one.measured == pytest.approx(1.5 * one.predicted)
    assert one.share == pytest.approx(0.5)
    assert one.cause.startswith(
        "Warm-up: this is the first recorded iteration, and 8 of 8 stages computed 1.50 times as long as later"
    )


def test_a_slow_iteration_that_is_not_the_first_is_no_warm_up(tmp_path: Path) -> None:
    one = found(tmp_path, warm_up=6)["iteration"]
    assert one.what == "iteration 6, pipeline time"
    assert one.cause.startswith("Stage ")
    assert "computed" in one.cause


def test_one_slow_micro_batch(tmp_path: Path) -> None:
    """It shows in the iteration, in its stage's mean, and in what another stage waits."""
    changes = found(tmp_path, 6, slow={(6, "3B7"): 0.06})
    assert changes["iteration"].cause.startswith("One computation: 3B7 took 80 ms; the median of its stage is 20 ms.")
    assert changes["backward"].what == "stage 3, backward (mean)"
    assert changes["backward"].cause.startswith(
        "1 of 16 took more than 1.5 times the median, the slowest in iteration 6: 3B7"
    )
    assert changes["waiting"].cause.startswith("It waited for stage 3, which computed 60 ms longer than its medians.")


def test_times_that_vary(tmp_path: Path) -> None:
    causes = [one.cause for one in found(tmp_path / "a", noise=0.4).values()]
    assert any(cause.startswith("Times vary: on stage ") for cause in causes)
    assert not any("cores" in cause for cause in causes)
    causes = [one.cause for one in found(tmp_path / "b", noise=0.4, cores=2).values()]
    assert any(
        cause.endswith("the slower neighbour sets the pace. 8 ranks share 2 cores on node-0.") for cause in causes
    )


def test_transfers_slower_than_the_probe(tmp_path: Path) -> None:
    changes = found(tmp_path, probe=4e9, speed=0.4e9)
    one = changes["exposed"]
    assert (one.stage, one.predicted) == (0, 0.0)
    assert one.cause.startswith(
        "Contention: transfers reached 0.4 GB/s; the same link reached 4 GB/s when it was probed"
    )
    hidden = found(tmp_path / "hidden", probe=4e9, speed=1.2e9)
    assert hidden["transfer"].measured == pytest.approx(MOVED / 1.2e9)
    assert hidden["transfer"].cause.endswith("This cost no time: all transfers are hidden.")
    crowded = found(tmp_path / "crowded", probe=4e9, speed=1.2e9, cores=2)
    assert "cost" not in crowded["transfer"].cause


def edited(folder: Path, rank: int, change: Callable[[dict[str, Any]], None], **changes: Any) -> dict[str, Difference]:
    edit_rows(write_run(folder, **changes), rank, change)
    return {one.kind: one for one in report_of(folder).differences}


def waits(seconds: float, *actions: str) -> Callable[[dict[str, Any]], None]:
    def change(row: dict[str, Any]) -> None:
        if row["action"] in actions:
            row["wait_s"] = seconds

    return change


def test_a_cause_is_not_claimed_where_nothing_shows_it(tmp_path: Path) -> None:
    """Transfers are as fast as the probe and shorter than a forward, and no wait stands out."""
    one = edited(tmp_path, 0, waits(0.004, "0EVICT3", "0EVICT4", "0LOAD3", "0LOAD4"))["exposed"]
    assert (one.stage, one.measured) == (0, pytest.approx(0.016))
    assert one.cause == "No likely cause was found in the record."


def test_one_long_wait(tmp_path: Path) -> None:
    one = edited(tmp_path, 1, waits(0.05, "1LOAD3"), iterations=(5,))["exposed"]
    assert one.cause == "Most of it is one wait: 50 ms for 1LOAD3 in iteration 5."


def test_transfers_that_do_not_fit_behind_a_forward(tmp_path: Path) -> None:
    one = edited(tmp_path, 0, waits(0.02, "0EVICT3", "0EVICT4", "0LOAD3"), probe=None, speed=0.9e9)["exposed"]
    assert one.cause == "A transfer takes 11.7 ms, longer than the forward of 10 ms that it has to hide behind."


def test_computations_beside_a_transfer_are_slower(tmp_path: Path) -> None:
    """The forwards of stage 0 that a transfer overlaps take 1.4 times as long as the others."""
    plain = (
        report_of(write_run(tmp_path / "plain", iterations=(5,), speed=1.2e9))
        .comparison.measured.timelines[0]
        .present[0]
    )
    forwards = [row for row in plain.computations if row.action.kind is Kind.FORWARD]
    beside = [
        row.action
        for row in forwards
        if any(min(row.end_s, other.end_s) - max(row.start_s, other.start_s) > 0.005 for other in plain.transfers)
    ]
    assert 4 <= len(beside) < 12
    one = found(
        tmp_path / "slow", iterations=(5,), speed=1.2e9, probe=None, slow={(5, str(action)): 0.004 for action in beside}
    )["forward"]
    assert one.cause.startswith("Those during a transfer took 1.4")


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
    comparison = report_of(tmp_path).comparison
    cause = WaitingCauses(0)(comparison)
    assert cause is not None
    assert cause.startswith("Messages from its neighbours took 100 ms longer than predicted in total")
    assert cause.endswith("the longest delay, 100 ms, was before 0B0 in iteration 5.")


def test_micro_batches_that_differ_in_size(tmp_path: Path) -> None:
    def smaller(row: dict[str, Any]) -> None:
        if row["action"] in ("4F5", "4F6"):
            row["bytes"] = 8_000_000

    one = edited(tmp_path, 4, smaller, extra_bytes={4: -3_000_000})["peak"]
    assert one.cause == "Its micro-batches differ in size, from 7.6 MiB to 10.5 MiB."


def test_an_eviction_that_was_not_over_in_time(tmp_path: Path) -> None:
    def late(row: dict[str, Any]) -> None:
        if row["action"] == "0EVICT3":
            row["end_s"] += 0.012

    one = edited(tmp_path, 0, late, extra_bytes={0: MOVED})["peak"]
    assert one.cause == "It held 6 micro-batches at once, more than the schedule's 5."


@pytest.mark.parametrize(
    ("place", "extra", "cause"),
    [
        (0, 6 * (SAVED - MOVED), "Storages that could not move: 488.3 KiB of every evicted micro-batch stays"),
        (4, 40 * RECEIVED, "No likely cause was found in the record."),
        (5, 10_000_000, "No likely cause was found in the record."),
    ],
)
def test_a_peak_above_its_prediction(tmp_path: Path, place: int, extra: int, cause: str) -> None:
    one = found(tmp_path, extra_bytes={place: extra})["peak"]
    assert (one.stage, one.unit) == (place, "bytes")
    assert one.measured - one.predicted == extra
    assert one.cause.startswith(cause)


def test_what_the_model_still_refers_to(tmp_path: Path) -> None:
    """Recomputed experts keep the input of their last recomputation; the report knew no cause for it."""

    def kept(row: dict[str, Any]) -> None:
        if row["action"] == "4B15":
            row["left_bytes"] += 3_000_000

    one = edited(tmp_path, 4, kept, extra_bytes={4: 2_500_000})["peak"]
    assert one.cause.startswith("After its last backward, 2.9 MiB of saved activations were still in memory")


def test_inputs_that_are_held_longer(tmp_path: Path) -> None:
    one = found(tmp_path, received_bytes=1_000_000, extra_bytes={4: 2_000_000})["peak"]
    assert one.cause.startswith(
        "The difference is about 2.0 times the 976.6 KiB that the stage receives per micro-batch"
    )


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
