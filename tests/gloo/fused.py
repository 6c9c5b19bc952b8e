"""Plain torch in place of the extension that accumulates weight gradients in a matrix product, which needs a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

NAME = "fused_weight_gradient_mlp_cuda"


def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_gradient: torch.Tensor) -> None:
    """Add a weight's gradient to its main gradient: (tokens, in), (tokens, out), (out, in)."""
    main_gradient.addmm_(gradient.t(), inputs)


def extension() -> ModuleType:
    module = ModuleType(NAME)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    return module


def stand_in() -> None:
    """Install the module. Call it before Megatron is imported, which looks for the extension then."""
    sys.modules[NAME] = extension()
