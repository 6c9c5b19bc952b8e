"""Find where two runs differ. In: two `Training`s and how far their numbers may be apart. Out: a `SideBySide`.

Compares bits unless it is told otherwise. What makes two runs not comparable is a ValueError. Only what was computed
decides: peaks and seconds are laid side by side, and may differ. Reads no file and prints nothing.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.record.compare.read import Training

# What a clock reads of no time at all: nothing can be a multiple of it.
_NO_TIME_S = 1e-6


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One number that two runs do not agree on; None where a run has none."""

    iteration: int
    name: str
    one: float | None
    other: float | None

    @property
    def share(self) -> float:
        """The difference as a part of the larger number; infinite where a number is missing or not finite."""
        if self.one is None or self.other is None or not (math.isfinite(self.one) and math.isfinite(self.other)):
            return math.inf
        largest = max(abs(self.one), abs(self.other))
        return abs(self.one - self.other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Several readings of one thing: their median between the quartiles."""

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
    """Two runs, and what they do not agree on, in the order of the run.

    `alone`: how many iterations only one of them has.
    """

    one: Training
    other: Training
    tolerance: float
    common: tuple[int, ...]
    alone: int
    mismatches: tuple[Mismatch, ...]

    @property
    def equal(self) -> bool:
        return not self.mismatches

    @property
    def exact(self) -> bool:
        """Whether equal means equal in every bit."""
        return self.one.exact and self.tolerance == 0

    def seconds_ratio(self) -> Quartiles | None:
        """Return quartiles of B's time divided by A's over the iterations in which both have one."""
        pairs = [(self.one.seconds.get(iteration), self.other.seconds.get(iteration)) for iteration in self.common]
        return Quartiles.of(
            [other / one for one, other in pairs if one is not None and other is not None and one > _NO_TIME_S]
        )


def compare(one: Training, other: Training, tolerance: float = 0.0, only_common: bool = False) -> SideBySide:
    """Compare two trainings number by number.

    `tolerance`: the allowed difference as a part of the larger number; 0 wants every bit. `only_common`: leave out
    iterations that one side lacks.
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
        Mismatch(iteration, name, one.iterations[iteration].get(name), other.iterations[iteration].get(name))
        for iteration in common
        for name in sorted(one.iterations[iteration].keys() | other.iterations[iteration].keys())
        if _differ(one, other, iteration, name, tolerance)
    )
    alone = len(one.iterations.keys() ^ other.iterations.keys())
    if alone and not mismatches and not only_common:
        raise ValueError(
            f"{alone} iterations are in one run only: A has {one.extent()}, B has {other.extent()}; "
            f"the {len(common)} that both have are equal: to compare only these, add --common"
        )
    return SideBySide(one, other, tolerance, common, alone, mismatches)


def _differ(one: Training, other: Training, iteration: int, name: str, tolerance: float) -> bool:
    mine, theirs = one.iterations[iteration], other.iterations[iteration]
    return (name in mine) != (name in theirs) or _apart(mine.get(name), theirs.get(name), tolerance)


def _apart(one: float | None, other: float | None, tolerance: float) -> bool:
    """Bits, not `==`: that calls 0.0 and -0.0 equal, and a NaN unequal to itself."""
    if _bits(one) == _bits(other):
        return False
    if tolerance == 0 or one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return True
    return abs(one - other) > tolerance * max(abs(one), abs(other))


def _bits(value: float | None) -> bytes:
    return b"" if value is None else struct.pack("<d", value)
