"""Run a case in a separate process, so that a broken device context, a crash or a hang ends with it.

Returns the case's result; a case that did not finish is a failure. As a program, it is that process:
`python -m tests.gpu.isolate NAME DEVICE SIZE SECONDS FILE`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tests.gpu.accelerators import Accelerator, accelerator
from tests.gpu.cases import CASES
from tests.gpu.common import Result, say

ROOT = Path(__file__).resolve().parents[2]
# Takes the limit, a name and a file.
PROGRAM: tuple[str, ...] = ("-m", "tests.gpu.isolate")
# Seconds to start Python, torch and a context, and to end.
STARTING_S = 20.0
# Seconds that a killed process may take to exit. One that hangs inside the driver may never exit, and must not delay
# the next case.
DYING_S = 10.0
# Only the case sets these, whatever the calling shell has set for trainings.
OURS = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_HOSTID")


def isolated(
    name: str,
    device: str,
    size: str,
    limit_s: float,
    environment: Mapping[str, str],
    lines: TextIO = sys.stdout,
) -> Result:
    """Run the case and return its result; write it to `lines`, with the process's output if something was wrong.

    The case stops by itself some time before the limit, and is killed at the limit."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "result.json"), Path(folder, "log.txt")
        soft_s = max(limit_s / 2, limit_s - STARTING_S)
        inherited = {variable: value for variable, value in os.environ.items() if variable not in OURS}
        path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *PROGRAM, name, device, size, str(soft_s), str(file)],
                cwd=ROOT,
                env={**inherited, "PYTHONPATH": path, **environment},
                start_new_session=True,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            ended = f"its process ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {limit_s:.0f} s"
        finally:
            # The process has its own group, so that its children end with it.
            _end(process)
        result = Result(**json.loads(file.read_text())) if file.exists() else Result(ok=False, failure=ended)
        if result.ok is False:
            lines.write(log.read_text(errors="replace"))
        elif result.skipped:
            lines.write(f"  skipped: {result.skipped}\n")
        else:
            lines.writelines(f"  {name}: {value}\n" for name, value in result.rows)
        return result


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(DYING_S)


def run_case(name: str, on: Accelerator, size: str, seconds: float) -> Result:
    """Run one case in this process. An exception becomes its failure, with its place."""
    begin = time.monotonic()
    try:
        result = CASES[name].run(on, size, begin + seconds)
    except Exception:
        failure = traceback.format_exc()
        print(failure, flush=True)
        return Result(ok=False, failure=failure)
    if result.skipped:
        say(f"skipped: {result.skipped}")
    say(f"took {time.monotonic() - begin:.1f} s")
    return result


def write(file: Path, value: Any) -> None:
    """Write the file in one step, because it may be read at any time."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)


def main(arguments: Sequence[str]) -> None:
    name, device, size, seconds, file = arguments
    write(Path(file), asdict(run_case(name, accelerator(device), size, float(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
