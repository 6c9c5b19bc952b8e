"""Write quantities for a person, rounded to three or four digits."""

from collections.abc import Iterable

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def bytes_text(num_bytes: float) -> str:
    """Write bytes as 53.8 MiB; from 10 GiB on in GiB."""
    unit, name = size_unit([num_bytes])
    return f"{num_bytes / unit:.1f} {name}" if unit > 1 else f"{num_bytes:.0f} B"


def size_unit(sizes: Iterable[float]) -> tuple[int, str]:
    """Return the unit in which the largest of these sizes is readable, for a whole column."""
    largest = max((abs(size) for size in sizes), default=0)
    return next(((unit, name) for unit, name in _SIZES if largest >= unit), (1, "B"))


def seconds_text(seconds: float) -> str:
    """Write seconds as 12.3 ms."""
    if not seconds:
        return "0 s"
    unit, name = next(((unit, name) for unit, name in _TIMES if abs(seconds) >= unit), _TIMES[-1])
    return f"{seconds / unit:.3g} {name}" if abs(seconds / unit) < 1000 else f"{seconds / unit:.0f} {name}"


def rate_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def counted(number: int, what: str, many: str = "s") -> str:
    """Write a number with its noun: 1 stage, 8 stages."""
    return f"{number} {what}{many * (number != 1)}"


def percent_text(share: float) -> str:
    return f"{100 * share:.1f} %"
