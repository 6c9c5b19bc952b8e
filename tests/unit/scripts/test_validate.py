"""scripts/validate.py: the published measurements, with the errors they may have."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def validate(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("validate")


def test_iteration_times_of_real_runs(validate: ModuleType) -> None:
    """Mean at most 1.1 %, none above 1.8 %, over the eight plain runs."""
    errors = [abs(one.error_percent) for one in validate.replays()]
    assert len(errors) == 8
    assert sum(errors) / 8 <= 1.1
    assert max(errors) <= 1.8


def test_the_papers_mfu(validate: ModuleType) -> None:
    stated = [times for times in validate.STAGE_TIMES if times.mfu_percent is not None]
    assert [times.model for times in stated] == ["gpt3-96b"]
    for times in stated:
        assert validate.predicted_mfu(times) == pytest.approx(times.mfu_percent, rel=0.025)


def test_at_most_one_row_of_the_grid_is_missed(validate: ModuleType) -> None:
    found = validate.grid()
    assert len(found) == 19
    assert sum(not one.agrees for one in found) <= 1


def test_the_document(validate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"rank": 0, "stage": 0, "peak_microbatches": 3, "predicted_microbatches": 3, "peak_bytes": 30, "predicted_bytes": 30}
    run, output = tmp_path / "run", tmp_path / "validation.md"
    run.mkdir()
    (run / "rank_00000.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["validate.py", "--runs", str(run), "--output", str(output)])
    validate.main()
    text = output.read_text()
    assert "18 of 19 agree" in text
    assert "1 of 1 exact to the byte" in text
    monkeypatch.setattr(sys, "argv", ["validate.py", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no rank_\*.json"):
        validate.main()


def test_the_document_in_the_repository_is_what_the_script_writes(validate: ModuleType) -> None:
    """All but the part about runs, which needs them."""
    written = (Path(__file__).resolve().parents[3] / "docs" / "validation.md").read_text()
    for part in (
        validate.replay_part,
        validate.paper_part,
        validate.grid_part,
        validate.memory_part,
        validate.roofline_part,
        validate.estimate_part,
    ):
        assert "\n".join(part()) in written
