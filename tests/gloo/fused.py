"""Plain torch in the place of the extension that adds a weight's gradient up inside its matrix product: that one needs
a GPU.

In: a process in which Megatron was not imported yet. Out: one in which it finds the extension.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_gradient: torch.Tensor) -> None:
    """Add a weight's gradient to its main gradient: (tokens, in), (tokens, out), (out, in)."""
    main_gradient.addmm_(gradient.t(), inputs)


def stand_in() -> None:
    """Before Megatron, which looks for the extension when it is imported."""
    extension = ModuleType("fused_weight_gradient_mlp_cuda")
    extension.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    sys.modules[extension.__name__] = extension
