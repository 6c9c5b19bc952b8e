"""Say what software reaches of a device's peaks. In: a Setup. Out: `Rates`, a second's work. Knows no layer.

The shares are the same for every model and device; how far predictions made of them are from measurements is in
docs/validation.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.predict.layout import Setup

# What products of half precision reach of the best that was measured of any on the device, beside what their shapes
# cost (`products`): in training they run hot and among other kernels. Of 0.88 to 0.92 the published runs, with their
# flags and what is hidden charged its share (`tensor_parallel`), fit this best.
PRODUCT_EFFICIENCY = 0.90
# FlashAttention-2 reaches 50 to 73 % of an A100's peak forward and less backward (Dao 2023, section 4.1), most at large
# batches.
FLASH_EFFICIENCY = 0.50
# Streaming kernels reach 80 to 90 % of the memory's bandwidth; short ones less.
MEMORY_EFFICIENCY = 0.80
# NCCL's bus bandwidth on large messages: about 230 of 300 GB/s on NVLink of an A100, the same share between nodes.
LINK_EFFICIENCY = 0.77
LINK_LATENCY_S = 20e-6
# What a kernel takes beside its work.
KERNEL_S = 4e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the device for this setup, per second. `products` fill all waves, `low` are those in FP8.

    `link` is what it sends while its tensor-parallel ranks exchange.
    """

    products: float
    flash: float
    memory: float
    link: float
    low: float = 0.0

    @staticmethod
    def of(setup: Setup) -> Rates:
        device = setup.cluster.device
        peak = device.peak_flops_per_s / (2 if setup.precision == "fp32" else 1)
        return Rates(
            peak * device.product_share * PRODUCT_EFFICIENCY,
            peak * FLASH_EFFICIENCY,
            device.memory_bytes_per_s * MEMORY_EFFICIENCY,
            device.among(setup.tensor) * LINK_EFFICIENCY,
            0.0 if setup.fp8 is None else setup.peak_flops_per_s * device.fp8_share * PRODUCT_EFFICIENCY,
        )
