"""Compare two runs, A and B, number by number, by default bit by bit, and write the comparison as text or JSON values.

A run is its `--bpipe-report` folder, the iterations.jsonl in it, or Megatron's log. Every number keeps every bit that is
in the file. Only what was computed decides whether runs are equal: peaks and seconds may differ. Raises ValueError, with
the file's name, for what cannot be used or is not what the caller expects.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bpipe.record.format import STEPS, SUMMARY, RankSummary
from bpipe.record.read import read_steps, read_value, refuse_two_runs
from bpipe.values import a_number, printable

LOSS = "lm loss"

# It may follow a rank's prefix (`srun -l`, torchrun's --tee); Megatron ends every field with a bar.
_LOG_LINE = re.compile(r"\biteration\s+([0-9]+)/\s*[0-9]+ \|(.*)\|")
_LOG_TIME = "elapsed time per iteration (ms)"
# Fields about the machine's speed, not about what the run computed.
_MACHINE = re.compile(r"time|throughput|energy|power")

# A shorter time is a clock's resolution: its ratio to another one means nothing.
_NO_TIME_S = 1e-6
# What is shown of each iteration. A report and a log spell the gradient norm differently.
_SHOWN = (LOSS, "grad_norm", "grad norm")
_WIDTH = 24
MAX_DIFFERENCES = 3
_MIB = 2**20
# The numbers of a stage that are compared: its peak, measured and predicted, and its transfers in an iteration.
_NUMBERS = "peak_microbatches peak_bytes predicted_microbatches predicted_bytes evictions loads".split()

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Training:
    """One run. What is not known is empty or None."""

    path: Path
    exact: bool  # whether its numbers have every bit
    iterations: Mapping[int, Values]
    seconds: Mapping[int, float]
    stages: Mapping[int, RankSummary] = field(default_factory=dict)
    balanced: bool | None = None

    def extent(self) -> str:
        return f"{len(self.iterations)} ({min(self.iterations)} to {max(self.iterations)})"


def read_training(
    path: Path, num_ranks: int | None = None, num_iterations: int | None = None, balanced: bool | None = None
) -> Training:
    """Read a training: a folder or a .jsonl file is a report, any other file a log.

    Args:
        path: the folder or file.
        num_ranks: the number of stages that the report must have.
        num_iterations: the number of iterations that it must have, from 1 on.
        balanced: whether the run must have been balanced.

    Returns:
        The iterations and, of a report, the peaks of each stage.

    Raises:
        ValueError: the file cannot be read, or is not what the arguments say.
    """
    exact = path.is_dir() or path.suffix == ".jsonl"
    try:
        iterations, seconds = _read_iterations(path / STEPS if path.is_dir() else path) if exact else _read_log(path)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; did the run finish? See its log") from None
    if not iterations:
        raise ValueError(
            f"{path}: no iteration in it; is it {'a report' if exact else 'a log of Megatron with --log-interval'}?"
        )
    wanted = range(1, 1 + (num_iterations or 0))
    if wanted and iterations.keys() != set(wanted):
        missing = [iteration for iteration in wanted if iteration not in iterations]
        more = " and more" if len(missing) > 5 else ""
        detail = f"iterations {missing[:5]}{more} are missing" if missing else "there are more"
        raise ValueError(f"{path}: {len(iterations)} iterations instead of {num_iterations}; {detail}")
    stages, is_balanced = read_stages(path, num_ranks, balanced)
    return Training(path, exact, iterations, seconds, stages, is_balanced)


def read_stages(
    folder: Path, num_ranks: int | None = None, balanced: bool | None = None
) -> tuple[dict[int, RankSummary], bool | None]:
    """Return each stage's row, and whether the run was balanced. Of replicas of a stage, the largest numbers count."""
    stages: dict[int, RankSummary] = {}
    was_balanced = balanced
    runs: list[tuple[str, str | None]] = []
    for path in SUMMARY.files(folder):
        row = read_value(path, RankSummary, "the file", "the measurements of a rank")
        missing = next((name for name in ("stage", "balanced", *_NUMBERS) if getattr(row, name) is None), None)
        if row.stage is None or missing is not None:
            raise ValueError(f"{path}: {missing!r} is missing: was the run cut off?")
        runs.append((path.name, row.run))
        if was_balanced is not None and row.balanced != was_balanced:
            swapped = "are the two folders swapped?"
            if balanced is None:
                swapped = "other ranks say the opposite: are they of one run?"
            raise ValueError(f"{path}: this run was {'' if row.balanced else 'not '}balanced; {swapped}")
        was_balanced = row.balanced
        replica = stages.get(row.stage, row)
        largest = {name: max(getattr(replica, name), getattr(row, name)) for name in _NUMBERS}
        stages[row.stage] = replace(row, **largest)
    refuse_two_runs(folder, runs)
    if num_ranks is None and balanced is not None and not stages:
        raise ValueError(f"{folder}: no rank_*.json, so it is not known whether this run was balanced")
    if num_ranks is not None and sorted(stages) != list(range(num_ranks)):
        raise ValueError(
            f"{folder}: has reports of stages {sorted(stages)}, not of 0 to {num_ranks - 1}; did every rank finish?"
        )
    return stages, was_balanced


def _read_iterations(path: Path) -> tuple[dict[int, Values], dict[int, float]]:
    """Return every iteration of the file, which need not begin at 1. If one was run again, the last time counts."""
    notes: list[str] = []
    steps = {step.iteration: step for step in read_steps(path, notes)}
    if notes:
        raise ValueError(f"{path}: its last line is torn: was the run cut off?")
    skipped = {
        number: {} if step.skipped is None else {"skipped": float(step.skipped)} for number, step in steps.items()
    }
    seconds = {number: step.elapsed_s for number, step in steps.items() if step.elapsed_s is not None}
    return {number: {**step.numbers, **skipped[number]} for number, step in steps.items()}, seconds


def _read_log(path: Path) -> tuple[dict[int, Values], dict[int, float]]:
    """Return Megatron's iteration lines. If an iteration was run again, the last time counts."""
    iterations: dict[int, Values] = {}
    seconds: dict[int, float] = {}
    # A log may contain anything. A number in which something was replaced is no number any more.
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = _LOG_LINE.search(line)
        if match is None:
            continue
        try:
            iteration, values = int(match[1]), _read_fields(match[2])
            elapsed_s = a_number(values[_LOG_TIME] / 1e3, _LOG_TIME) if _LOG_TIME in values else None
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not one of Megatron's iteration lines, or two of them in one: {error}"
            ) from None
        seconds.pop(iteration, None)
        if elapsed_s is not None:
            seconds[iteration] = elapsed_s
        iterations[iteration] = {name: value for name, value in values.items() if not _MACHINE.search(name)}
    return iterations, seconds


def _read_fields(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for field_text in text.split("|"):
        name, colon, value = field_text.rpartition(":")
        if not colon:
            raise ValueError(f"{field_text.strip()!r:.60} is not a field with a value")
        if _LOG_TIME in name or not _MACHINE.search(name):
            values[printable(name.strip())] = float(value)
    return values


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One number that differs between two runs; None if a run lacks it."""

    iteration: int
    name: str
    first: float | None
    second: float | None

    @property
    def share(self) -> float:
        """The difference as a part of the larger number; infinite if a number is missing or not finite."""
        if self.first is None or self.second is None or not (math.isfinite(self.first) and math.isfinite(self.second)):
            return math.inf
        largest = max(abs(self.first), abs(self.second))
        return abs(self.first - self.second) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median and quartiles of several readings."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Quartiles | None:
        if not values:
            return None
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [*values] * 3
        return Quartiles(median, low, high)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two runs and their differences."""

    first: Training
    second: Training
    tolerance: float
    common: tuple[int, ...]  # iterations that both have
    alone: int  # the number of iterations that only one has
    mismatches: tuple[Mismatch, ...]  # in the order of the run

    @property
    def equal(self) -> bool:
        return not self.mismatches

    @property
    def exact(self) -> bool:
        """Whether equal means equal in every bit."""
        return self.first.exact and self.tolerance == 0

    def seconds_ratio(self) -> Quartiles | None:
        """Return quartiles of B's time divided by A's, over the iterations that have both."""
        first, second = self.first.seconds, self.second.seconds
        timed = [number for number in self.common if number in second and first.get(number, 0.0) > _NO_TIME_S]
        return Quartiles.of([second[number] / first[number] for number in timed])


def compare(first: Training, second: Training, tolerance: float = 0.0, only_common: bool = False) -> SideBySide:
    """Compare two trainings number by number.

    Args:
        first: the run A.
        second: the run B.
        tolerance: the allowed difference as a part of the larger number; with 0, every bit must be equal.
        only_common: whether to leave out iterations that one side lacks.

    Returns:
        Both runs, and every number that differs by more than the tolerance.

    Raises:
        ValueError: the runs cannot be compared.
    """
    if first.exact != second.exact:
        report, log = (first, second) if first.exact else (second, first)
        raise ValueError(
            f"{log.path} is a log, whose numbers are rounded, and {report.path} is a report: compare two of the same kind"
        )
    common = tuple(sorted(first.iterations.keys() & second.iterations.keys()))
    if not common:
        raise ValueError(
            f"{first.path} and {second.path} have no iteration in common: A has {first.extent()}, B has {second.extent()}"
        )
    mismatches = []
    for iteration in common:
        values, others = first.iterations[iteration], second.iterations[iteration]
        for name in sorted(values.keys() | others.keys()):
            mismatch = Mismatch(iteration, name, values.get(name), others.get(name))
            # Not `==`, which calls 0.0 and -0.0 equal, and a NaN unequal to itself.
            differ = repr(mismatch.first) != repr(mismatch.second) and not 0 < tolerance >= mismatch.share
            if differ or (name in values) != (name in others):
                mismatches.append(mismatch)
    alone = len(first.iterations.keys() ^ second.iterations.keys())
    if alone and not mismatches and not only_common:
        raise ValueError(
            f"{alone} iteration{'s' * (alone != 1)} only in one run: A has {first.extent()}, B has {second.extent()}; "
            f"the {len(common)} that both have are equal: to compare only these, add --common"
        )
    return SideBySide(first, second, tolerance, common, alone, tuple(mismatches))


def text(pair: SideBySide, num_rows: int) -> str:
    """Return the comparison as text, which ends with the verdict, with the last `num_rows` iterations up to the first
    difference side by side."""
    lines = [f"A: {pair.first.path}", f"B: {pair.second.path}"]
    if pair.first.stages and pair.second.stages:
        lines += _peaks(pair.first, pair.second)
    lines += _numbers(pair, num_rows)
    if pair.alone:
        lines.append(f"note: {pair.alone} iteration{'s' * (pair.alone != 1)} only in one run, not compared")
    lines += [*_losses(pair), *_seconds(pair), *_largest(pair), _verdict(pair)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _peaks(first: Training, second: Training) -> list[str]:
    """Return measured and (predicted) micro-batches and MiB, one row per stage, with the transfers of balanced runs."""
    head, titles = f"{'':5}", f"{'stage':>5}"
    for name, run in (("A", first), ("B", second)):
        head += f"  {name + (', with --bpipe' if run.balanced else ', without balancing'):^27}"
        titles += f"  {'micro-batches':>13} {'MiB':>13}"
        if run.balanced:
            head += f"  {'per iteration':^16}"
            titles += f"  {'evictions':>9} {'loads':>6}"
    rows = [
        f"{stage:>5}" + "".join(_cells(run.stages.get(stage), bool(run.balanced)) for run in (first, second))
        for stage in sorted(first.stages.keys() | second.stages.keys())
    ]
    notes = []
    for name, run in (("A", first), ("B", second)):
        stages = sorted(run.stages.items())
        if wrong := [stage for stage, row in stages if row.peak_microbatches != row.predicted_microbatches]:
            notes.append(f"note: in {name}, the measured peak of stages {wrong} is not the predicted one")
    title = "peak of saved activations on each stage: measured (predicted from the schedule)"
    return [title, head, titles, *rows, *notes]


def _cells(row: RankSummary | None, balanced: bool) -> str:
    if row is None:
        return f"  {'-':>13} {'-':>13}" + f"  {'-':>9} {'-':>6}" * balanced
    counts = f"{row.peak_microbatches} ({row.predicted_microbatches})"
    sizes = f"{row.peak_bytes / _MIB:.2f} ({(row.predicted_bytes or 0) / _MIB:.2f})"
    return f"  {counts:>13} {sizes:>13}" + f"  {row.evictions:>9} {row.loads:>6}" * balanced


def _numbers(pair: SideBySide, num_rows: int) -> list[str]:
    """Return one row per iteration, with each value of the first run, then of the second."""
    if num_rows == 0:
        return []
    until = pair.common.index(pair.mismatches[0].iteration) + 1 if pair.mismatches else len(pair.common)
    iterations = pair.common[max(0, until - num_rows) : until]
    runs = pair.first.iterations, pair.second.iterations
    names = [name for name in _SHOWN if any(name in run[iterations[0]] for run in runs)]
    rows = [f"{'':>9}" + "".join(f"  {name:^{2 * _WIDTH + 2}}" for name in names)]
    rows.append(f"{'iteration':>9}" + "".join(f"  {letter:>{_WIDTH}}" for _ in names for letter in "AB"))
    for iteration in iterations:
        values = (run[iteration].get(name) for name in names for run in runs)
        rows.append(f"{iteration:>9}" + "".join(f"  {_cell(value, pair.first.exact):>{_WIDTH}}" for value in values))
    return rows


def _cell(value: float | None, exact: bool) -> str:
    if value is None:
        return "none"
    return value.hex() if exact else f"{value!r}"


def _losses(pair: SideBySide) -> list[str]:
    """Return the first and the last loss; those of both runs if they differ as far as is shown."""
    losses = []
    for run in (pair.first, pair.second):
        ends = [(iteration, run.iterations[iteration].get(LOSS)) for iteration in (pair.common[0], pair.common[-1])]
        losses.append(", ".join(f"{loss:.3f} at iteration {number}" for number, loss in ends if loss is not None))
    if not all(losses):
        return []
    lines = [f"loss: {losses[0]}"] if losses[0] == losses[1] else [f"loss: A {losses[0]}; B {losses[1]}"]
    if any(not math.isfinite(run.iterations[pair.common[-1]].get(LOSS) or 0.0) for run in (pair.first, pair.second)):
        lines.append("note: the loss is not finite")
    return lines


def _seconds(pair: SideBySide) -> list[str]:
    first, second, ratio = _spread(pair, pair.first), _spread(pair, pair.second), pair.seconds_ratio()
    if first is None or second is None or ratio is None:
        return []
    times = ", ".join(f"{name} {_between(spread)}" for name, spread in (("A", first), ("B", second)))
    return [
        f"seconds per iteration, median (quartiles): {times}",
        f"B's time divided by A's, median (quartiles): {_between(ratio)}",
    ]


def _spread(pair: SideBySide, run: Training) -> Quartiles | None:
    return Quartiles.of([run.seconds[iteration] for iteration in pair.common if iteration in run.seconds])


def _between(spread: Quartiles) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


def _largest(pair: SideBySide) -> list[str]:
    """Return the largest differences, if there are more than the one in the verdict."""
    if len(pair.mismatches) == 1:
        return []
    largest = sorted(pair.mismatches, key=lambda mismatch: -mismatch.share)[:MAX_DIFFERENCES]
    return [f"difference of {mismatch.share:.3g}, {difference(mismatch)}" for mismatch in largest]


def _verdict(pair: SideBySide) -> str:
    num = len(pair.common)
    within = f"within {pair.tolerance:g}"
    if pair.mismatches:
        first, others = pair.mismatches[0], len(pair.mismatches) - 1
        more = f"; {others} more differ after it" if others else ""
        return f"NOT {'equal ' + within if pair.tolerance else 'identical'}: {difference(first)}{more}"
    if pair.exact:
        return f"identical: all numbers of {num} iterations agree to the last bit"
    if pair.tolerance:
        return f"equal {within}: no two numbers of {num} iterations differ by more, relative to the larger one"
    return (
        f"no difference in {num} iterations, but Megatron rounds the numbers in its logs; "
        "to compare every bit, run with --bpipe-report DIR and compare the folders"
    )


def difference(mismatch: Mismatch) -> str:
    """Return one sentence part: the number, and what both runs have for it."""
    numbers = f"{_number(mismatch.first)} in A, {_number(mismatch.second)} in B"
    return f"{mismatch.name} of iteration {mismatch.iteration}: {numbers}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value!r} ({value.hex()})"


def document(pair: SideBySide) -> dict[str, Any]:
    """Return the comparison as JSON values. Numbers without a JSON form are text: nan, inf, -inf."""
    ratio = pair.seconds_ratio()
    return {
        "equal": pair.equal,
        "exact": pair.exact,
        "tolerance": pair.tolerance,
        "iterations": len(pair.common),
        "in_one_only": pair.alone,
        "differences": [
            {
                "iteration": mismatch.iteration,
                "name": mismatch.name,
                "a": _plain(mismatch.first),
                "b": _plain(mismatch.second),
            }
            for mismatch in pair.mismatches
        ],
        "a": _run(pair, pair.first),
        "b": _run(pair, pair.second),
        "iteration_s_ratio": None if ratio is None else asdict(ratio),
    }


def _run(pair: SideBySide, run: Training) -> dict[str, Any]:
    spread = _spread(pair, run)
    return {
        "path": str(run.path),
        "balanced": run.balanced,
        "first_loss": _plain(run.iterations[pair.common[0]].get(LOSS)),
        "last_loss": _plain(run.iterations[pair.common[-1]].get(LOSS)),
        "iteration_s": None if spread is None else asdict(spread),
        "stages": [
            {"stage": stage, **{name: getattr(row, name) for name in _NUMBERS}}
            for stage, row in sorted(run.stages.items())
        ],
    }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else repr(value)
