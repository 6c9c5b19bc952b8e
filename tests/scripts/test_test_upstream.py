"""What scripts/test_upstream.sh refuses, before it sets anything up.

It is run by hand for a new Megatron.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression


def run(scripts: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(scripts / "test_upstream.sh"), *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def checkout(folder: Path) -> Path:
    (folder / "megatron/core").mkdir(parents=True)
    (folder / "megatron/core/__init__.py").touch()
    return folder


def test_a_megatron_that_is_no_namespace_is_refused(scripts: Path, tmp_path: Path) -> None:
    """Python would import that package alone, and never find megatron/scheduling."""
    (checkout(tmp_path) / "megatron/__init__.py").touch()
    process = run(scripts, str(tmp_path))
    assert process.returncode == 2
    assert "has an __init__.py and so is no namespace" in process.stderr


def test_a_commit_that_is_not_there_is_refused(scripts: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    process = run(scripts, str(tmp_path), "core_v0.19.0")
    assert process.returncode == 2
    assert f"{tmp_path} has no commit core_v0.19.0: fetch it there" in process.stderr


@pytest.mark.timeout(300)
def test_the_tests_it_chooses_exist(scripts: Path) -> None:
    """A selection that matches nothing would test nothing."""
    script = (scripts / "test_upstream.sh").read_text()
    assert script.index("judge without_bpipe") < script.index('for kind in "${kinds[@]}"'), (
        "0.20 failed at start even without our flags, which no run had tried"
    )
    kinds = re.findall(r'^    "(\w+)\|(\w+\.py)\|(.+)"$', script, re.MULTILINE)
    assert len(kinds) == 5 + 7
    chosen = [(file, which) for _, file, which in (*kinds, ("", "test_launch.py", "without_our_flags"))]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "--co",
        "-q",
        "--slow",
        *{f"tests/gloo/{file}" for file, _ in chosen},
    ]
    process = subprocess.run(command, cwd=scripts.parent, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stdout[-500:]
    for file, which in chosen:
        words = Expression.compile(which)
        tests = [
            line.partition("::")[2] for line in process.stdout.splitlines() if line.startswith(f"tests/gloo/{file}")
        ]
        assert any(words.evaluate(test.__contains__) for test in tests), f"{file} -k {which!r}"
