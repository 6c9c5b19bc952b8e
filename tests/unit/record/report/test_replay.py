"""The prediction of a run that did exactly what its costs say is that run; what it was made from is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bpipe.record.read import read_run
from bpipe.record.report.replay import replay
from bpipe.record.report.selection import Measured, choose
from tests.unit.record.report.recorded import write_run


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
