"""What a report selects from a run, what it predicts of it, and how the run differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.read import read_run
from bpipe.record.report.differences import Difference
from bpipe.record.report.memory import own_peak, peak_of_rule, rule_by_slice, whole_peaks
from bpipe.record.report.replay import replay
from bpipe.record.report.report import report_of
from bpipe.record.report.selection import Measured, choose
from bpipe.schedule.action import Kind
from bpipe.schedule.memory import StageMemory
from tests.unit.record.report.recorded import edit_rows, write_run


def measured_of(folder: Path, **changes: Any) -> Measured:
    return choose(read_run(write_run(folder, **changes)))


def same_times(measured: Measured) -> None:
    """Every action of the prediction begins and ends when it did in the run."""
    report = replay(measured).report
    for place, lane in enumerate(measured.timelines[0].lanes):
        assert lane is not None
        assert [row.action for row in lane.computations] == [timed.action for timed in report.computations[place]]
        for row, timed in zip(lane.computations, report.computations[place], strict=True):
            assert (row.start_s, row.end_s) == pytest.approx((timed.start_s, timed.end_s), abs=1e-8)
        # Which of a message and a transfer takes a port first may hang on the last bit of a time.
        for row, timed in zip(
            *(
                sorted(rows, key=lambda one: (str(one.action), one.start_s))
                for rows in (lane.transfers, report.transfers[place])
            ),
            strict=True,
        ):
            assert row.action == timed.action
            assert row.end_s == pytest.approx(timed.end_s, abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"message_s": 0.0007},
        {"seconds": {"0F": 0.013, "5B": 0.031}, "message_s": 0.001},
        {"speed": 0.7e9, "probe": 0.7e9},
        {"speed": 0.7e9, "probe": None},
        {"balance": "none"},
        {"synchronous": True},
        {"num_stages": 4, "num_microbatches": 8, "vocabulary": "1", "seconds": {"2S": 0.003, "1T": 0.004}},
        {"num_stages": 4, "num_microbatches": 8, "vocabulary": "interlaced", "balance": "none"},
        {"schedule": "interleaved-1f1b", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2},
        {"schedule": "chimera", "num_microbatches": 8, "message_s": 0.0007, "seconds": {"0F": 0.013, "5B": 0.031}},
        {"schedule": "bitpipe", "num_stages": 4, "num_microbatches": 8, "num_chunks": 2, "balance": "none"},
    ],
)
def test_an_undisturbed_run_is_predicted_to_the_instant(tmp_path: Path, changes: dict[str, Any]) -> None:
    same_times(measured_of(tmp_path, iterations=(5,), **changes))


def test_the_only_rank_left_is_the_one_without_a_record(tmp_path: Path) -> None:
    write_run(tmp_path, balance="none", num_stages=4)
    (tmp_path / "record_00002.jsonl").unlink()
    assert choose(read_run(tmp_path)).ranks == (0, 1, 2, 3)


def test_the_pipeline_that_left_most_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_pipelines=2)
    (tmp_path / "record_00001.jsonl").unlink()
    measured = choose(read_run(tmp_path))
    assert measured.pipeline == 1
    assert measured.ranks == (4, 5, 6, 7)
    assert any(note.startswith("pipeline 1 is shown") for note in measured.notes)
    assert len(measured.others(1)) == 3
    assert len(measured.others(0)) == 6


def test_one_program_at_a_time(tmp_path: Path) -> None:
    """A growing batch changes the program: the last one is reported, or that of the requested iteration."""
    write_run(tmp_path, num_microbatches=8, iterations=(3, 4))
    small = {path.name: path.read_text().splitlines()[1:] for path in tmp_path.glob("record_*")}
    write_run(tmp_path, num_microbatches=16, iterations=(5, 6))
    for name, lines in small.items():
        head, *rest = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([head, *lines, *rest]) + "\n")
    run = read_run(tmp_path)
    assert [timeline.iteration for timeline in choose(run).timelines] == [5, 6]
    assert "left out iterations 3, 4" in choose(run).notes[0]
    measured = choose(run, 4)
    assert measured.program.num_microbatches == 8
    assert [timeline.iteration for timeline in measured.shown] == [4]
    assert [timeline.iteration for timeline in measured.timelines] == [3, 4]
    with pytest.raises(ValueError, match="iteration 7 is not recorded; recorded are 3, 4, 5, 6"):
        choose(run, 7)


def test_rows_must_be_those_of_the_program(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=(5,))
    path = tmp_path / "record_00002.jsonl"
    head, line = (json.loads(text) for text in path.read_text().splitlines())
    line["actions"] = line["actions"][:-1]
    path.write_text(json.dumps(head) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="computation 7 of stage 2 is nothing, but its program says 2B3"):
        choose(read_run(tmp_path))


def test_an_iteration_that_one_rank_did_not_finish(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, num_microbatches=4, iterations=(5, 6))
    path = tmp_path / "record_00003.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    measured = choose(read_run(tmp_path))
    assert measured.timelines[1].lanes[3] is None
    assert measured.notes == ("rank 3 did not record iteration 6: was the run killed?",)


BALANCED = build(ScheduleConfig("1f1b", 8, 16, balance=BalanceConfig()))


def test_whole_peaks_need_every_size() -> None:
    assert whole_peaks(BALANCED, dict.fromkeys(range(8), 10), {}) == (50, 50, 50, 50, 40, 50, 50, 50)
    assert whole_peaks(BALANCED, dict.fromkeys(range(7), 10), {}) is None


def test_slices_that_differ_in_size_are_each_counted_as_it_is() -> None:
    """Slices of 1 and 10 bytes, taken for the largest, were reported as 40 bytes instead of 22."""
    schedule = build(ScheduleConfig("gpipe", 2, 2, slices=2))
    saved = {(0, number): 10 if number % 2 else 1 for number in range(4)}
    assert peak_of_rule(schedule, 0, rule_by_slice(schedule, saved, {}, {}), 0) == 22
    assert own_peak(schedule, 0, {0: 10}, {}, 0, {}) == 40
    # Halves: what W needs of the last slices, while the first ones wait for their I.
    split = build(ScheduleConfig("zb-h1", 2, 2, slices=2))
    after = dict.fromkeys(saved, 3)
    rule = rule_by_slice(split, saved, {}, after)
    assert rule.stages[:2] == (StageMemory(1, 0, 3), StageMemory(10, 0, 3))
    assert rule.stages[2:] == (StageMemory(0, 0, 0),) * 2


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
