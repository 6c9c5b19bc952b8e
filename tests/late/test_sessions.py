"""Tests of late devices run in any process, whatever ran there before."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BEFORE = """
import torch


def test_a_backward():
    torch.autograd.backward(torch.ones(1, requires_grad=True).sum())
"""


@pytest.mark.timeout(300)
def test_a_backward_of_another_folder_does_not_matter(tmp_path: Path) -> None:
    """Behind unit tests of one process all cases of the grid failed, by an assertion of torch's autograd that has no
    queue for the device."""
    before = tmp_path / "test_before.py"
    before.write_text(BEFORE)
    case = "tests/late/test_grid.py::test_both_say_the_same_of_plans_that_stand_still"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", str(before), case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "2 passed" in ended.stdout
