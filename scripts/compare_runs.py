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
import sys
from pathlib import Path
from typing import Any

from iterations import FILE, LOSS, Difference, Iterations, ReportError, differences, read_iterations, read_json, read_text

PEAKS = ("peak_microbatches", "peak_bytes", "predicted_microbatches", "predicted_bytes")
TRANSFERS = ("evictions", "loads")
MIB = 2**20

Stages = dict[int, dict[str, int]]


# --- Reading ----------------------------------------------------------------------------------------------------------------------------


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


def read_all_iterations(folder: Path, num_iterations: int) -> Iterations:
    path = folder / FILE
    iterations = read_iterations(path)
    missing = sorted(set(range(1, num_iterations + 1)) - set(iterations))
    if missing or len(iterations) != num_iterations:
        detail = f"iterations {missing[:5]}{' and more' if len(missing) > 5 else ''} are missing" if missing else "there are more"
        raise ReportError(f"{path}: {len(iterations)} iterations where {num_iterations} were asked for; {detail}")
    return iterations


# --- Comparing --------------------------------------------------------------------------------------------------------------------------


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
    first = found[0].between("without", "with balancing")
    return f"NOT identical: {len(found)} values of {len({d.iteration for d in found})} iterations differ; first {first}"


def compare(plain: Path, balanced: Path, num_stages: int, num_iterations: int, summary_path: Path | None) -> int:
    stages = {False: read_stages(plain, num_stages, False), True: read_stages(balanced, num_stages, True)}
    one, other = read_all_iterations(plain, num_iterations), read_all_iterations(balanced, num_iterations)
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
