"""Reports of what four ranks recorded on one H200 (tests/data/h200): peaks as predicted, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from bpipe.record.report.report import report_of

RECORDS = Path(__file__).resolve().parents[3] / "data" / "h200"


@pytest.mark.parametrize(("name", "microbatches"), [("plain", [4, 3, 2, 1]), ("balanced", [3, 3, 2, 3])])
def test_peaks_on_a_gpu_are_as_predicted(name: str, microbatches: list[int]) -> None:
    stages = report_of(RECORDS / name).comparison.stages
    assert [stage.measured_microbatches for stage in stages] == microbatches
    assert [stage.measured_bytes for stage in stages] == [stage.predicted_bytes for stage in stages]


def test_the_slow_probe_of_the_balanced_run_is_not_used() -> None:
    basis = report_of(RECORDS / "balanced").comparison.prediction.basis
    assert basis.bytes_per_s == {0: pytest.approx(346e9, rel=0.01)}
    assert basis.bytes_source == {0: "measured, the probe was too low"}
