"""The runtime's own tests under the torch that is here: what may be moved is found by reference counts, and they differ
between versions.

In: nothing of the device, the tests are a CPU's. Out: how many passed, and which did not. Needs pytest and what the
tests import.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result

ROOT = Path(__file__).resolve().parents[2]
# tests/conftest.py imports hypothesis, and the tests' time-outs are a plugin's.
NEEDED = ("pytest", "hypothesis", "pytest_timeout")


@dataclass(frozen=True)
class Sizes:
    """Which tests: a folder or a file."""

    place: str


SIZES = {
    FULL: Sizes("tests/unit/runtime"),
    MODERATE: Sizes("tests/unit/runtime/test_capture.py"),
    SMALL: Sizes("tests/unit/test_placement.py"),
}


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return Result(skipped=f"not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", sizes.place]
    left_s = max(until - time.monotonic(), 10.0)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=left_s, check=False)
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines() or ["pytest printed nothing"]
    result = Result()
    result.check(sizes.place, ended.returncode == 0, f"{lines[-1].strip('= ')}, torch {torch.__version__}")
    wrong = [line for line in lines if re.match(r"(FAILED|ERROR) ", line)]
    for line in wrong:
        result.row("not passed", line)
    if ended.returncode != 0:
        result.facts["output"] = (ended.stdout + ended.stderr)[-10_000:]
    return result
