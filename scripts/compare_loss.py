"""Lay two runs beside each other and fail on the first bit that differs.

In: for each run its `--bpipe-report` folder (or the iterations.jsonl in it), or Megatron's log. Out: the last iterations up to the first
difference, side by side, and one line that names it. Exit status: 0 no difference, 1 a difference, 2 the runs cannot be compared.
Starts no run and knows no stages.

A report holds every bit. A log is rounded by Megatron (a loss to 7 digits, a gradient norm to 3 decimals): a difference between logs is
one, but equal logs do not prove equal bits, and the last line says so.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from iterations import FILE, LOSS, Difference, Iterations, ReportError, Values, differences, read_iterations, read_text

# What follows may stand after a rank's prefix (`srun -l`, torchrun's --tee); Megatron ends every field with a bar.
LOG_LINE = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|(.*)\|")
# These say how fast the machine was, not what the run computed.
MACHINE = re.compile(r"time|throughput|energy|power")
# Beside the loss, what to show of each iteration; a report and a log spell it differently.
SHOWN = (LOSS, "grad_norm", "grad norm")
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Run:
    """What one run said of its iterations, and whether every bit of it."""

    path: Path
    exact: bool
    iterations: Iterations


# --- Reading ----------------------------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """A folder or a .jsonl file is a report, any other file a log."""
    if path.is_dir() or path.suffix == ".jsonl":
        exact, iterations = True, read_iterations(path / FILE if path.is_dir() else path)
    else:
        exact, iterations = False, read_log(path)
    if not iterations:
        raise ReportError(f"{path}: no iteration in it; is this {'the report' if exact else 'a log of Megatron with --log-interval'}?")
    return Run(path, exact, iterations)


def read_log(path: Path) -> Iterations:
    """Megatron's iteration lines. Where an iteration was run again, the last time counts."""
    iterations: Iterations = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if found := LOG_LINE.search(line):
            try:
                iterations[int(found[1])] = read_fields(found[2])
            except ValueError as error:
                raise ReportError(f"{path}, line {number}: not one of Megatron's iteration lines, or two in one: {error}") from error
    return iterations


def read_fields(text: str) -> Values:
    values: Values = {}
    for field in text.split("|"):
        name, colon, value = field.rpartition(":")
        if not colon:
            raise ValueError(f"{field.strip()!r} is no field with a value")
        if not MACHINE.search(name):
            values[name.strip()] = float(value)
    return values


# --- Telling ----------------------------------------------------------------------------------------------------------------------------


def side_by_side(one: Run, other: Run, iterations: list[int]) -> str:
    """One row an iteration: each value of the first run, then of the second."""
    present = one.iterations[iterations[0]].keys() | other.iterations[iterations[0]].keys()
    names = [name for name in SHOWN if name in present]
    head = [f"{'':>9}" + "".join(f"  {name:^{2 * WIDTH + 2}}" for name in names)]
    head.append(f"{'iteration':>9}" + "".join(f"  {letter:>{WIDTH}}" for _ in names for letter in "AB"))
    rows = []
    for iteration in iterations:
        values = (run.iterations[iteration].get(name) for name in names for run in (one, other))
        rows.append(f"{iteration:>9}" + "".join(f"  {cell(value, one.exact):>{WIDTH}}" for value in values))
    return "\n".join(line.rstrip() for line in [*head, *rows])


def cell(value: float | None, exact: bool) -> str:
    if value is None:
        return "none"
    return value.hex() if exact else f"{value!r}"


def verdict(one: Run, other: Run, found: list[Difference], common: int) -> str:
    if found:
        others = f"; {len(found) - 1} more differ in what follows" if len(found) > 1 else ""
        return f"NOT identical: {found[0].between('in A', 'in B')}{others}"
    if one.exact:
        return f"identical: all numbers of {common} iterations agree to the last bit"
    return (
        f"no difference in {common} iterations as far as logs tell, which Megatron rounds; "
        "run with --bpipe-report DIR and compare the folders to see every bit"
    )


def compare(one: Run, other: Run, num_rows: int, only_common: bool) -> int:
    if one.exact != other.exact:
        report, log = (one, other) if one.exact else (other, one)
        raise ReportError(f"{log.path} is a log, whose numbers are rounded, and {report.path} a report: compare two of a kind")
    common = sorted(one.iterations.keys() & other.iterations.keys())
    if not common:
        raise ReportError(f"{one.path} and {other.path} have no iteration in common: {extent(one)} and {extent(other)}")
    found = differences(one.iterations, other.iterations)
    until = common.index(found[0].iteration) + 1 if found else len(common)
    print(f"A: {one.path}\nB: {other.path}")
    print(side_by_side(one, other, common[max(0, until - num_rows) : until]))
    alone = len(one.iterations.keys() ^ other.iterations.keys())
    if alone and not found and not only_common:
        raise ReportError(
            f"{alone} iterations are in one run only ({extent(one)} and {extent(other)}); the {len(common)} that both have do not differ. "
            "If that is what you mean to compare, add --common"
        )
    if alone:
        print(f"note: {alone} iterations are in one run only and were not compared")
    print(verdict(one, other, found, len(common)))
    return 1 if found else 0


def extent(run: Run) -> str:
    return f"{len(run.iterations)} from {min(run.iterations)} to {max(run.iterations)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare two trainings, iteration by iteration, and fail on the first bit that differs.")
    parser.add_argument("a", metavar="A", type=Path, help="the --bpipe-report folder of one run, or its log")
    parser.add_argument("b", metavar="B", type=Path, help="the same of the other run")
    parser.add_argument("--common", action="store_true", help="compare the iterations that both runs have, as after a restart")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="how many iterations to show (default 5)")
    args = parser.parse_args()
    if args.rows < 1:
        parser.error("--rows must be at least 1")
    try:
        return compare(read_run(args.a), read_run(args.b), args.rows, args.common)
    except (ReportError, OSError) as error:
        print(f"compare_loss.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
