"""scripts/environment.py: what an environment lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = """
[project]
dependencies = ["numpy"]
[project.optional-dependencies]
dev = ["pytest"]
gpu = ["flash-attn"]
"""


@pytest.fixture
def environment(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("environment")


def checkout(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "setup.py").write_text("")
    return folder


def test_dev_is_required_and_gpu_is_not(environment: ModuleType, tmp_path: Path) -> None:
    assert list(environment.requirements(checkout(tmp_path / "a"))) == ["numpy", "pytest"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("pytest", None),
        ("pytest>=1", None),
        ("pytest<1", "is installed"),
        ("no-such-package-of-ours", "not installed"),
        ("no-such-package-of-ours; python_version < '3'", None),
    ],
)
def test_a_requirement_is_met_or_says_why_not(environment: ModuleType, line: str, reason: str | None) -> None:
    answer = environment.unmet(line)
    assert answer is None if reason is None else reason in answer


def test_the_stamp_depends_on_place_and_content(environment: ModuleType, tmp_path: Path) -> None:
    first, second = checkout(tmp_path / "a"), checkout(tmp_path / "b")
    before = environment.stamp(first)
    assert before == environment.stamp(first)
    assert before != environment.stamp(second)
    (first / "setup.py").write_text("changed")
    assert before != environment.stamp(first)


def test_an_installation_of_another_checkout_does_not_count(environment: ModuleType, tmp_path: Path) -> None:
    assert environment.project_unmet(tmp_path) is not None
