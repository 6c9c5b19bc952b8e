"""The patch table, what hooks do around a loop, backwards in halves, and placements, with the installed Megatron; each in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["check_patches.py", "check_beside.py", "check_halves.py", "check_placed.py"])
def test_in_a_process_of_its_own(name: str) -> None:
    script = Path(__file__).with_name(name)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(script.parents[3])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
