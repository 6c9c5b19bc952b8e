"""Lay two reports of one training beside each other: without balancing, and with it.

In: the two folders that `--bpipe-report` filled (rank_00000.json and so on, iterations.jsonl), and how many stages and iterations there
should be. Out: a table with one row a stage, one line that says whether both runs computed the same to the last bit, and summary.json.
Exit status: 0 identical, 1 not identical, 2 the reports are incomplete or unreadable. Knows no tensors and starts no run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOSS = "lm loss"
PEAKS = ("peak_microbatches", "peak_bytes", "predicted_microbatches", "predicted_bytes")
TRANSFERS = ("evictions", "loads")
MIB = 2**20

Stages = dict[int, dict[str, int]]
Iterations = dict[int, dict[str, float | None]]


class ReportError(ValueError):
    """A report cannot be used; the message names the file."""


# --- Reading ----------------------------------------------------------------------------------------------------------------------------


def read_json(path: Path, text: str, line: int | None = None) -> dict[str, Any]:
    where = f"{path}, line {line}" if line is not None else str(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ReportError(f"{where}: not JSON, so the run was perhaps cut off: {error}") from error
    if not isinstance(value, dict):
        raise ReportError(f"{where}: not a JSON object")
    return value


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}; did the run end well? Its log says more") from error


def read_stages(folder: Path, num_stages: int, balanced: bool) -> Stages:
    """One row a stage. Where several ranks hold a stage (replicas of the pipeline), the row has the highest number of each kind."""
    stages: Stages = {}
    for path in sorted(folder.glob("rank_*.json")):
        report = read_json(path, read_text(path))
        try:
            stage = int(report["stage"])
            numbers = {name: int(report[name]) for name in PEAKS + TRANSFERS}
            is_balanced = bool(report["balanced"])
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{path}: no usable {error}") from error
        if is_balanced != balanced:
            raise ReportError(f"{path}: this run was {'' if is_balanced else 'not '}balanced; are the two folders swapped?")
        known = stages.setdefault(stage, numbers)
        stages[stage] = {name: max(known[name], numbers[name]) for name in numbers}
    if sorted(stages) != list(range(num_stages)):
        raise ReportError(f"{folder}: reports for stages {sorted(stages)}, expected 0 to {num_stages - 1}; did every rank end well?")
    return stages


def exact(value: Any) -> float | None:
    """A number as `float.hex` wrote it, every bit kept; None where the run had none."""
    return None if value is None else float.fromhex(value)


def read_iterations(folder: Path, num_iterations: int) -> Iterations:
    path = folder / "iterations.jsonl"
    iterations: Iterations = {}
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        record = read_json(path, text, number)
        try:
            iteration = int(record.pop("iteration"))
            skipped = float(record.pop("skipped"))
            values = {name: exact(value) for name, value in record.items()}
            if values[LOSS] is None or "grad_norm" not in values:
                raise KeyError(f"{LOSS} or grad_norm")
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"{path}, line {number}: no usable {error}") from error
        iterations[iteration] = {**values, "skipped": skipped}
    missing = sorted(set(range(1, num_iterations + 1)) - set(iterations))
    if missing or len(iterations) != num_iterations:
        detail = f"iterations {missing[:5]}{' and more' if len(missing) > 5 else ''} are missing" if missing else "there are more"
        raise ReportError(f"{path}: {len(iterations)} iterations where {num_iterations} were asked for; {detail}")
    return iterations


# --- Comparing --------------------------------------------------------------------------------------------------------------------------


def bits(value: float | None) -> bytes:
    """Bits, not `==`: that calls 0.0 and -0.0 equal, and a NaN unequal to itself."""
    return b"" if value is None else struct.pack("<d", value)


@dataclass(frozen=True, slots=True)
class Difference:
    iteration: int
    name: str
    plain: float | None
    balanced: float | None

    def __str__(self) -> str:
        return f"{self.name} of iteration {self.iteration}: {shown(self.plain)} without, {shown(self.balanced)} with balancing"


def shown(value: float | None) -> str:
    return "none" if value is None else f"{value!r} ({value.hex()})"


def differences(plain: Iterations, balanced: Iterations) -> list[Difference]:
    """Every number of every iteration that is not the same to the last bit."""
    found = []
    for iteration in sorted(plain):
        one, other = plain[iteration], balanced[iteration]
        found += [
            Difference(iteration, name, one.get(name), other.get(name))
            for name in sorted(one.keys() | other.keys())
            if (name in one) != (name in other) or bits(one.get(name)) != bits(other.get(name))
        ]
    return found


def mispredicted(stages: Stages) -> list[int]:
    return [stage for stage, row in sorted(stages.items()) if row["peak_microbatches"] != row["predicted_microbatches"]]


# --- Telling ----------------------------------------------------------------------------------------------------------------------------


def table(plain: Stages, balanced: Stages) -> str:
    """Measured beside (predicted), in micro-batches and MiB, one row a stage."""
    head = [
        f"{'':5}  {'without balancing':^27}  {'with --bpipe':^27}  {'an iteration':^16}",
        f"{'stage':>5}" + 2 * f"  {'micro-batches':>13} {'MiB':>13}" + f"  {'evictions':>9} {'loads':>6}",
    ]
    rows = []
    for stage in sorted(plain):
        cells = [f"{stage:>5}"]
        for row in (plain[stage], balanced[stage]):
            counts = f"{row['peak_microbatches']} ({row['predicted_microbatches']})"
            sizes = f"{row['peak_bytes'] / MIB:.2f} ({row['predicted_bytes'] / MIB:.2f})"
            cells.append(f"{counts:>13} {sizes:>13}")
        cells.append(f"{balanced[stage]['evictions']:>9} {balanced[stage]['loads']:>6}")
        rows.append("  ".join(cells))
    title = "peak of saved activations on each stage: measured (predicted from the schedule)"
    return "\n".join(line.rstrip() for line in [title, *head, *rows])


def summary(plain: Stages, balanced: Stages, iterations: Iterations, identical: bool) -> dict[str, Any]:
    losses = [iterations[iteration][LOSS] for iteration in sorted(iterations)]
    return {
        "identical": identical,
        "iterations": len(iterations),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "stages": [
            {
                "stage": stage,
                "plain": {name: plain[stage][name] for name in PEAKS},
                "balanced": {name: balanced[stage][name] for name in PEAKS + TRANSFERS},
            }
            for stage in sorted(plain)
        ],
    }


def write_summary(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def verdict(found: list[Difference], num_iterations: int) -> str:
    if not found:
        return f"identical: losses and gradient norms of all {num_iterations} iterations agree to the last bit"
    return f"NOT identical: {len(found)} values of {len({d.iteration for d in found})} iterations differ; first {found[0]}"


def compare(plain: Path, balanced: Path, num_stages: int, num_iterations: int, summary_path: Path | None) -> int:
    stages = {False: read_stages(plain, num_stages, False), True: read_stages(balanced, num_stages, True)}
    one, other = read_iterations(plain, num_iterations), read_iterations(balanced, num_iterations)
    found = differences(one, other)
    print(table(stages[False], stages[True]))
    for is_balanced, name in ((False, "without balancing"), (True, "with --bpipe")):
        if wrong := mispredicted(stages[is_balanced]):
            print(f"note: {name}, the measured peak of stages {wrong} is not the predicted one; please report this")
    content = summary(stages[False], stages[True], one, not found)
    print(f"loss: {content['first_loss']:.3f} at iteration 1, {content['last_loss']:.3f} at iteration {num_iterations}")
    if not math.isfinite(content["last_loss"]):
        print("note: the loss is not finite, so this comparison shows little")
    print(verdict(found, num_iterations))
    if summary_path is not None:
        write_summary(summary_path, content)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a training without balancing with the same one with --bpipe.")
    parser.add_argument("plain", type=Path, help="the --bpipe-report folder of the run without --bpipe")
    parser.add_argument("balanced", type=Path, help="the --bpipe-report folder of the run with --bpipe")
    parser.add_argument("--stages", type=int, required=True, help="pipeline stages that must have reported")
    parser.add_argument("--iterations", type=int, required=True, help="iterations that must be there")
    parser.add_argument("--summary", type=Path, help="file for the same in JSON")
    args = parser.parse_args()
    if args.stages < 1 or args.iterations < 1:
        parser.error("--stages and --iterations must be at least 1")
    try:
        return compare(args.plain, args.balanced, args.stages, args.iterations, args.summary)
    except (ReportError, OSError) as error:
        print(f"compare_runs.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
