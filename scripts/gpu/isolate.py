"""Run a step in a process of its own: what breaks a device's context, crashes or hangs there is over with it.

In: a step's name, how long it may take, and variables of the environment. Out: its result, one that did not come to its
end a failure. Also what to make of several such runs of one question under different variables: many of them count only
when a process starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu.common import Result

SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.py"
# To start Python, torch and a context, and to end.
STARTING_S = 20.0
# What a killed process may take to be gone. One that hangs inside the driver may never be, and must not hold up what
# comes next.
DYING_S = 10.0
# A step runs under these as it says itself, whatever the shell that starts it has set for trainings.
OURS = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_MULTI_RANK_GPU_ENABLE")


@dataclass(frozen=True)
class Under:
    """Variables of the environment, and the steps that run under them (none: the one that asks)."""

    label: str
    environment: Mapping[str, str]
    steps: tuple[str, ...] = ()


def isolated(name: str, size: str, limit_s: float, environment: Mapping[str, str]) -> Result:
    """What the step found. It ends by itself some time before the limit, and is ended at it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        soft_s = max(limit_s / 2, limit_s - STARTING_S)
        command = [
            sys.executable,
            str(SCRIPT),
            "--only",
            name,
            "--inside",
            str(file),
            "--size",
            size,
            "--minutes",
            str(soft_s / 60),
        ]
        inherited = {variable: value for variable, value in os.environ.items() if variable not in OURS}
        process = subprocess.Popen(command, env={**inherited, **environment}, start_new_session=True)
        try:
            ended = f"its process ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {limit_s:.0f} s"
        finally:
            # Its children too: a process group of its own.
            _end(process)
        return Result(**json.loads(file.read_text())) if file.exists() else Result(ok=False, failure=ended)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DYING_S)


def merged(found: Sequence[tuple[str, str, Result]]) -> Result:
    """One result of several: what they run under, what ran, and what came of it.

    What a step judged becomes a line that says whether it was right; what it only measured keeps its lines.
    """
    result = Result()
    for label, name, one in found:
        title = f"{name}, {label}"
        result.facts[title] = {"rows": one.rows, "facts": one.facts, "skipped": one.skipped, "failure": one.failure}
        if one.failure is None and one.skipped is None and one.ok is None:
            for what, value in one.rows:
                result.row(f"{label}: {what}", value)
        elif one.skipped is not None:
            result.row(title, f"skipped: {one.skipped}")
        else:
            wrong = [what for what, value in one.rows if value.startswith("FAILED")]
            value = one.failure or (f"not right: {', '.join(wrong)}" if wrong else f"{len(one.rows)} lines as expected")
            result.check(title, one.ok is True, value.strip().splitlines()[-1])
    if all(one.skipped is not None for _, _, one in found):
        result.skipped = found[0][2].skipped
    return result
