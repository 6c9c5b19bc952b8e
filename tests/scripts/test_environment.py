"""scripts/environment.py finds what an environment lacks."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = """
[project]
name = "our-own"
dependencies = ["numpy"]
[project.optional-dependencies]
trainer = ["torch"]
dev = ["our-own[trainer]", "pytest"]
gpu = ["flash-attn"]
"""


@pytest.fixture
def environment(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("environment")


def checkout(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "setup.py").write_text("")
    (folder / "terra").mkdir()
    (folder / "terra/pyproject.toml").write_text("")
    return folder


@pytest.mark.parametrize(("extra", "lines"), [("trainer", ["numpy", "torch"]), ("dev", ["numpy", "pytest", "torch"])])
def test_requirements_of_an_extra_are_its_own_and_those_it_names(
    environment: ModuleType, tmp_path: Path, extra: str, lines: list[str]
) -> None:
    assert list(environment.requirements(checkout(tmp_path / "a"), extra)) == lines


def test_project_unmet_names_the_distribution_that_is_not_installed(environment: ModuleType, tmp_path: Path) -> None:
    assert environment.project_unmet(checkout(tmp_path / "a")) == "our-own: not installed"


@pytest.mark.parametrize("extra", ["megatron", "dev"])
def test_requirements_of_the_extras_that_scripts_install_are_met_here(environment: ModuleType, extra: str) -> None:
    """Lines with this project's own name would be looked up by its version, and always be met."""
    lines = list(environment.requirements(environment.ROOT, extra))
    assert {"torch>=2.11.0a0", "megatron-core==0.19.2"} <= set(lines)
    assert not [reason for reason in map(environment.unmet, lines) if reason]


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
    folder = checkout(tmp_path / "a")
    (folder / "pyproject.toml").write_text(PROJECT.replace("our-own", "pytest"))
    assert environment.project_unmet(folder) == "pytest: installed from somewhere else"
