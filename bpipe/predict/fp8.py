"""Describe training with matrices of 8-bit values. In: Megatron's words for it. Out: a frozen `Fp8`. Knows no model.

As Transformer Engine does it: of the layers' matrices products are of 8 bit, forward and backward. Embedding, output layer, norms, the
attention core, routers, gradients of weights and what optimizers hold stay as they are. The recipe says where scales come from:
  delayed     of a tensor's past values
  tensorwise  of its own values, which are read once more for it
  blockwise   every 128 values have one, of 32 bit
  mxfp8       every 32 values have one, of 8 bit
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from bpipe.predict.cluster import DeviceKind

FORMATS = ("hybrid", "e4m3")
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
# Scaled in blocks along the sum, a value is another one in either direction.
_IN_BLOCKS = ("blockwise", "mxfp8")


@dataclass(frozen=True, slots=True)
class Fp8:
    """FP8 settings. `format` is that of gradients: 5 bits of exponent with `hybrid`.

    `param_gather`: weights are kept and gathered in 8 bit only.
    """

    format: str = FORMATS[0]
    recipe: str = RECIPES[0]
    param_gather: bool = False

    def __post_init__(self) -> None:
        for name, value, choices in (("fp8 format", self.format, FORMATS), ("fp8 recipe", self.recipe, RECIPES)):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")

    def check(self, device: DeviceKind, *, on_gpu: bool, distributed_optimizer: bool) -> None:
        """Raise ValueError for a device that does not multiply so, and for trainings that have no use for it.

        `on_gpu`: in 16 bits, by kernels of a GPU.
        """
        if device.fp8_flops_per_s is None:
            raise ValueError(
                f"{device.name} has no known FP8 support: choose another device, or give fp8_tflops in a cluster file"
            )
        if self.recipe == "mxfp8" and not device.fp8_blocks:
            raise ValueError(
                f"{device.name} has no mxfp8, which came with Blackwell: give --fp8-recipe tensorwise, delayed or "
                f"blockwise"
            )
        if not on_gpu:
            raise ValueError("FP8 is for training in bf16 or fp16 on GPUs: give --precision bf16 and kernels gpu")
        if self.param_gather and not distributed_optimizer:
            raise ValueError("--fp8-param-gather is for the distributed optimizer: leave one of the two out")

    @property
    def value_bytes(self) -> Fraction:
        """Bytes of a value with its part of a scale."""
        return Fraction(33, 32) if self.recipe in _IN_BLOCKS else Fraction(1)

    def copies(self, multiplies_any_layout: bool) -> int:
        """Return how many copies of an operand are kept: two where products need it transposed, too.

        Hopper multiplies 8 bit in one layout only.
        """
        return 2 if self.recipe in _IN_BLOCKS or not multiplies_any_layout else 1

    @property
    def readings(self) -> int:
        """How often a 16-bit tensor is read to be written in 8 bit."""
        return 2 if self.recipe == "tensorwise" else 1

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a weight when weights are gathered after an update: those in small blocks pass in 16 bit, through
        the gradients' buffer."""
        return 1 if self.param_gather and self.recipe != "mxfp8" else 2
