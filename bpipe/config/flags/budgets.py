"""Read and write the values of flags that say how many bytes are where. In: text. Out: bytes, or a ValueError.

Plans and the training ask with them. Knows no flag.
"""

from __future__ import annotations

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
    """A budget as it was asked for, for all ranks or each; None: all that the device has.

    `learns`: measured bytes replace predicted.
    """

    budget_bytes: tuple[int, ...] | None
    learns: bool


# More than any device has; a size in MiB is beyond it.
LARGEST_DEVICE_GIB = 4096


def read_budget(text: str) -> MemoryBudget:
    """Read `70.5`, `70,70,75,79`, `auto` or `auto:70`. Raises ValueError for anything else."""
    head, colon, rest = text.partition(":")
    if head != AUTO:
        return MemoryBudget(read_gib(text), False)
    return MemoryBudget(read_gib(rest) if colon else None, True)


# Bytes of a unit behind a number, in small letters; a number alone is of GiB.
_UNITS = {"": GIB, "g": GIB, "gib": GIB, "gb": 10**9}


def read_gib(text: str) -> tuple[int, ...]:
    """Read `70.5`, `70GiB`, `75GB` or `70,70,75,79`, in bytes. Raises ValueError for anything else."""
    parts = [re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)(g|gib|gb)?", one) for one in text.lower().split(",")]
    found = [int(Fraction(part[1]) * _UNITS[part[2] or ""]) for part in parts if part is not None]
    if len(found) < len(parts):
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"{text[:40]!r} must be a number of GiB above 0, a list such as 70,70,75,79, or {AUTO}")
    if max(found) > LARGEST_DEVICE_GIB * GIB:
        most = f"more than the {LARGEST_DEVICE_GIB} GiB of any device"
        raise ValueError(
            f"{text[:40]!r} is {most}: the unit is GiB, and {max(found) // GIB} MiB are {max(found) / GIB / 1024:g}"
        )
    return tuple(found)


def budget_text(num_bytes: Sequence[int]) -> str:
    """Write bytes as GiB, rounded up so that a budget read from it is no smaller. One number where all are equal."""
    different = num_bytes[:1] if len(set(num_bytes)) == 1 else num_bytes
    return ",".join(map(_one_gib, different))


def _one_gib(num_bytes: int) -> str:
    digits = 1 if num_bytes >= GIB else 6
    return f"{ceil(Fraction(num_bytes * 10**digits, GIB)) / 10**digits:.{digits}f}"
