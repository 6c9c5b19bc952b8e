"""What scripts/test_torch.sh refuses before it sets anything up, and how it counts what ran.

The nightly build runs it with the oldest and the newest torch.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bpipe.torch.upstream import RUN_VERSIONS
from tests.unit.test_project import EXTRAS

# The parts by what is run in them. Each fake part prints what pytest or the example would.
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *run_logged.py*) exec {python} "$@" ;;
    *version_info*) exit 0 ;;
    *environment.py*) echo stamp ;;
    *"import torch; print"*) echo "{torch}" ;;
    *tests/unit/runtime*) printf "..F\n2 failed, 400 passed, 3 skipped, 1 warning in 61.20s (0:01:01)\n"; exit 1 ;;
    *tests/unit/torch*) printf "=== 5 passed in 1.00s ===\nnanobind: leaked 3 functions in all\n" ;;
    *test_training.py*) printf "1 passed, 20 deselected in 9.00s\n" ;;
    *pipelining.py*) echo "every bit is equal" ;;
    *) exit 0 ;;
esac
"""


def run(scripts: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({} if folder is None else {"VENV": str(folder)})
    command = [str(scripts / "test_torch.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.fixture(autouse=True)
def no_logs(scripts: Path) -> Iterator[None]:
    yield
    shutil.rmtree(scripts.parent / "runs/torch/9.9.9-logs", ignore_errors=True)


def environment(folder: Path, torch: str) -> Path:
    """Make an environment that has everything, whose Python prints what a test run would."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / ".bpipe-installed").write_text("stamp\n")
    python = folder / "bin/python"
    python.write_text(PYTHON.format(python=sys.executable, torch=torch))
    python.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ["latest", "2", "2.11.0/..", "torch==2.11.0", ""])
def test_what_is_no_version_is_refused(scripts: Path, version: str) -> None:
    process = run(scripts, version)
    assert process.returncode == 2
    assert process.stderr == (
        f"test_torch.sh: '{version}' is not a version of torch. Give one such as 2.11.0, or newest.\n"
    )


def test_an_environment_with_another_torch_is_refused(scripts: Path, tmp_path: Path) -> None:
    process = run(scripts, "9.9.9", folder=environment(tmp_path / "there", "9.9.8+cpu"))
    assert process.returncode == 1
    assert f"{tmp_path}/there has torch 9.9.8+cpu, not 9.9.9. Remove that folder" in process.stderr


def test_every_part_is_counted_and_one_that_fails_fails_all(scripts: Path, tmp_path: Path) -> None:
    process = run(scripts, "9.9.9", folder=environment(tmp_path / "there", "9.9.9+cpu"))
    lines = [line.partition(": ")[2] for line in process.stderr.splitlines()]
    assert "runtime: FAILED: 2 failed, 400 passed, 3 skipped" in lines
    assert "bpipe.torch: 5 passed" in lines
    assert "megatron: 1 passed" in lines
    assert "example: passed" in lines
    row = r"\| 9\.9\.9 \| 20\S+ \| FAILED: 2 failed, 400 passed, 3 skipped \| 5 passed \| 1 passed \| passed \|"
    assert re.search(row, process.stdout)
    assert process.returncode == 1
    assert "with torch 9.9.9+cpu 1 of 4 parts failed. Logs: " in process.stderr


def test_the_oldest_and_the_newest_are_those_that_are_promised(scripts: Path) -> None:
    """Torch 2.11 was promised but had never been run, and failed."""
    root = scripts.parent
    (bound,) = [line for line in map(Requirement, EXTRAS["torch"]) if line.name == "torch"]
    assert str(bound.specifier) == f">={RUN_VERSIONS[0]}a0"
    assert f'torch: ["{RUN_VERSIONS[0]}", newest]' in (root / ".github/workflows/nightly.yml").read_text()
    table = (root / "docs/pipelining.md").read_text().partition("## Versions of torch")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| (2\.\S+) \| 20", table, re.MULTILINE)) == RUN_VERSIONS
    assert "FAILED" not in table


@pytest.mark.timeout(300)
def test_the_training_it_chooses_exists(scripts: Path) -> None:
    (training,) = re.findall(r"^pytests megatron -k (\w+) ", (scripts / "test_torch.sh").read_text(), re.MULTILINE)
    assert f"\ndef {training}(" in (scripts.parent / "tests/gloo/test_training.py").read_text()
