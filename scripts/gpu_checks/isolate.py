"""Run steps in a process of their own: what breaks a device's context, crashes or hangs there is over with it.

In: names of steps, how long they may take, and variables of the environment. Out: their results. Also the step `connections`, which is
two other steps again in processes with another `CUDA_DEVICE_MAX_CONNECTIONS`: the variable counts only when a process starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_checks.common import FULL, MODERATE, REHEARSAL, Result, say

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.py"
# To start Python, torch and a context, and to end.
GRACE_S = 60.0


def isolated(names: Sequence[str], size: str, seconds: float, environment: Mapping[str, str]) -> dict[str, Result]:
    """The results of these steps. One that did not come to its end has a `failure`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.json")
        command = [
            sys.executable,
            str(SCRIPT),
            "--only",
            ",".join(names),
            "--inside",
            str(file),
            "--size",
            size,
            "--minutes",
            str(seconds / 60),
        ]
        process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        try:
            ended = f"its process ended with status {process.wait(seconds + GRACE_S)}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {seconds + GRACE_S:.0f} s"
        finally:
            # Its children too: a process group of its own.
            _end(process)
        found = json.loads(file.read_text()) if file.exists() else {}
    return {name: Result(**found[name]) if name in found else Result(ok=False, failure=ended) for name in names}


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


@dataclass(frozen=True)
class Sizes:
    """How often each of `steps` runs again: once for each number of connections."""

    size: str
    connections: tuple[int, ...] = (1, 8)
    steps: tuple[str, ...] = ("peer", "streams")


SIZES = {size: Sizes(size) for size in (FULL, MODERATE, REHEARSAL)}


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    result = Result(ok=True)
    for number, connections in enumerate(sizes.connections):
        left = max(until - time.monotonic(), 1.0) / (len(sizes.connections) - number)
        say(f"CUDA_DEVICE_MAX_CONNECTIONS={connections}:")
        found = isolated(sizes.steps, sizes.size, left, {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)})
        for name, one in found.items():
            wrong = [what for what, value in one.rows if value.startswith("FAILED")]
            value = one.failure or (f"not right: {', '.join(wrong)}" if wrong else f"{len(one.rows)} lines as expected")
            result.check(
                f"{name} with {connections} connection{'s' if connections > 1 else ''}", one.ok is True, value.strip().splitlines()[-1]
            )
            result.facts[f"{name}, {connections}"] = {"rows": one.rows, "facts": one.facts, "failure": one.failure}
    return result
