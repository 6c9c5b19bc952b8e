"""What this machine could do at best: copies between device and pinned host memory, and matrix products.

In: a device. Out: rates to hold the other steps against. A copy inside the device's memory is measured as a limit of
that memory and is never a transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.gpu.accelerators import Accelerator, beside, join
from tests.gpu.common import (
    FULL,
    MODERATE,
    SMALL,
    Result,
    Spread,
    drawn,
    pinned_region,
    random_bytes,
    repeats,
    seconds,
    tidy,
)


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int
    matrix: int
    products: int
    repeats: int


SIZES = {
    FULL: Sizes(1 << 30, 8192, 20, 15),
    MODERATE: Sizes(64 << 20, 4096, 5, 5),
    SMALL: Sizes(1 << 20, 64, 2, 2),
}


@dataclass(frozen=True)
class CopyRates:
    """Bytes a second between the device and pinned host memory; `both` is the sum of two copies that run at once."""

    out: Spread
    home: Spread
    both: Spread


def copy_rates(device: torch.device, nbytes: int, most: int, until: float) -> CopyRates:
    """Return the rates of each direction alone, then of both at once, in turn."""
    here = [random_bytes(nbytes, device) for _ in range(2)]
    there = [pinned_region(nbytes, device) for _ in range(2)]
    # As a transfer's: CUDA's default stream takes no batches.
    outward, homeward = torch.Stream(device), torch.Stream(device)

    def out() -> None:
        with beside(outward):
            there[0].write([(0, here[0])])
        join(outward)

    def home() -> None:
        with beside(homeward):
            there[1].read([(0, here[1])])
        join(homeward)

    def both() -> None:
        with beside(homeward):
            there[1].read([(0, here[1])])
        out()
        join(homeward)

    for work in (out, home, both):
        seconds(device, work)
    found: dict[Callable[[], None], list[float]] = {out: [], home: [], both: []}
    for _ in repeats(most, until):
        for work, rates in found.items():
            rates.append((2 if work is both else 1) * nbytes / seconds(device, work))
    for region in there:
        region.close()
    return CopyRates(*(Spread.of(rates) for rates in found.values()))


def product_rate(device: torch.device, size: int, products: int, most: int, until: float) -> Spread:
    """Floating-point operations a second of a square bf16 matrix product on random numbers."""
    left, right = (drawn((size, size), seed, device).to(torch.bfloat16) for seed in range(2))
    target = torch.empty_like(left)

    def work() -> None:
        for _ in range(products):
            torch.mm(left, right, out=target)

    seconds(device, work)
    return Spread.of([2 * size**3 * products / seconds(device, work) for _ in repeats(most, until)])


def internal_rate(device: torch.device, nbytes: int, most: int, until: float) -> Spread:
    """Return the bytes a second, read and written, of a copy inside the device's memory."""
    source = random_bytes(nbytes, device)
    target = torch.empty_like(source)
    seconds(device, lambda: target.copy_(source))
    return Spread.of([2 * nbytes / seconds(device, lambda: target.copy_(source)) for _ in repeats(most, until)])


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    device, result = on.device, Result()
    rates = copy_rates(device, sizes.copy_bytes, sizes.repeats, until)
    tidy(device)
    mebibytes = sizes.copy_bytes / 2**20
    result.row(f"device to pinned host, {mebibytes:g} MiB", f"GB/s {rates.out.text(1e-9)}")
    result.row(f"pinned host to device, {mebibytes:g} MiB", f"GB/s {rates.home.text(1e-9)}")
    result.row("both at once, sum", f"GB/s {rates.both.text(1e-9)}")
    product = product_rate(device, sizes.matrix, sizes.products, sizes.repeats, until)
    result.row(f"bf16 matrix product, {sizes.matrix} cubed, random", f"TFLOP/s {product.text(1e-12)}")
    tidy(device)
    internal = internal_rate(device, 4 * sizes.copy_bytes, sizes.repeats, until)
    result.row("limit only, no transfer: copy inside the device, read + written", f"GB/s {internal.text(1e-9)}")
    spreads: dict[str, Any] = {
        "device_to_host_bytes_per_s": rates.out,
        "host_to_device_bytes_per_s": rates.home,
        "both_bytes_per_s": rates.both,
        "bf16_flop_per_s": product,
        "internal_copy_bytes_per_s_read_and_written": internal,
    }
    result.facts = {name: spread.facts() for name, spread in spreads.items()}
    return result
