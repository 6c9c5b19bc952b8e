"""scripts/bench/loop.py measures both loops on every rank, and prints only a table."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.gloo.conftest import ROOT

SMALL = ("--stages", "2", "--microbatches", "4", "--hidden", "64", "--sequence", "32", "--rounds", "3")


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/bench/loop.py"), *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(120)
def test_the_table_is_all_that_is_said() -> None:
    """The table was lost among hundreds of Megatron's warnings."""
    ended = measure()
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr == ""
    title, head, *rows = ended.stdout.splitlines()
    assert "1F1B of 2 stages, 4 micro-batches; 3 rounds" in title
    assert head.startswith("rank ")
    assert [row.split()[0] for row in rows] == ["0", "1", "all"]
    assert all(float(value) > 0 for row in rows for value in re.findall(r"\d+\.\d+", row))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_error_of_a_rank_is_shown() -> None:
    ended = measure("--sequence", "0")
    assert ended.returncode != 0
    assert "RuntimeError: cannot reshape tensor of 0 elements" in ended.stderr
