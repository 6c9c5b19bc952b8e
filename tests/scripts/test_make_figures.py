"""scripts/make_figures.py: what the figures are made of, and what it says where it cannot make one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def make_figures(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_figures")


def write_runs(folder: Path, ranks: int = 4) -> Path:
    for name in ("plain", "balanced"):
        (folder / name).mkdir(parents=True)
        for rank in range(ranks):
            peak = 3 if name == "balanced" else ranks - rank
            report = {
                "rank": rank,
                "stage": rank,
                "balanced": name == "balanced",
                "peak_microbatches": peak,
                "peak_bytes": peak * 2**20,
            }
            report |= {"predicted_microbatches": peak, "predicted_bytes": peak * 2**20, "evictions": 0, "loads": 0}
            (folder / name / f"rank_{rank:05d}.json").write_text(json.dumps(report))
    return folder


def test_the_figures_of_schedules_are_current(
    make_figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_figures.py", "--output", str(tmp_path)])
    assert make_figures.main() == 0
    assert "memory: not made" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["every.svg", "schedule.svg"]
    for path in tmp_path.iterdir():
        committed = Path(__file__).parents[2] / "docs/figures" / path.name
        assert path.read_text() == committed.read_text(), "run scripts/make_figures.py"


def test_memory_is_read_from_both_runs(make_figures: ModuleType, tmp_path: Path) -> None:
    rows = make_figures.read_memory(write_runs(tmp_path / "runs"))
    assert [row.plain_microbatches for row in rows] == [4, 3, 2, 1]
    assert [row.balanced_bytes for row in rows] == [3 * 2**20] * 4
    assert make_figures.memory_svg(tmp_path / "runs").startswith("<?xml")


@pytest.mark.parametrize(
    ("damage", "message"), [("plain", "no rank_.*json there"), ("balanced/rank_00002.json", "did every rank finish")]
)
def test_incomplete_runs_are_refused(
    make_figures: ModuleType,
    tmp_path: Path,
    damage: str,
    message: str,
) -> None:
    runs = write_runs(tmp_path / "runs")
    for path in [runs / damage] if damage.endswith(".json") else (runs / damage).glob("*"):
        path.unlink()
    with pytest.raises(ValueError, match=message):
        make_figures.read_memory(runs)
