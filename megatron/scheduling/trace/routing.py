"""Route tokens evenly on a device whose scores have no values, as the formulas of `bpipe.predict` assume.

A dispatcher needs scores only for how many tokens go where. These numbers are real, on the host, and equal for all experts;
the dispatcher computes everything else itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Megatron's dispatchers import this by name, to exchange how many tokens they send.
_GATHER = "gather_from_sequence_parallel_region"


def even_loads(config: Any, tokens: int, experts: int) -> torch.Tensor:
    """Return how many of `tokens` go to each of the first `experts`; a remainder is spread."""
    num_sent, num_experts = tokens * int(config.moe_router_topk), int(config.num_moe_experts)
    loads = (torch.arange(experts + 1) * num_sent // num_experts).diff()
    capacity = config.moe_expert_capacity_factor
    return loads if capacity is None else loads.clamp(max=math.ceil(num_sent / num_experts * capacity))


class _EvenLoads(TorchFunctionMode):
    """Computes sums of a map of tokens and experts (one row per token), and its selections."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.sum and args[0].dtype is torch.bool and args[0].is_meta:
            return even_loads(self._config, *args[0].shape)
        if function is torch.Tensor.masked_select:
            values, mask = args
            # Both are transposed here: one row per expert.
            return _Selection.apply(values, mask, int(even_loads(self._config, mask.shape[1], mask.shape[0]).sum()))
        return function(*args, **(kwargs or {}))


class _Selection(torch.autograd.Function):
    """Torch's selection by a mask, which saves its input and the mask, without values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(number)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


def route_evenly() -> None:
    """Let dispatchers count even loads. Call once, after Megatron was imported."""
    from megatron.core.transformer.moe import token_dispatcher

    plain = getattr(token_dispatcher, _GATHER)
    setattr(token_dispatcher, _GATHER, functools.partial(_gathered, plain))
    for owner, name in (
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess"),
        (token_dispatcher.MoEAllGatherTokenDispatcher, "dispatch_postprocess"),
    ):
        setattr(owner, name, _evenly(getattr(owner, name)))


def _evenly(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any) -> Any:
        with _EvenLoads(self.config):
            return method(self, *args)

    return run


def _gathered(plain: Callable[..., Any], numbers: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
    """Return a tensor on the host for every rank: all ranks route alike."""
    if numbers.device.type == "cpu":
        return numbers.repeat(group.size())
    return plain(numbers, *args, group=group, **kwargs)
