#!/usr/bin/env python3
"""Check on one GPU what can be checked there of moving activations, and measure what can be measured.

In: a machine with a GPU and torch; one step also wants Megatron and is skipped without it. --rehearse runs the same
code with tiny sizes on a CPU and shows nothing of a GPU. Out: a line for everything found, a summary, and with --json a
file of all of it, written after every step. Every step is a process of its own: one that fails or hangs is ended at its
limit and reported, and the others go on. All of it takes less than 25 minutes, each of the three parts less than 9.
Exit status 1 if a step found something wrong or did not come to its end, 2 without a GPU. docs/gpu.md says what each
step shows.
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

from gpu import (
    abandon,
    cannot,
    counts,
    halves,
    isolate,
    limits,
    megatron_stage,
    memory,
    nccl,
    nearly_full,
    overhead,
    peer,
    queues,
    side_stream,
    streams,
    units,
    versions,
)
from gpu.common import FULL, MODERATE, REHEARSAL, Result, on_cuda, say
from gpu.isolate import Under

REHEARSED = "REHEARSAL on a CPU: it shows that this script runs, and nothing of a GPU"
# A full CPU of two cores starts torch more slowly than any machine with a GPU.
REHEARSAL_S = 120.0

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = versions.ALLOCATOR
ONCE = (Under("", {}),)


@dataclass(frozen=True)
class Step:
    """`limit_s`: when it is ended.

    `part`: the third of everything it belongs to. `run` is None where it only runs other steps again.
    """

    run: Callable[..., Result] | None
    sizes: Mapping[str, Any]
    part: int
    limit_s: float
    shows: str
    under: tuple[Under, ...] = ONCE

    def runs(self, name: str) -> list[tuple[Under, str]]:
        """What has to be started for it."""
        return [(under, one) for under in self.under for one in under.steps or (name,)]


# In the order in which a first half hour on a GPU wants them: what everything else stands on comes first.
STEPS: dict[str, Step] = {
    "versions": Step(
        versions.run, versions.SIZES, 1, 40, "what is installed, and that torch and the CUDA runtime mean one device"
    ),
    "counts": Step(
        counts.run, counts.SIZES, 1, 75, "the runtime's own tests: reference counts differ between versions of torch"
    ),
    "queues": Step(
        queues.run,
        queues.SIZES,
        1,
        75,
        "whether streams wait for each other in the device's queues",
        (Under("unset", {}), Under("1", {CONNECTIONS: "1"}), Under("8", {CONNECTIONS: "8"})),
    ),
    "peer": Step(peer.run, peer.SIZES, 1, 75, "one-sided copies between two processes are right"),
    "streams": Step(streams.run, streams.SIZES, 1, 90, "the order of streams is right, and each wait is needed"),
    "memory": Step(memory.run, memory.SIZES, 1, 90, "what each stage allocates, against the prediction"),
    "halves": Step(
        halves.run,
        halves.SIZES,
        1,
        50,
        "backwards of Megatron's own stage in halves, also Transformer Engine's: right or wrong",
    ),
    "overhead": Step(overhead.run, overhead.SIZES, 2, 140, "what balancing costs one stage, beside copy engines"),
    "overhead_one_queue": Step(
        None,
        overhead.SIZES,
        2,
        120,
        "the same where all streams share one queue",
        (Under("1 connection", {CONNECTIONS: "1"}, ("overhead",)),),
    ),
    "nccl": Step(
        nccl.run,
        nccl.SIZES,
        2,
        60,
        "the nccl transport with two ranks on this GPU, right or wrong",
        (Under("", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),),
    ),
    "megatron": Step(
        megatron_stage.run,
        megatron_stage.SIZES,
        2,
        160,
        "Megatron's own stage, compiled: what moves, and that nothing differs",
    ),
    "nearly_full": Step(
        nearly_full.run, nearly_full.SIZES, 3, 60, "a balanced program with no room to spare, and lending beside it"
    ),
    "side_stream": Step(
        side_stream.run, side_stream.SIZES, 3, 40, "what refusing activations of another stream protects from"
    ),
    "abandon": Step(
        abandon.run, abandon.SIZES, 3, 45, "after an error a rank lets go at once, however busy its device is"
    ),
    "connections": Step(
        None,
        peer.SIZES,
        3,
        120,
        "peer and streams again with CUDA_DEVICE_MAX_CONNECTIONS 1 and 8",
        (
            Under("1 connection", {CONNECTIONS: "1"}, ("peer", "streams")),
            Under("8 connections", {CONNECTIONS: "8"}, ("peer", "streams")),
        ),
    ),
    "allocators": Step(
        None,
        streams.SIZES,
        3,
        140,
        "the order of streams again under torch's other allocators",
        (
            Under(
                "expandable segments",
                {ALLOCATOR: "expandable_segments:True"},
                ("versions", "streams", "peer", "memory"),
            ),
            Under("cudaMallocAsync", {ALLOCATOR: "backend:cudaMallocAsync"}, ("versions", "streams")),
        ),
    ),
    "limits": Step(limits.run, limits.SIZES, 3, 40, "what copies and matrix products reach here"),
    "compute_units": Step(units.run, units.SIZES, 3, 60, "what copies that occupy compute units cost"),
    "cannot": Step(cannot.run, cannot.SIZES, 3, 20, "what one GPU cannot show"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = options.only or _names_of(options.part)
    size = options.size or (REHEARSAL if options.rehearse else FULL)
    if options.list:
        _list(names)
        return 0
    if options.inside:
        return _inside(names[0], size, 60 * options.minutes, options.inside)
    if size != REHEARSAL and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --rehearse tries the script on a CPU", file=sys.stderr)
        return 2
    header = _header(size, arguments)
    for what, value in header.items():
        print(f"{what}: {value}")
    results = _find_out(names, size, options.minutes, header, options.json)
    _summary(results)
    if size == REHEARSAL:
        print(REHEARSED)
    return 1 if any(result.ok is False for result in results.values()) else 0


def _names_of(part: int | None) -> list[str]:
    return [name for name, step in STEPS.items() if part in (None, step.part)]


def _find_out(
    names: Sequence[str], size: str, minutes: float | None, header: Mapping[str, Any], path: Path | None
) -> dict[str, Result]:
    """Run the steps, one after the other, within so many minutes in all."""
    scale = 60 * minutes / sum(STEPS[name].limit_s for name in names) if minutes else 1.0
    results: dict[str, Result] = {}
    for name in names:
        print(f"--- {name}: {STEPS[name].shows}", flush=True)
        results[name] = find_out(name, size, scale * STEPS[name].limit_s)
        if path:
            # After every step: what has been found is kept, whatever happens later.
            found = {one: asdict(result) for one, result in results.items()}
            _write(path, {"header": header, "asked": names, "steps": found})
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def steps(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in STEPS]
        if unknown:
            raise argparse.ArgumentTypeError(f"no step {', '.join(unknown)}: choose from {', '.join(STEPS)}")
        return names

    def minutes(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is no time: give a number above 0")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", type=steps, metavar="STEP,STEP", help=f"these steps, of {', '.join(STEPS)}")
    chosen.add_argument(
        "--part",
        type=int,
        choices=sorted({step.part for step in STEPS.values()}),
        help="a third of them (default: all)",
    )
    parser.add_argument(
        "--minutes", type=minutes, metavar="N", help="all that is chosen ends within N (default: the steps' own limits)"
    )
    parser.add_argument(
        "--list", action="store_true", help="name the steps that are chosen, with their limits, and run nothing"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, after every step")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on the CPU, to try this script without a GPU"
    )
    parser.add_argument("--size", choices=(FULL, MODERATE, REHEARSAL), help=argparse.SUPPRESS)
    parser.add_argument("--inside", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _list(names: Sequence[str]) -> None:
    width = max(map(len, names))
    for name in names:
        step = STEPS[name]
        print(f"{name:<{width}}  part {step.part}  at most {step.limit_s:4.0f} s  {step.shows}")
    print(f"{'together':<{width}}          at most {sum(STEPS[name].limit_s for name in names) / 60:4.1f} min")


def find_out(name: str, size: str, limit_s: float) -> Result:
    """Run a step, or what it consists of, in processes of their own.

    What one of them leaves of the time, the next ones have.
    """
    step = STEPS[name]
    runs = step.runs(name)
    if size == REHEARSAL:
        limit_s = max(limit_s, REHEARSAL_S * len(runs))
    until = time.monotonic() + limit_s
    found = []
    for number, (under, one) in enumerate(runs):
        if under.label:
            say(f"{one}, {under.label}:")
        # Never nothing: a step that is ended at once says so, and no time-out is below zero.
        left_s = max((until - time.monotonic()) / (len(runs) - number), 1.0)
        found.append((under.label, one, isolate.isolated(one, size, left_s, under.environment)))
    return found[0][2] if not any(under.label for under in step.under) else isolate.merged(found)


def _inside(name: str, size: str, seconds: float, file: Path) -> int:
    """Run a step in this process, and write its result."""
    device = torch.device("cpu") if size == REHEARSAL else torch.device("cuda", 0)
    if on_cuda(device):
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    _write(file, asdict(run_step(name, device, size, time.monotonic() + seconds)))
    return 0


def run_step(name: str, device: torch.device, size: str, until: float) -> Result:
    """One step here and now. What it raises becomes its failure, with where."""
    step = STEPS[name]
    assert step.run is not None, f"{name} is made of other steps"
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
    ignored = [f"{name}={os.environ[name]}" for name in isolate.OURS if name in os.environ]
    return {
        "command": " ".join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": "none: " + REHEARSED if size == REHEARSAL else _gpu(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "set here and not for the steps": ", ".join(ignored) or "nothing",
    }


def _gpu() -> str:
    """Name, driver and memory, from the driver's own tool: asking torch would make a context here, and it takes
    memory."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
            .stdout.strip()
            .replace("\n", "; ")
        )
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
