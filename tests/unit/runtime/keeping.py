"""A Function that saves the given bytes, for micro-batches of differing sizes; its gradient depends on all of them."""

from __future__ import annotations

from typing import Any

import torch


class Keeping(torch.autograd.Function):
    """Saves the tensors given after its input; its gradient depends on every byte of them and its position."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        weighed = sum(int((part.long() * torch.arange(1, len(part) + 1)).sum()) % 1009 for part in ctx.saved_tensors)
        return (gradient * (1 + weighed / 4096), *[None] * len(ctx.saved_tensors))
