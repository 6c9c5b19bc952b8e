"""The prediction of a run that did exactly what its costs say is that run; what it was made from is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bpipe.build import config_of_schedule
from bpipe.record.read import read_run
from bpipe.record.report.answers import answers
from bpipe.record.report.compare import compare
from bpipe.record.report.replay import replay
from bpipe.record.report.selection import Measured, choose
from bpipe.schedule.action import Kind
from bpipe.schedule.memory import peak_counts
from tests.unit.record.report.recorded import MOVED, write_run
from tests.unit.schedule.check.test_overlap import OVERLAPPED


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


@pytest.mark.parametrize(("transport", "meets"), [("gloo", True), ("peer", False)])
def test_only_a_two_sided_transfer_is_predicted_to_meet_its_partner(
    tmp_path: Path, transport: str, meets: bool
) -> None:
    """The quickstart's last stage has the output layer.

    Its partner was predicted to wait 240 ms for it, and did not: nobody has to.
    """
    seconds = {"7F": 0.040, "7B": 0.080}
    prediction = replay(measured_of(tmp_path, iterations=(5,), transport=transport, seconds=seconds))
    assert (prediction.report.exposed_s[0] > 0.01) == meets
    assert prediction.report.exposed_s[0] == 0 or meets


def test_messages_are_told_from_waiting_whatever_the_clocks(tmp_path: Path) -> None:
    basis = replay(measured_of(tmp_path, message_s=0.0007, clock_error_s={2: 0.003, 3: -0.002})).basis
    assert basis.message_s == pytest.approx(0.0007)
    assert basis.message_between_s is None


def test_too_few_gaps_tell_nothing_of_messages(tmp_path: Path) -> None:
    """With one micro-batch and one iteration there is one gap in either direction."""
    assert (
        replay(
            measured_of(tmp_path, num_stages=4, num_microbatches=1, iterations=(5,), message_s=0.001)
        ).basis.message_s
        is None
    )


def test_messages_between_nodes_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, num_stages=4, message_s=0.0005)
    for rank in (2, 3):
        path = tmp_path / f"record_{rank:05d}.jsonl"
        path.write_text(path.read_text().replace('"node-0"', '"node-1"'))
    prediction = replay(choose(read_run(tmp_path)))
    assert prediction.basis.message_s == pytest.approx(0.0005)
    assert prediction.basis.message_between_s == pytest.approx(0.0005)
    assert prediction.report.costs.links.nodes == (0, 0, 1, 1)


def test_a_transfer_takes_what_the_probe_says_else_what_was_measured(tmp_path: Path) -> None:
    probed = replay(measured_of(tmp_path / "a", probe=4e9, speed=1e9))
    assert probed.basis.bytes_source == {0: "probe", 1: "probe", 2: "probe"}
    assert probed.report.costs.stages[0].transfer_s == pytest.approx(MOVED / 4e9)
    timed = replay(measured_of(tmp_path / "b", probe=None, speed=1e9))
    assert timed.basis.bytes_source == {0: "measured", 1: "measured", 2: "measured"}
    assert timed.basis.bytes_per_s == pytest.approx({0: 1e9, 1: 1e9, 2: 1e9})


def test_a_probe_that_transfers_beat_by_far_is_not_used(tmp_path: Path) -> None:
    """On a GPU that other processes kept busy a probe found 7 GB/s where transfers then reached 351, and the predicted
    iteration was 60 % too long."""
    slow_probe = replay(measured_of(tmp_path / "a", probe=0.1e9, speed=4e9))
    assert slow_probe.basis.bytes_per_s == pytest.approx(dict.fromkeys(range(3), 4e9))
    assert set(slow_probe.basis.bytes_source.values()) == {"measured, the probe was too low"}
    noisy_probe = replay(measured_of(tmp_path / "b", probe=3e9, speed=4e9))
    assert set(noisy_probe.basis.bytes_source.values()) == {"probe"}


def test_of_two_sided_transfers_only_those_somebody_waited_for_tell_a_speed(tmp_path: Path) -> None:
    """The others' ends are when somebody asked, long after they were over."""
    hidden = replay(measured_of(tmp_path / "a", transport="gloo", probe=None, speed=4e9))
    assert hidden.basis.bytes_per_s == {}
    waited = replay(measured_of(tmp_path / "b", transport="gloo", probe=None, speed=0.5e9))
    assert waited.basis.bytes_per_s[0] == pytest.approx(0.5e9, rel=0.05)


def test_a_stage_without_a_record_is_taken_to_be_like_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, seconds={"3F": 0.5})
    (tmp_path / "record_00003.jsonl").unlink()
    prediction = replay(choose(read_run(tmp_path)))
    assert prediction.basis.assumed == (3,)
    assert prediction.basis.seconds[3, Kind.FORWARD] == pytest.approx(0.01)
    assert prediction.peaks[3].num_bytes is None
    assert prediction.peaks[3].microbatches == 5
    assert prediction.levels(3) == ()


def test_the_predicted_curve_stays_within_the_predicted_peak_and_ends_at_the_slots(tmp_path: Path) -> None:
    measured = measured_of(tmp_path, iterations=(5,))
    prediction = replay(measured)
    for place, peaks in enumerate(prediction.peaks):
        curve = [level.held_bytes for level in prediction.levels(place)]
        size = prediction.sizes[place]
        assert size is not None
        assert peaks.num_bytes is not None
        assert peaks.num_bytes * 0.8 < max(curve) <= peaks.num_bytes
        assert curve[-1] == size.host_bytes


def test_a_run_without_balancing_says_what_balancing_would_make_of_it(tmp_path: Path) -> None:
    prediction = replay(measured_of(tmp_path, balance="none"))
    assert prediction.balanced_bytes is not None
    assert max(prediction.balanced_bytes) < 0.7 * max(peaks.num_bytes or 0 for peaks in prediction.peaks)


def test_a_run_whose_computations_overlap_is_read_and_predicted(tmp_path: Path) -> None:
    """As DualPipeV's do: a report of one ended with an error."""
    program = config_of_schedule(OVERLAPPED)
    measured = measured_of(
        tmp_path,
        iterations=(5,),
        balance="none",
        schedule=program.schedule,
        num_stages=2,
        num_microbatches=4,
        num_chunks=2,
        written=program.written,
    )
    prediction = replay(measured)
    assert [peaks.microbatches for peaks in prediction.peaks] == list(peak_counts(OVERLAPPED))
    assert prediction.balanced_bytes == ()
    assert (
        answers(compare(measured, prediction))[0] == "Balancing was off, and with 2 stages there is nothing to balance."
    )
