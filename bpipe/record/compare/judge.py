"""Compare two runs number by number, by default bit by bit.

Only what was computed decides whether they are equal: peaks and seconds may differ.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.record.compare.read import Training

# A shorter time is a clock's resolution: its ratio to another one means nothing.
_NO_TIME_S = 1e-6


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
    mismatches = tuple(
        Mismatch(iteration, name, values.get(name), others.get(name))
        for iteration in common
        for values, others in [(first.iterations[iteration], second.iterations[iteration])]
        for name in sorted(values.keys() | others.keys())
        if (name in values) != (name in others) or _differ(values.get(name), others.get(name), tolerance)
    )
    alone = len(first.iterations.keys() ^ second.iterations.keys())
    if alone and not mismatches and not only_common:
        raise ValueError(
            f"{alone} iteration{'s' * (alone != 1)} only in one run: A has {first.extent()}, B has {second.extent()}; "
            f"the {len(common)} that both have are equal: to compare only these, add --common"
        )
    return SideBySide(first, second, tolerance, common, alone, mismatches)


def _differ(first: float | None, second: float | None, tolerance: float) -> bool:
    # Bits, because `==` calls 0.0 and -0.0 equal, and a NaN unequal to itself.
    if _bits(first) == _bits(second):
        return False
    if tolerance == 0 or first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return True
    return abs(first - second) > tolerance * max(abs(first), abs(second))


def _bits(value: float | None) -> bytes:
    return b"" if value is None else struct.pack("<d", value)
