"""The patch table against the installed Megatron; see check_patches.py, which runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_patches() -> None:
    script = Path(__file__).with_name("check_patches.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(script.parents[3])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
