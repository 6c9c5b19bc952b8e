#!/usr/bin/env python3
"""Check on one GPU what can be checked there of moving activations, and measure what can be measured. Needs torch, and no Megatron.

In: a machine with a GPU; --rehearse runs the same code with tiny sizes on a CPU and shows nothing of a GPU. Out: a line for everything
found, a summary, and with --json a file of all of it. Every step is a process of its own: one that fails is reported and the others go on.
Exit status 1 if a step found something wrong or did not come to its end. docs/gpu.md says what each step shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_checks import cannot, isolate, limits, memory, overhead, peer, streams, units
from gpu_checks.common import FULL, MODERATE, REHEARSAL, Result, say

REHEARSED = "REHEARSAL on a CPU: it shows that this script runs, and nothing of a GPU"
# Of the time allowed, what goes to starting processes.
STARTING = 0.2


@dataclass(frozen=True)
class Step:
    """`share`: how much of the time it may have, compared with the other steps."""

    run: Callable[..., Result]
    sizes: Mapping[str, Any]
    share: float
    shows: str


STEPS: dict[str, Step] = {
    "limits": Step(limits.run, limits.SIZES, 1, "what copies and matrix products reach here"),
    "peer": Step(peer.run, peer.SIZES, 2, "one-sided copies between two processes are right"),
    "streams": Step(streams.run, streams.SIZES, 2, "the order of streams is right, and each wait is needed"),
    "connections": Step(isolate.run, isolate.SIZES, 4, "both again with CUDA_DEVICE_MAX_CONNECTIONS 1 and 8"),
    "memory": Step(memory.run, memory.SIZES, 2, "what each stage allocates, against the prediction"),
    "overhead": Step(overhead.run, overhead.SIZES, 5, "what balancing costs one stage, beside copy engines"),
    "compute_units": Step(units.run, units.SIZES, 2, "what copies that occupy compute units cost"),
    "cannot": Step(cannot.run, cannot.SIZES, 0.1, "what one GPU cannot show"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = options.only or list(STEPS)
    size = options.size or (REHEARSAL if options.rehearse else FULL)
    if options.inside:
        return _inside(names, size, 60 * options.minutes, options.inside)
    if size != REHEARSAL and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --rehearse tries the script on a CPU", file=sys.stderr)
        return 2
    header = _header(size, arguments)
    for what, value in header.items():
        print(f"{what}: {value}")
    results: dict[str, Result] = {}
    allowed = 60 * options.minutes * (1 - STARTING)
    for name in names:
        print(f"--- {name}: {STEPS[name].shows}", flush=True)
        seconds = allowed * STEPS[name].share / sum(STEPS[one].share for one in names)
        results.update(isolate.isolated([name], size, seconds, {}))
        if options.json:
            # After every step: what has been found is kept, whatever happens later.
            _write(options.json, {"header": header, "steps": {one: asdict(result) for one, result in results.items()}})
    _summary(results)
    if size == REHEARSAL:
        print(REHEARSED)
    return 1 if any(result.ok is False for result in results.values()) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def steps(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in STEPS]
        if unknown:
            raise argparse.ArgumentTypeError(f"no step {', '.join(unknown)}: choose from {', '.join(STEPS)}")
        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=steps, metavar="STEP,STEP", help=f"these steps, of {', '.join(STEPS)}")
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N", help="about how long to take; repeats are cut (default 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, after every step")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU, to try this script without a GPU")
    parser.add_argument("--size", choices=(FULL, MODERATE, REHEARSAL), help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _inside(names: Sequence[str], size: str, seconds: float, file: Path) -> int:
    """Run steps in this process, one after another, and write their results."""
    device = torch.device("cpu") if size == REHEARSAL else torch.device("cuda", 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    results: dict[str, Result] = {}
    until = time.monotonic()
    for name in names:
        until += seconds * STEPS[name].share / sum(STEPS[one].share for one in names)
        results[name] = run_step(name, device, size, until)
        _write(file, {one: asdict(result) for one, result in results.items()})
    return 0


def run_step(name: str, device: torch.device, size: str, until: float) -> Result:
    """One step here and now. What it raises becomes its failure, with where."""
    step = STEPS[name]
    begin = time.monotonic()
    try:
        result = step.run(device, step.sizes[size], until)
    except Exception:
        failure = traceback.format_exc()
        print(failure, flush=True)
        return Result(ok=False, failure=failure)
    if result.skipped:
        say(f"skipped: {result.skipped}")
    say(f"took {time.monotonic() - begin:.1f} s")
    return result


def _write(file: Path, value: Any) -> None:
    """Whole or not at all: whoever reads may come at any time."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, file)


def _header(size: str, arguments: Sequence[str] | None) -> dict[str, str]:
    command = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    return {
        "command": " ".join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": "none: " + REHEARSED if size == REHEARSAL else _gpu(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set"),
    }


def _gpu() -> str:
    """Name, driver and memory, from the driver's own tool: asking torch would make a context here, and it takes memory."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown, nvidia-smi does not answer ({error})"


def _summary(results: Mapping[str, Result]) -> None:
    print("=== summary")
    width = max(len(name) for name in results)
    for name, result in results.items():
        verdict = {True: "ok", False: "FAILED", None: "measured"}[result.ok]
        print(f"{name:<{width}}  {'skipped: ' + result.skipped if result.skipped else verdict}")
        for what, value in result.rows:
            print(f"{'':<{width}}    {what}: {value}")
        if result.failure:
            print(f"{'':<{width}}    {result.failure.strip().splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
