"""Let losses of routers to experts be a whole micro-batch's.

In: `Cutting`. Out: wraps of what routers compute their losses by.

The z loss is an average over tokens: a slice's has its share of the tokens for weight. The balancing loss multiplies,
by expert, what tokens gave it in probability with how many went there, both of the WHOLE micro-batch. A slice's forward
does not know the latter yet. Its backward does, since all forwards of the micro-batch have run: so gradients use the
counts as they are then. What is logged adds up, since a slice reports by how much it has changed the loss of the slices
so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.schedule.action import Key
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting


@dataclass
class _SoFar:
    """Of one router's loss and micro-batch: tokens and probabilities by expert of the slices so far, and the loss of
    these."""

    counts: torch.Tensor
    probabilities: torch.Tensor
    loss: torch.Tensor


class ExpertLosses:
    """Inputs of routers' losses of micro-batches under way, by stage, micro-batch, router and loss."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._so_far: dict[Key, dict[tuple[torch.nn.Module, str], _SoFar]] = {}
        self._whose: tuple[torch.nn.Module, str] | None = None

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return what is put in place of what."""
        return {
            patches.AUX_LOSS: functools.partial(self._named, "aux_loss"),
            patches.SEQUENCE_AUX_LOSS: functools.partial(self._named, "seq_aux_loss"),
            patches.BALANCING_LOSS: self._balance,
            patches.Z_LOSS: self._weigh,
        }

    def free(self, stage: int, microbatch: int) -> None:
        self._so_far.pop((stage, microbatch), None)

    def clear(self) -> None:
        self._so_far.clear()

    def _named(self, name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Note whose loss is computed, and which of a router's."""

        @functools.wraps(apply)
        def run(router: Any, *args: Any, **kwargs: Any) -> Any:
            self._whose = router, name
            try:
                return apply(router, *args, **kwargs)
            finally:
                self._whose = None

        return run

    def _weigh(self, z_loss: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(z_loss)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = z_loss(*args, **kwargs)
            if self._cutting.now is None:
                return found
            begin, end = self._cutting.span
            return found * ((end - begin) / self._cutting.length)

        return run

    def _balance(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loss)
        def run(
            probs: torch.Tensor,
            tokens_per_expert: torch.Tensor,
            total_num_tokens: Any,
            topk: int,
            num_experts: int,
            moe_aux_loss_coeff: float,
            **others: Any,
        ) -> torch.Tensor:
            now = self._cutting.now
            if now is None:
                whole: torch.Tensor = loss(
                    probs, tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff, **others
                )
                return whole
            begin, end = self._cutting.span
            tokens = float(total_num_tokens) * self._cutting.length / (end - begin)
            factor = num_experts * moe_aux_loss_coeff / (topk * tokens * tokens)
            assert self._whose is not None, "a balancing loss belongs to no router"
            of_microbatch = self._so_far.setdefault((now.stage, now.microbatch), {})
            before = of_microbatch.get(self._whose)
            if before is None:
                zeros = torch.zeros_like(tokens_per_expert), probs.new_zeros(probs.size(1)), probs.new_zeros(())
                before = of_microbatch[self._whose] = _SoFar(*zeros)
            changed: torch.Tensor = _Balance.apply(probs, tokens_per_expert, before, factor)
            return changed

        return run


class _Balance(torch.autograd.Function):
    """By how much a slice changes the loss; backward, by the counts as they are then."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, counts: torch.Tensor, so_far: _SoFar, factor: float) -> torch.Tensor:
        ctx.so_far, ctx.factor, ctx.shape = so_far, factor, probs.shape
        so_far.counts += counts
        so_far.probabilities += probs.sum(dim=0)
        before = so_far.loss
        so_far.loss = (so_far.probabilities * so_far.counts).sum() * factor
        return so_far.loss - before

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        counts = ctx.so_far.counts.to(gradient.dtype)
        return (gradient * ctx.factor * counts).expand(ctx.shape), None, None, None
