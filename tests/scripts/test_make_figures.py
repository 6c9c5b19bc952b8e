"""scripts/make_figures.py: the committed figures are those of the code."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_the_figures_of_schedules_are_current(
    load_script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_figures.py", "--output", str(tmp_path)])
    assert load_script("make_figures").main() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["every.svg", "schedule.svg"]
    for path in tmp_path.iterdir():
        committed = Path(__file__).parents[2] / "docs/figures" / path.name
        assert path.read_text() == committed.read_text(), "run scripts/make_figures.py"
