"""Read and write memory budgets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from bpipe.config.flags.values import AUTO
from bpipe.predict.cluster import GIB
from bpipe.transport.config import TransferConfig

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
_UNITS = {"": GIB, "g": GIB, "gib": GIB, "gb": 10**9}


def read_gib(text: str) -> tuple[int, ...]:
    """Read `70.5`, `70GiB`, `75GB` or `70,70,75,79` as bytes. Raises ValueError for anything else."""
    matches = [re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(g|gib|gb)?", part) for part in text.lower().split(",")]
    sizes = [0 if match is None else int(Fraction(match[1]) * _UNITS[match[2] or ""]) for match in matches]
    if min(sizes) < 1:
        raise ValueError(f"{text[:40]!r} must be a number of GiB above 0, a list such as 70,70,75,79, or {AUTO}")
    if max(sizes) > LARGEST_DEVICE_GIB * GIB:
        limit = f"more than the {LARGEST_DEVICE_GIB} GiB of any device"
        raise ValueError(
            f"{text[:40]!r} is {limit}: the unit is GiB, and {max(sizes) // GIB} MiB are {max(sizes) / GIB / 1024:g}"
        )
    return tuple(sizes)


def budget_text(sizes: Sequence[int]) -> str:
    """Write bytes as GiB, rounded up so that a budget read from it is no smaller. Equal sizes give one number."""
    texts = []
    for num_bytes in sizes[:1] if len(set(sizes)) == 1 else sizes:
        digits = 1 if num_bytes >= GIB else 6
        texts.append(f"{ceil(Fraction(num_bytes * 10**digits, GIB)) / 10**digits:.{digits}f}")
    return ",".join(texts)
