"""Compare two runs, A and B, number by number, by default bit by bit, and write the comparison as text.

A run is its `--bpipe-report` folder, the iterations.jsonl in it, or Megatron's log. Every number keeps every bit that is
in the file. Only what was computed decides whether runs are equal: seconds may differ. Raises ValueError, with the file's
name, for what cannot be used.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bpipe.record.format import STEPS
from bpipe.record.read import read_steps
from bpipe.values import a_number, printable

# It may follow a rank's prefix (`srun -l`, torchrun's --tee); Megatron ends every field with a bar.
_LOG_LINE = re.compile(r"\biteration\s+([0-9]+)/\s*[0-9]+ \|(.*)\|")
_LOG_TIME = "elapsed time per iteration (ms)"
# Fields about the machine's speed, not about what the run computed.
_MACHINE = re.compile(r"time|throughput|energy|power")

# A shorter time is a clock's resolution: its ratio to another one means nothing.
_NO_TIME_S = 1e-6
_MAX_DIFFERENCES = 3

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Training:
    """One run."""

    path: Path
    exact: bool  # whether its numbers have every bit
    iterations: Mapping[int, Values]
    seconds: Mapping[int, float]

    def extent(self) -> str:
        return f"{len(self.iterations)} ({min(self.iterations)} to {max(self.iterations)})"


def read_training(path: Path) -> Training:
    """Read a training: a folder or a .jsonl file is a report, any other file a log.

    Raises ValueError for a file that cannot be read, or has no iteration.
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
    return Training(path, exact, iterations, seconds)


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

    def __str__(self) -> str:
        first, second = (
            "none" if value is None else f"{value!r} ({value.hex()})" for value in (self.first, self.second)
        )
        return f"{self.name} of iteration {self.iteration}: {first} in A, {second} in B"


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


def text(pair: SideBySide) -> str:
    """Return the comparison as text, which ends with the verdict."""
    first, second = pair.first, pair.second
    lines = [f"A: {first.path}", f"B: {second.path}"]
    if pair.alone:
        lines.append(f"note: {pair.alone} iteration{'s' * (pair.alone != 1)} only in one run, not compared")
    losses = [(number, first.iterations[number].get("lm loss")) for number in (pair.common[0], pair.common[-1])]
    ends = [f"{loss:.3f} at iteration {number}" for number, loss in losses if loss is not None]
    lines += [f"loss of A: {', '.join(ends)}"] if ends else []
    timed = [iteration for iteration in pair.common if iteration in first.seconds and iteration in second.seconds]
    if timed:
        spreads = (_spread(run.seconds[iteration] for iteration in timed) for run in (first, second))
        lines.append("seconds per iteration, median (quartiles): A {}, B {}".format(*spreads))
        ratios = [
            second.seconds[number] / first.seconds[number] for number in timed if first.seconds[number] > _NO_TIME_S
        ]
        lines += [f"B's time divided by A's, median (quartiles): {_spread(ratios)}"] if ratios else []
    # The first one is in the verdict.
    if len(pair.mismatches) > 1:
        largest = sorted(pair.mismatches, key=lambda mismatch: -mismatch.share)[:_MAX_DIFFERENCES]
        lines += [f"difference of {mismatch.share:.3g}, {mismatch}" for mismatch in largest]
    return "".join(f"{line}\n" for line in (*lines, _verdict(pair)))


def _spread(values: Iterable[float]) -> str:
    samples = list(values)
    low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def _verdict(pair: SideBySide) -> str:
    num, within = len(pair.common), f"within {pair.tolerance:g}"
    if pair.mismatches:
        first, others = pair.mismatches[0], len(pair.mismatches) - 1
        more = f"; {others} more differ after it" if others else ""
        return f"NOT {'equal ' + within if pair.tolerance else 'identical'}: {first}{more}"
    if pair.tolerance:
        return f"equal {within}: no two numbers of {num} iterations differ by more, relative to the larger one"
    if pair.first.exact:
        return f"identical: all numbers of {num} iterations agree to the last bit"
    return (
        f"no difference in {num} iterations, but Megatron rounds the numbers in its logs; "
        "to compare every bit, run with --bpipe-report DIR and compare the folders"
    )
