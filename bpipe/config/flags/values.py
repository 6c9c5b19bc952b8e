"""Readers of the values of flags: from text to exact numbers, or a ValueError with the limits."""

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.files.text import read_costs
from bpipe.schedule.layout import EVEN, WORK, SliceLengths
from bpipe.transport.config import TransferConfig

_GIB = 2**30
# Beyond every batch and every cluster, and far below where numbers stop being exact.
LARGEST = 10**12

# A value that is chosen and not given.
AUTO = "auto"

# Slices of equal predicted time; they become a list when times have been predicted.
TIME = "time"


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    number = int(text) if re.fullmatch("[+-]?[0-9]{1,40}", text) else None
    if number is None or not 1 <= number <= LARGEST:
        raise ValueError(
            f"{text[:40]!r} must be a whole number, at least 1" + (f" and at most {LARGEST}" if number else "")
        )
    return number


def tokens(text: str) -> int:
    """Read a whole number of tokens from 1 on, or of 1,024 tokens: `8192` or `8k`."""
    thousands = re.fullmatch("([0-9]{1,6})[kK]", text)
    return positive(text if thousands is None else str(1024 * int(thousands[1])))


def group_size(text: str) -> int | str:
    """Read a whole number from 1 on, or `auto`."""
    return text if text == AUTO else positive(text)


def _real(text: str, is_within: Callable[[float], bool], wanted: str) -> float:
    """Read a number. Raises ValueError for any other text, and for a number that is not within its limits."""
    with suppress(ValueError):
        if is_within(number := float(text)):
            return number
    raise ValueError(f"{text[:40]!r} must be {wanted}")


def seconds(text: str) -> float:
    """Read a duration above 0."""
    return _real(text, lambda number: 0 < number <= LARGEST, "a number of seconds above 0")


def factor(text: str) -> float:
    """Read a number above 0."""
    return _real(text, lambda number: 0 < number < 1e6, "a number above 0 and below 1000000, such as 1.25")


def fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    return _real(text, lambda number: 0 <= number <= 1, "a number from 0 to 1, such as 0.5")


def tolerance(text: str) -> float:
    """Read a relative tolerance: `1e-6`."""
    return _real(text, lambda number: 0 <= number < 1, "a number from 0 to below 1, such as 1e-6")


def counted(text: str) -> int:
    """Read a whole number from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"{text[:40]!r} must be a whole number, at least 0")
    return int(text)


# Every iteration, however many there are.
ALL = "all"


def iterations(text: str) -> float:
    """Read a whole number from 0 on, or `all`: infinitely many."""
    return math.inf if text == ALL else counted(text)


def costs(text: str) -> tuple[Fraction, ...]:
    """Read `1,2` or `1,1.5,1/2`: a forward and a backward, or a forward and the halves of a backward, exactly."""
    return read_costs(text, 2, 3)


def costs_in_training(text: str) -> tuple[Fraction, ...]:
    """Read `1,1.5,1/2`: a forward and the halves of a backward, exactly."""
    try:
        halves = read_costs(text, 3, 3)
        unit_costs(halves)
    except ValueError as error:
        raise ValueError(f"{error}, a forward and the halves of a backward, F,I,W") from None
    return halves


def unit_costs(costs: tuple[Fraction, ...] | None) -> UnitCosts:
    """Return durations of a forward and a backward, or of a forward and the halves of a backward; None: all alike."""
    if costs is None:
        return ALIKE
    forward, *backward = costs
    return UnitCosts(forward, *(backward if len(backward) == 2 else [backward[0] / 2] * 2))


def hop(text: str) -> Fraction:
    """Read `0.05` or `1/20`: the time of a message, exactly."""
    return read_costs(text, 1, 1)[0]


def layers(text: str) -> tuple[int, ...]:
    """Read `7,8,8,7`: the layers of every stage, of which the last may have none."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} must be a list of numbers such as 7,8,8,7") from None


def slice_lengths(text: str) -> SliceLengths:
    """Read `even`, `work`, or the tokens of each slice, such as 1024,768,256. Raises ValueError for anything else."""
    return _slice_lengths(text, (EVEN, WORK))


def predicted_slice_lengths(text: str) -> SliceLengths:
    """Read what `slice_lengths` reads, or `time`. Raises ValueError for anything else."""
    return _slice_lengths(text, (EVEN, WORK, TIME))


def _slice_lengths(text: str, words: tuple[str, ...]) -> SliceLengths:
    if text in words:
        return text
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{text[:40]!r} must be {', '.join(words)} or a list of lengths such as 1024,768,256")
    return tuple(map(int, parts))


MINIMUM_BYTES = TransferConfig.minimum_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A budget as it was given."""

    budget_bytes: tuple[int, ...] | None
    """One for all ranks, or one for each; None: all that the device has."""
    learns: bool
    """Whether measured bytes replace predicted ones."""


# More than any device has; a size in MiB is beyond it.
LARGEST_DEVICE_GIB = 4096


def read_budget(text: str) -> MemoryBudget:
    """Read `70.5`, `70,70,75,79`, `auto` or `auto:70`. Raises ValueError for anything else."""
    head, colon, rest = text.partition(":")
    if head != AUTO:
        return MemoryBudget(read_gib(text), False)
    return MemoryBudget(read_gib(rest) if colon else None, True)


# Bytes of the unit that follows a number, in small letters; a number alone is in GiB.
_UNITS = {"": _GIB, "g": _GIB, "gib": _GIB, "gb": 10**9}


def read_gib(text: str) -> tuple[int, ...]:
    """Read `70.5`, `70GiB`, `75GB` or `70,70,75,79` as bytes. Raises ValueError for anything else."""
    matches = [re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(g|gib|gb)?", part) for part in text.lower().split(",")]
    sizes = [0 if match is None else int(Fraction(match[1]) * _UNITS[match[2] or ""]) for match in matches]
    if min(sizes) < 1:
        raise ValueError(f"{text[:40]!r} must be a number of GiB above 0, a list such as 70,70,75,79, or {AUTO}")
    if max(sizes) > LARGEST_DEVICE_GIB * _GIB:
        limit = f"more than the {LARGEST_DEVICE_GIB} GiB of any device"
        raise ValueError(
            f"{text[:40]!r} is {limit}: the unit is GiB, and {max(sizes) // _GIB} MiB are {max(sizes) / _GIB / 1024:g}"
        )
    return tuple(sizes)


def budget_text(sizes: Sequence[int]) -> str:
    """Write bytes as GiB, rounded up so that a budget read from it is no smaller. Equal sizes give one number."""
    texts = []
    for num_bytes in sizes[:1] if len(set(sizes)) == 1 else sizes:
        digits = 1 if num_bytes >= _GIB else 6
        texts.append(f"{math.ceil(Fraction(num_bytes * 10**digits, _GIB)) / 10**digits:.{digits}f}")
    return ",".join(texts)
