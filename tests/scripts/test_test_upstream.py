"""What scripts/test_upstream.sh refuses, before it sets anything up.

That it trains is what it is run for, by hand, for a new Megatron.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def run(scripts: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(scripts / "test_upstream.sh"), *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def checkout(folder: Path) -> Path:
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "megatron/core/__init__.py").touch()
    return folder


def test_a_folder_without_megatron_is_refused(scripts: Path, tmp_path: Path) -> None:
    done = run(scripts, str(tmp_path))
    assert done.returncode == 2
    assert f"{tmp_path} holds no megatron/core: give the folder of a checkout" in done.stderr


def test_a_megatron_that_is_no_namespace_is_refused(scripts: Path, tmp_path: Path) -> None:
    """Python would take that package alone, and never find megatron/scheduling."""
    (checkout(tmp_path) / "megatron/__init__.py").touch()
    done = run(scripts, str(tmp_path))
    assert done.returncode == 2
    assert "has an __init__.py and so is no namespace" in done.stderr


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("--help",), 0)])
def test_usage(scripts: Path, arguments: tuple[str, ...], status: int) -> None:
    done = run(scripts, *arguments)
    assert done.returncode == status
    assert "Usage: scripts/test_upstream.sh CHECKOUT" in (done.stdout if status == 0 else done.stderr)
    assert "CHECKOUT cannot be used" in done.stdout + done.stderr


def test_the_tests_it_chooses_exist(scripts: Path) -> None:
    """A choice that matches nothing would be a verdict on nothing."""
    said = (scripts / "test_upstream.sh").read_text()
    tests = (scripts.parent / "tests/gloo/test_launch.py").read_text()
    begins, goes_on = (
        said.index('tests "without_our_flags"'),
        said.index('tests "loop_of_ones_own or (unmodified_script and gpt)"'),
    )
    assert begins < goes_on, "0.20 ended at start without our flags, too, and every run that it was tried with had some"
    assert "def test_a_script_without_our_flags_trains" in tests
    assert "def test_a_loop_of_ones_own_is_balanced" in tests
    assert "def test_an_unmodified_script_is_balanced" in tests
    assert tests.count('id="gpt') == 2
