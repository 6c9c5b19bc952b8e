"""scripts/validation/validate.py: the published measurements, with the errors they may have."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bpipe.predict import error_bars
from bpipe.predict.layout import EVENLY

# Of 61 rows some look at forty configurations: a quarter of a minute where nothing else runs.
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def validate(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("validation.validate")


def test_iteration_times_of_real_runs(validate: ModuleType) -> None:
    """Mean at most 1 %, none above 2 %, over all twenty: five methods, four vocabularies."""
    errors = [abs(one.error_percent) for one in validate.replays()]
    assert len(errors) == 20
    assert sum(errors) / 20 <= 1.0
    assert max(errors) <= 2.0


def test_peaks_of_real_runs(validate: ModuleType) -> None:
    found = validate.published_peaks()
    assert len(found) == 20
    assert max(abs(one.error_percent) for one in found) <= 3.0


def test_the_papers_mfu(validate: ModuleType) -> None:
    stated = [times for times in validate.STAGE_TIMES if times.mfu_percent is not None]
    assert [times.model for times in stated] == ["gpt3-96b"]
    for times in stated:
        assert validate.predicted_mfu(times) == pytest.approx(times.mfu_percent, rel=0.025)


def test_at_most_one_row_of_the_grid_is_missed(validate: ModuleType) -> None:
    found = validate.grid()
    assert len(found) == 19
    assert sum(not one.agrees for one in found) <= 1


def test_the_rows_of_the_grid_in_time(validate: ModuleType) -> None:
    """No time given: the two balanced rows are the fastest, in the measured order, and the usual error is small."""
    found = validate.grid_mfu()
    for column in ("measured", "predicted"):
        first, second = sorted(found, key=lambda one: -getattr(one, column))[:2]
        assert [validate.size_of(one) for one in (first, second)] == ["t=4 p=8 b=2", "t=2 p=16 b=1"], column
        assert first.row["balanced"] == second.row["balanced"] == "yes"
    assert statistics.median(abs(one.error_percent) for one in found) <= 6


# Mean and largest error in percent, all within the 4 and 10 that are asked for, but the mean of Korthikanti's.
LIMITS = {
    "Narayanan 2021 table 1": (3, 8),
    "Narayanan 2021 table 2": (3, 6),
    "Korthikanti 2022 table 5": (4.5, 7),
    "Qi 2024 table 4": (2.5, 6),
    "Qi 2024 table 4, peaks": (3, 3),
    "NVIDIA DGX Cloud benchmarking recipes 24.09": (1.5, 3),
}


def test_published_throughputs(validate: ModuleType) -> None:
    """No time given, nothing fitted: 61 figures of four sources, and the order in which they come."""
    errors = validate.errors_by_source()
    assert sum(map(len, errors.values())) == 61
    assert errors.keys() == LIMITS.keys()
    for source, (mean, largest) in LIMITS.items():
        assert statistics.mean(errors[source]) <= mean, source
        assert max(errors[source]) <= largest, source
    assert validate.agreement(validate.throughputs()) >= 0.8


def test_nvidias_runs_are_predicted_as_they_were_run(load_script: Callable[[str], ModuleType]) -> None:
    """By their recipe with --tp-comm-overlap; what it hides is charged its share, for without that they were 7 to 9 %
    too fast."""
    throughput = load_script("validation.throughput")
    found = [one for one in throughput.throughputs() if one.source.startswith("NVIDIA")]
    assert [one.setup.switches.tp_comm_overlap for one in found] == [True] * 5
    assert max(abs(one.error_percent) for one in found) < 3
    assert min(throughput.without_tp_overlap()) > 0


def test_one_row_calibrates_the_others(validate: ModuleType) -> None:
    """Asked for are 2.5 and 6 %, which one source keeps."""
    calibrated = validate.calibrated_errors_by_source()
    assert len(calibrated) == 5
    for source, (by_first, by_any) in calibrated.items():
        rows = len(by_first) + 1
        assert len(by_any) == rows * (rows - 1)
        assert by_any[: rows - 1] == by_first
        assert statistics.mean(by_first) <= (2.5 if source.startswith("NVIDIA") else 5), source
        assert max(by_first) <= (6 if source.startswith("NVIDIA") else 9), source
        assert max(by_any) <= 10.1, source


def test_runs_that_were_kept_back(validate: ModuleType) -> None:
    """Not within what is asked for, and said to be: this holds that they do not drift further away."""
    found = validate.kept_back()
    assert len(found) == 17
    errors = [one.error_percent for one in found]
    assert max(errors) < 0
    assert statistics.mean(map(abs, errors)) <= 10
    by_first = validate.calibrated([one.predicted / one.measured for one in found], 1)
    assert statistics.mean(by_first) <= 4
    assert validate.agreement(found) >= 0.75


def test_our_own_runs_are_predicted_to_the_byte(validate: ModuleType) -> None:
    """GPT and LLaMA, both precisions, every recomputation, tensor and sequence parallelism, plain and balanced."""
    found = validate.cpu_runs()
    assert sum(len(run.measured) for run in found) == 64
    for run in found:
        assert run.predicted == run.measured, run.name
    assert {run.setup.balance for run in found} == {None, EVENLY}
    assert {run.setup.precision for run in found} == {"fp32", "bf16"}
    scopes = {
        "none",
        "selective",
        "full",
        "full:block:1",
        "full:uniform:2",
        "selective:core_attn+mlp",
        "selective:layernorm",
    }
    assert {run.setup.recompute for run in found} == scopes
    assert {run.setup.sequence_shards for run in found if run.setup.tensor == 2} == {1, 2}


def test_the_pages_in_the_repository_are_what_the_script_writes(
    validate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["validate.py", "--output", str(tmp_path)])
    validate.main()
    docs = Path(__file__).resolve().parents[2] / "docs"
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in docs.glob("validation*.md"))
    for name in written:
        assert (tmp_path / name).read_text() == (docs / name).read_text(), name


def test_error_bars_are_those_of_the_runs(load_script: Callable[[str], ModuleType]) -> None:
    """What `bpipe plan` prints behind its times is no opinion."""
    measured = load_script("validation.error_bars").measured_bars()
    kinds = (error_bars.AMPERE, error_bars.HOPPER, error_bars.BLACKWELL, error_bars.EXPERTS, error_bars.CALIBRATED)
    assert measured == list(kinds)
