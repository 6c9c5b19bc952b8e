#!/usr/bin/env python3
"""Check on one GPU what can be checked there of moving activations, and measure what can be measured.

Needs a GPU and torch; cases that need Megatron or Transformer Engine are skipped without. --device late runs the same
with small sizes on the late devices of the tests: right and wrong mean the same there, and which transfers are waited
for, but times are declared. Prints a line for every finding and a summary; --json writes everything after every step.

--minutes 12 runs everything within 12 minutes. Steps that are right or wrong run side by side, timed ones alone. Each
case runs in a process of its own: one that fails or hangs is ended at its limit and reported, and the others go on. The
exit status is 1 if a step found something wrong or did not end, and 2 without a GPU. --list says what each step shows.
"""

import argparse
import io
import itertools
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.gpu import isolate
from tests.gpu.accelerators import CUDA, LATE, NAMES
from tests.gpu.cases import CASES
from tests.gpu.common import FULL, SMALL, Result

ON_LATE = "on late devices: right, wrong and which waits are exposed mean the same as on a GPU, times are declared"
# A step with less time is not started.
LEAST_S = 10.0
CONNECTIONS, ALLOCATOR = "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Under:
    """Variables of the environment, and the cases that run under them, by default the one of the step's name."""

    label: str
    environment: Mapping[str, str]
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """Cases that run one after the other.

    Attributes:
        limit_s: seconds after which the step is ended.
        under: environments in which its cases run.
        alone: whether nothing may run next to it, because it is timed, or takes or reads all of the device's memory.
        title: what it shows, if its case does not say so.
    """

    limit_s: float
    under: tuple[Under, ...] = (Under("", {}),)
    alone: bool = False
    title: str = ""

    def runs(self, name: str) -> list[tuple[Under, str]]:
        """Return the cases to start, each with its environment."""
        return [(under, case) for under in self.under for case in under.cases or (name,)]


RIGHT = ("peer", "streams")
QUEUES = [Under(f"{number} connection{'s' * (number > 1)}", {CONNECTIONS: str(number)}, RIGHT) for number in (1, 8)]
ONE_QUEUE = Under("1 connection", {CONNECTIONS: "1"}, ("overhead",))
OTHER_ALLOCATORS = (
    Under("expandable segments", {ALLOCATOR: "expandable_segments:True"}, ("versions", *RIGHT, "memory")),
    Under("cudaMallocAsync", {ALLOCATOR: "backend:cudaMallocAsync"}, ("versions", "streams")),
)
# The most wanted first, because --minutes may not reach the last. Steps between two that run alone run side by side.
STEPS: dict[str, Step] = {
    "versions": Step(40),
    "twice": Step(60),
    "peer": Step(75),
    "nccl": Step(60),
    "streams": Step(90),
    "pipelines": Step(60),
    "overhead": Step(80, alone=True),
    "trainer": Step(120),
    "trainer_te": Step(150),
    "halves": Step(60),
    "megatron": Step(120),
    "schedules": Step(150),
    "captured": Step(75),
    "trainer_8": Step(120),
    "true_size": Step(160, alone=True),
    "memory": Step(50, alone=True),
    "nearly_full": Step(30, alone=True),
    "side_stream": Step(40),
    "combined": Step(40),
    "abandon": Step(45),
    "connections": Step(105, (*QUEUES,), title=f"peer and streams again with {CONNECTIONS} 1 and 8"),
    "allocators": Step(105, OTHER_ALLOCATORS, title="the order of streams again under torch's other allocators"),
    "overhead_one_queue": Step(80, (ONE_QUEUE,), alone=True, title="the same with all streams in one queue"),
}
# Most of a step is starting Python and torch, and kernels of several processes take turns.
SIDE_BY_SIDE = {CUDA: 4, LATE: 2}


def shows(name: str) -> str:
    return STEPS[name].title or CASES[name].shows


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = options.only or [*STEPS]
    if options.list:
        width = max(map(len, names))
        for name in names:
            alone = "alone" if STEPS[name].alone else "     "
            print(f"{name:<{width}}  {alone}  at most {STEPS[name].limit_s:4.0f} s  {shows(name)}")
        return 0
    if options.device == CUDA and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --device late runs the cases without one", file=sys.stderr)
        return 2
    header = _header(options.device, arguments)
    for name, value in header.items():
        print(f"{name}: {value}")
    results = _find_out(names, options.device, options.minutes, header, options.json)
    _summary(results)
    if options.device == LATE:
        print(ON_LATE)
    return 1 if any(result.ok is False for result in results.values()) else 0


def _find_out(
    names: Sequence[str], device: str, minutes: float | None, header: Mapping[str, Any], path: Path | None
) -> dict[str, Result]:
    """Run the steps, within `minutes` in all. Those that are not reached by then are skipped."""
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    results: dict[str, Result] = {}
    writing = threading.Lock()

    def run(name: str) -> None:
        left_s = until - time.monotonic()
        lines = io.StringIO()
        if left_s < LEAST_S:
            result = Result(skipped=f"the {minutes:g} minutes were over")
        else:
            result = find_out(name, device, FULL if device == CUDA else SMALL, min(STEPS[name].limit_s, left_s), lines)
        with writing:
            print(f"--- {name}: {shows(name)}\n{lines.getvalue()}", end="", flush=True)
            results[name] = result
            if path:
                # After every step, so that nothing is lost whatever happens later.
                steps = {done: asdict(results[done]) for done in names if done in results}
                isolate.write(path, {"header": header, "asked": names, "steps": steps})

    for alone, together in itertools.groupby(names, key=lambda name: STEPS[name].alone):
        if alone:
            for name in together:
                run(name)
            continue
        with ThreadPoolExecutor(SIDE_BY_SIDE[device]) as pool:
            running = [pool.submit(run, name) for name in together]
            try:
                for step in running:
                    step.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return {name: results[name] for name in names}


def find_out(name: str, device: str, size: str, limit_s: float, lines: TextIO = sys.stdout) -> Result:
    """Run a step's cases in processes of their own, and write their output to `lines`.

    The time that one of them leaves is added to that of the next ones.
    """
    runs = STEPS[name].runs(name)
    if device == LATE and any(ALLOCATOR in under.environment for under, _ in runs):
        return Result(skipped="a late device has only one allocator")
    until = time.monotonic() + limit_s
    results = []
    for number, (under, case) in enumerate(runs):
        if under.label:
            print(f"  {case}, {under.label}:", file=lines)
        # At least a second, so that a case that is ended at once says so.
        left_s = max((until - time.monotonic()) / (len(runs) - number), 1.0)
        results.append((under.label, case, isolate.isolated(case, device, size, left_s, under.environment, lines)))
    return merged(results) if any(label for label, _, _ in results) else results[0][2]


def merged(results: Sequence[tuple[str, str, Result]]) -> Result:
    """Return one result of several, each with the label of its environment and the name of its case.

    A case that is right or wrong becomes one line; one that only measures keeps its lines.
    """
    whole = Result()
    for label, name, result in results:
        title = f"{name}, {label}"
        whole.facts[title] = {key: getattr(result, key) for key in ("rows", "facts", "skipped", "failure")}
        if result.skipped is not None:
            whole.rows.append((title, f"skipped: {result.skipped}"))
        elif result.failure is None and result.ok is None:
            whole.rows += [(f"{label}: {subject}", value) for subject, value in result.rows]
        else:
            whole.ok = result.ok is True and whole.ok is not False
            whole.rows.append((title, f"{'ok' if result.ok is True else 'FAILED'}: {judged(result)}"))
    if all(result.skipped is not None for _, _, result in results):
        whole.skipped = results[0][2].skipped
    return whole


def judged(result: Result) -> str:
    """Return the outcome of a case in one line."""
    if result.failure:
        return result.failure.strip().splitlines()[-1]
    wrong = [subject for subject, value in result.rows if value.startswith("FAILED")]
    return f"not right: {', '.join(wrong)}" if wrong else f"{len(result.rows)} lines as expected"


# -- options and what is printed


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def steps(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in STEPS]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown step {', '.join(unknown)}: choose from {', '.join(STEPS)}")
        return names

    def minutes(text: str) -> float:
        value = float(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not a time in minutes: give a number above 0")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=steps, metavar="STEP,STEP", help=f"run only these steps, from {', '.join(STEPS)}")
    add("--device", choices=NAMES, default=CUDA, help="device to run the steps on (default: %(default)s)")
    within = "end within N minutes, and skip what is not reached by then (default: each step's own limit)"
    add("--minutes", type=minutes, metavar="N", help=within)
    add("--list", action="store_true", help="list the chosen steps with their limits, and run nothing")
    add("--json", type=Path, metavar="FILE", help="write all results to FILE, updated after every step")
    return parser.parse_args(arguments)


def _header(device: str, arguments: Sequence[str] | None) -> dict[str, str]:
    command = [Path(sys.argv[0]).name, *(sys.argv[1:] if arguments is None else arguments)]
    ignored = [f"{name}={os.environ[name]}" for name in isolate.OURS if name in os.environ]
    return {
        "command": " ".join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device,
        "gpu": _gpu() if device == CUDA else f"none: {ON_LATE}",
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        "set here but ignored by the steps": ", ".join(ignored) or "nothing",
    }


def _gpu() -> str:
    """Return name, driver and memory from the driver's own tool: torch would make a context, which takes memory."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown, nvidia-smi failed ({error})"
    return output.strip().replace("\n", "; ")


def _summary(results: Mapping[str, Result]) -> None:
    print("=== summary")
    width = max(len(name) for name in results)
    for name, result in results.items():
        verdict = {True: "ok", False: "FAILED", None: "measured"}[result.ok]
        print(f"{name:<{width}}  {'skipped: ' + result.skipped if result.skipped else verdict}")
        for subject, value in result.rows:
            print(f"{'':<{width}}    {subject}: {value}")
        if result.failure:
            print(f"{'':<{width}}    {result.failure.strip().splitlines()[-1]}")


if __name__ == "__main__":
    sys.exit(main())
