"""How much copies that occupy compute units slow matrix products down, and how much copies by copy engines do.

In: a device. Out: for each number of units, the time of the same products with the copies beside them over the time
without, in turn. They are computed by the library's kernels, and by a persistent one with a program for each unit,
which may take twice as long beside a receive that waits for its sender. The copies move bytes inside the device's
memory only to occupy units and memory bandwidth, as NCCL's kernels would: how fast they are is not a transfer rate and
is not reported.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bpipe.runtime.streams import Clock
from tests.gpu.accelerators import Accelerator, beside
from tests.gpu.common import (
    FULL,
    MODERATE,
    SMALL,
    Result,
    Spread,
    drawn,
    pinned_region,
    random_bytes,
    ratios,
    repeats,
    seconds,
)


@dataclass(frozen=True)
class Sizes:
    """`dtype`: that of the products. Triton's interpreter, by which late devices run kernels, has no bfloat16."""

    matrix: int
    products: int
    copy_bytes: int
    units: tuple[int, ...]
    repeats: int
    dtype: torch.dtype = torch.bfloat16


SIZES = {
    FULL: Sizes(8192, 20, 1 << 30, (1, 2, 4, 8, 16, 32), 7),
    MODERATE: Sizes(4096, 10, 256 << 20, (1, 8), 3),
    SMALL: Sizes(300, 1, 64 << 10, (1, 2), 2, torch.float32),
}


class Products:
    """The same products, every time, by the library's kernels."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.left, self.right = (drawn((sizes.matrix, sizes.matrix), seed, device).to(sizes.dtype) for seed in range(2))
        self.target = torch.empty_like(self.left)
        self.count = sizes.products

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.left, self.right, out=self.target)


class PersistentProducts:
    """The same by a persistent kernel."""

    def __init__(self, products: Products, programs: int) -> None:
        self._products = products
        self._programs = programs

    def __call__(self) -> None:
        from tests.gpu import kernels

        products = self._products
        for _ in range(products.count):
            kernels.multiply(products.left, products.right, products.target, self._programs)

    def is_right(self) -> bool:
        """Return whether its products are those of the library, within what a sum in another order changes."""
        self()
        expected = self._products.left.float() @ self._products.right.float()
        largest = float(expected.abs().max())
        return float((self._products.target.float() - expected).abs().max()) <= 0.01 * largest


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device, result = on.device, Result()
    products = Products(device, sizes)
    persistent = PersistentProducts(products, on.units())
    from tests.gpu import kernels

    result.check("products of a persistent kernel", persistent.is_right(), "within 1 % of the largest")
    source = random_bytes(sizes.copy_bytes, device).view(torch.int32)
    target = torch.empty_like(source)
    out, home = (pinned_region(sizes.copy_bytes, device) for _ in range(2))

    def by_engines(times: int) -> None:
        for _ in range(times):
            out.write([(0, source.view(torch.uint8))])
            home.read([(0, target.view(torch.uint8))])

    copies: dict[str, Callable[[int], None]] = {"copy engines, to and from pinned host memory, in turn": by_engines}
    for units in sizes.units:
        copies[f"{units} compute units"] = lambda times, units=units: kernels.copy(source, target, units, times)  # type: ignore[misc]
    works: dict[str, Callable[[], None]] = {"products": products, "products of a persistent kernel": persistent}
    share = (until - time.monotonic()) / (len(copies) * len(works))
    for (work, compute), (name, copy) in itertools.product(works.items(), copies.items()):
        found = _slowed(device, compute, copy, sizes.repeats, time.monotonic() + share)
        if found is None:
            result.row(f"{work} beside {name}", "not measured: the copies ended first in every run")
            continue
        result.row(f"{work} beside {name} / alone", found.text(digits=5))
        result.facts[f"{work} beside {name}"] = found.facts()
    if not torch.equal(source, target):
        result.check("what the copy kernel copied", False, "differs from its source")
    result.row("note", "copies inside the device's memory, only to occupy units; no transfer, and no rate of a link")
    for region in (out, home):
        region.close()
    return result


def _slowed(
    device: torch.device, products: Callable[[], None], copy: Callable[[int], None], most: int, until: float
) -> Spread | None:
    """Time with copies over time without. Only runs count in which the copies lasted longer than the products."""
    clock, stream = Clock(device), torch.Stream(device)
    seconds(device, products)
    seconds(device, lambda: copy(1))
    alone_s = seconds(device, products)
    # Twice as long as they would have to be if they did not slow each other.
    times = 1 + round(2 * alone_s / seconds(device, lambda: copy(1)))
    slowed, alone = [], []
    for _ in repeats(most, until, least=2):
        quiet_s = seconds(device, products)
        with beside(stream):
            copy(times)
            copied = clock.mark()
        begin = clock.mark()
        products()
        taken_s = clock.mark().since(begin)
        if copied.since(begin) > taken_s:
            slowed.append(taken_s)
            alone.append(quiet_s)
    return ratios(slowed, alone) if slowed else None
