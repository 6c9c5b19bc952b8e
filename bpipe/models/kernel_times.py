"""Hold seconds of single kernels as a device took them.

In: files of `bpipe profile --time-kernels`. Out: a checked `KernelTimes`.

    {"format": "bpipe-kernel-times", "version": 1, "device": "NVIDIA H100 80GB HBM3", "precision": "bf16",
     "products": [[4096, 7168, 8192, 0.00071]], "attention": [["flash", 16, 4096, 128, 0.0004, 0.0011]], "gathers": [[4, 67108864, 0.0002]]}

A product's result has rows and columns, each a sum of so many terms; an attention core has so many heads of so many
sequences together, the length of these, the size of a head, and seconds forward and backward; a gather has its ranks,
the bytes that each has in the end, and seconds. What was not measured is taken from the nearest that was, by its work,
if no size is more than twice or less than half of it; beyond that nothing is said. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from pathlib import Path
from typing import Any

from bpipe.values import a_list, a_number, a_text, a_whole, an_object, load_json

FORMAT, VERSION = "bpipe-kernel-times", 1
# Kernels differ in what shapes do to them: from farther away a measurement says less than a formula.
FARTHEST = 2.0

Sizes = tuple[float, ...]


# By identity: predictions are cached by the cluster that holds it.
@dataclass(frozen=True, slots=True, eq=False)
class KernelTimes:
    """Seconds by sizes, of an attention core by its kind, too: forward, and backward."""

    device: str
    precision: str
    products: Mapping[Sizes, float]
    attention: Mapping[str, Mapping[Sizes, tuple[float, float]]]
    gathers: Mapping[Sizes, float]

    def product_s(self, rows: float, columns: float, terms: float) -> float | None:
        """Return measured seconds of a product, or None where nothing near enough was measured."""
        return _nearest(self.products, (rows, columns, terms))

    def attention_s(self, kind: str, heads: float, sequence: int, head_size: int) -> tuple[float, float] | None:
        known = self.attention.get(kind, {})
        # A core's work grows with the square of its sequence.
        forward, backward = (
            _nearest({sizes: both[way] for sizes, both in known.items()}, (heads, sequence, head_size), 1)
            for way in (0, 1)
        )
        return None if forward is None or backward is None else (forward, backward)

    def gather_s(self, ranks: int, num_bytes: float) -> float | None:
        return _nearest(
            {sizes[1:]: seconds for sizes, seconds in self.gathers.items() if sizes[0] == ranks}, (num_bytes,)
        )

    def check(self, precision: str) -> None:
        """Raise ValueError where a training in this precision uses other kernels."""
        if (self.precision == "fp32") != (precision == "fp32"):
            raise ValueError(
                f"the kernel times are for {self.precision}, but the training run is in {precision}: measure that, too"
            )


def _nearest(measured: Mapping[Sizes, float], wanted: Sizes, squared: int | None = None) -> float | None:
    """What was measured itself, or else scaled from the nearest by work: the product of the sizes, one of them
    `squared`."""
    if wanted in measured:
        return measured[wanted]
    far, nearest = min(((_distance(sizes, wanted), sizes) for sizes in measured), default=(FARTHEST, wanted))
    if far > log2(FARTHEST) or nearest not in measured:
        return None
    return measured[nearest] * _work(wanted, squared) / _work(nearest, squared)


def _distance(one: Sizes, other: Sizes) -> float:
    return max(abs(log2(mine / others)) for mine, others in zip(one, other, strict=True))


def _work(sizes: Sizes, squared: int | None) -> float:
    return prod(sizes) * (1 if squared is None else sizes[squared])


def read_kernel_times(paths: Sequence[str]) -> KernelTimes:
    """Return all files together; where two measured the same sizes, the first counts.

    Raises ValueError for what cannot be meant.
    """
    found = [_read(path) for path in paths]
    first = found[0]
    for path, other in zip(paths, found, strict=True):
        if (other.device, other.precision) != (first.device, first.precision):
            raise ValueError(
                f"{path}: measured on {other.device} with {other.precision}, but {paths[0]} on {first.device} with "
                f"{first.precision}: give files of one device and precision"
            )
    kinds = sorted({kind for one in found for kind in one.attention})
    return KernelTimes(
        first.device,
        first.precision,
        _joined(one.products for one in found),
        {kind: _joined(one.attention.get(kind, {}) for one in found) for kind in kinds},
        _joined(one.gathers for one in found),
    )


def _joined(parts: Iterable[Mapping[Sizes, Any]]) -> dict[Sizes, Any]:
    joined: dict[Sizes, Any] = {}
    for part in parts:
        joined = {**part, **joined}
    return joined


def _read(path: str) -> KernelTimes:
    try:
        found = an_object(load_json(Path(path).read_bytes()), "kernel times")
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise ValueError(
                f"it is not marked as {FORMAT}, version {VERSION}: use a file that bpipe profile --time-kernels wrote"
            )
        attention: dict[str, dict[Sizes, tuple[float, float]]] = {}
        for row in a_list(found.get("attention"), "attention"):
            kind, *numbers = _row(row, "attention", 6)
            *sizes, forward, backward = _numbers(numbers, "attention", 3)
            attention.setdefault(a_text(kind, "attention's kind"), {})[tuple(sizes)] = (forward, backward)
        products, gathers = (
            {
                tuple(sizes): seconds
                for *sizes, seconds in (
                    _numbers(_row(row, name, count + 1), name, count) for row in a_list(found.get(name), name)
                )
            }
            for name, count in (("products", 3), ("gathers", 2))
        )
        return KernelTimes(
            a_text(found.get("device"), "device"),
            a_text(found.get("precision"), "precision"),
            products,
            attention,
            gathers,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _row(value: object, name: str, length: int) -> list[Any]:
    row = a_list(value, f"a row of {name}")
    if len(row) != length:
        raise ValueError(f"a row of {name} has {len(row)} values, but must have {length}")
    return row


def _numbers(row: Sequence[Any], name: str, num_sizes: int) -> list[float]:
    """Read sizes, which are whole, then seconds; an empty list is none."""
    sizes = [a_whole(value, f"a size of {name}") for value in row[:num_sizes]]
    seconds = [a_number(value, f"seconds of {name}") for value in row[num_sizes:]]
    if min(*sizes, *seconds) <= 0:
        raise ValueError(f"a row of {name} is {list(row)}, but sizes and seconds must be above 0")
    return [*sizes, *seconds]
