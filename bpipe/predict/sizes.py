"""Sizes of tensors in bytes of one device, and the rates that software reaches of its peaks.

The shares are the same for every model and device; docs/validation.md compares predictions with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from bpipe.predict.layout import Setup

# What products of half precision reach of the best that was measured of any on the device, beside what their shapes
# cost (`products`): in training they run hot and among other kernels. Of 0.88 to 0.92 the published runs, with their
# flags and what is hidden charged its share (`matmul`), fit this best.
PRODUCT_EFFICIENCY = 0.90
# FlashAttention-2 reaches 50 to 73 % of an A100's peak forward and less backward (Dao 2023, section 4.1), most at large
# batches.
FLASH_EFFICIENCY = 0.50
# Streaming kernels reach 80 to 90 % of the memory's bandwidth; short ones less.
MEMORY_EFFICIENCY = 0.80
# NCCL's bus bandwidth on large messages: about 230 of 300 GB/s on NVLink of an A100, the same share between nodes.
LINK_EFFICIENCY = 0.77
LINK_LATENCY_S = 20e-6
# Launch of a kernel.
KERNEL_S = 4e-6


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the device for this setup, per second."""

    products: float
    """FLOPs of products that fill all waves."""
    flash: float
    """FLOPs of flash attention."""
    memory: float
    """Bytes of memory."""
    link: float
    """Bytes sent while its tensor-parallel ranks exchange."""
    low: float = 0.0
    """FLOPs of products in FP8."""

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


class Saved(NamedTuple):
    """Saved storages: `num` of `nbytes` each."""

    name: str
    nbytes: int
    num: int = 1


def total(rows: tuple[Saved, ...]) -> int:
    return sum(row.nbytes * row.num for row in rows)


def shard_size(value: int | Fraction, shards: int) -> int:
    """Return the size of one shard, rounded up."""
    return -(-value // shards)


def element_bytes(setup: Setup) -> int:
    return 4 if setup.precision == "fp32" else 2


def kept_bytes(setup: Setup, num_values: int, shards: int) -> int:
    """Return bytes kept of inputs of a layer's matrix for the gradient of its weights, on one of `shards` devices."""
    if setup.fp8 is None:
        return shard_size(element_bytes(setup) * num_values, shards)
    return ceil(shard_size(num_values, shards) * setup.fp8.value_bytes)


def num_tokens(setup: Setup) -> int:
    """Return the tokens of one micro-batch, or of one slice, on one context-parallel rank."""
    if setup.span is not None:
        return (setup.span[1] - setup.span[0]) * setup.micro_batch
    return setup.sequence * setup.micro_batch // setup.context


def predicted_tokens(setup: Setup) -> int:
    """Return how many tokens are predicted of them, with further ones."""
    return num_tokens(setup) * setup.model.num_predictions


def num_keys(setup: Setup) -> int:
    """Return how many tokens of a sequence a query may attend to: of a slice, all up to its end."""
    return setup.sequence if setup.span is None else setup.span[1]


def sent_bytes(setup: Setup) -> int:
    """Return bytes that a stage sends to the next for a micro-batch: a value for every token and hidden unit."""
    return shard_size(element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size, setup.sequence_shards)


def sent_from(setup: Setup, stage: int) -> int:
    """Return the same of one stage: behind the one that predicts further tokens there are values for each of these."""
    behind = setup.further_stage is not None and stage >= setup.further_stage
    return sent_bytes(setup) * (setup.model.num_predictions if behind else 1)
