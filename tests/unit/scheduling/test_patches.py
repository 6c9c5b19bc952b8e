"""The patch table, hooks around a loop, backwards in halves, and placements, with the installed Megatron; in
processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The last puts an extension in place of one that is not there, before Megatron is imported. The others can share what
# importing it takes.
ALONE = (
    (
        "check_patches.py",
        "check_beside.py",
        "check_shards.py",
        "check_placed.py",
        "check_audit.py",
        "check_sessions.py",
    ),
    ("check_halves.py",),
    ("check_slices.py",),
)
RUN = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", ALONE, ids=" ".join)
def test_in_a_process_of_their_own(names: tuple[str, ...]) -> None:
    run(names)


def run(names: tuple[str, ...]) -> None:
    scripts = [Path(__file__).with_name(name) for name in names]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(scripts[0].parents[3])}
    command = [sys.executable, "-c", RUN, *map(str, scripts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
