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

# A clock's reading of no time at all, of which nothing can be a multiple.
_NO_TIME_S = 1e-6


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One number that differs between two runs; None if a run lacks it."""

    iteration: int
    name: str
    one: float | None
    other: float | None

    @property
    def share(self) -> float:
        """The difference as a part of the larger number; infinite if a number is missing or not finite."""
        if self.one is None or self.other is None or not (math.isfinite(self.one) and math.isfinite(self.other)):
            return math.inf
        largest = max(abs(self.one), abs(self.other))
        return abs(self.one - self.other) / largest if largest else 0.0


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

    one: Training
    other: Training
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
        return self.one.exact and self.tolerance == 0

    def seconds_ratio(self) -> Quartiles | None:
        """Return quartiles of B's time divided by A's, over the iterations that have both."""
        one, other = self.one.seconds, self.other.seconds
        timed = [number for number in self.common if number in other and one.get(number, 0.0) > _NO_TIME_S]
        return Quartiles.of([other[number] / one[number] for number in timed])


def compare(one: Training, other: Training, tolerance: float = 0.0, only_common: bool = False) -> SideBySide:
    """Compare two trainings number by number.

    Args:
        one: the run A.
        other: the run B.
        tolerance: the allowed difference as a part of the larger number; with 0, every bit must be equal.
        only_common: whether to leave out iterations that one side lacks.

    Returns:
        Both runs, and every number that differs by more than the tolerance.

    Raises:
        ValueError: the runs cannot be compared.
    """
    if one.exact != other.exact:
        report, log = (one, other) if one.exact else (other, one)
        raise ValueError(
            f"{log.path} is a log, whose numbers are rounded, and {report.path} is a report: compare two of the same kind"
        )
    common = tuple(sorted(one.iterations.keys() & other.iterations.keys()))
    if not common:
        raise ValueError(
            f"{one.path} and {other.path} have no iteration in common: A has {one.extent()}, B has {other.extent()}"
        )
    mismatches = tuple(
        Mismatch(iteration, name, values.get(name), others.get(name))
        for iteration in common
        for values, others in [(one.iterations[iteration], other.iterations[iteration])]
        for name in sorted(values.keys() | others.keys())
        if (name in values) != (name in others) or _differ(values.get(name), others.get(name), tolerance)
    )
    alone = len(one.iterations.keys() ^ other.iterations.keys())
    if alone and not mismatches and not only_common:
        raise ValueError(
            f"{alone} iteration{'s' * (alone != 1)} only in one run: A has {one.extent()}, B has {other.extent()}; "
            f"the {len(common)} that both have are equal: to compare only these, add --common"
        )
    return SideBySide(one, other, tolerance, common, alone, mismatches)


def _differ(one: float | None, other: float | None, tolerance: float) -> bool:
    # Bits, because `==` calls 0.0 and -0.0 equal, and a NaN unequal to itself.
    if _bits(one) == _bits(other):
        return False
    if tolerance == 0 or one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return True
    return abs(one - other) > tolerance * max(abs(one), abs(other))


def _bits(value: float | None) -> bytes:
    return b"" if value is None else struct.pack("<d", value)
