"""Attention stages for micro-batches in slices, in plain torch. Keys and values are kept, and their gradients
collected, by the trainer's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bpipe.runtime.stage import Part, Tensors, TorchStages
from bpipe.schedule.action import Action
from megatron.scheduling.slices.attention import KeptKeys
from megatron.scheduling.slices.cuts import Cutting


def new_keys(rows: int, slices: int) -> KeptKeys:
    """Kept keys and values of slices that have `rows` rows each."""
    return KeptKeys(Cutting([rows * number for number in range(slices + 1)]))


def probabilities(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention weights (own, so far) of queries (own, channels) over keys (so far, channels)."""
    return (query @ keys.t() / query.size(-1) ** 0.5).masked_fill(mask, -1e9).softmax(dim=-1)


class Attend(torch.autograd.Function):
    """Attention that saves its inputs but no scores, whose size would differ between slices."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, keys, values)
        ctx.mask = mask
        return probabilities(query, keys, mask) @ values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            query, keys, values = saved
            output = probabilities(query, keys, ctx.mask) @ values
        return (*torch.autograd.grad(output, saved, gradients), None)


class SlicedStages(TorchStages):
    """A rank's stages: they set the current slice, and free the keys after the first slice's backward."""

    def __init__(self, parts: Mapping[int, Part], keys: KeptKeys) -> None:
        super().__init__(parts)
        self._keys = keys

    def forward(self, action: Action, received: Tensors) -> Tensors:
        with self._keys.cutting.at(action.microbatch, action.stage):
            return super().forward(action, received)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._keys.cutting.at(action.microbatch, action.stage) as now:
            result = super().backward(action, gradients)
        if now.number == 0:
            self._keys.free(now.stage, now.microbatch)
        return result
