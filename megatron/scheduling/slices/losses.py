"""Let losses of routers to experts, and of further tokens, be those of a whole micro-batch.

The z loss is an average over tokens, so a slice's is weighted with its share of the tokens. The balancing loss multiplies, by
expert, the probability that tokens gave it with the number of tokens that went there, both of the WHOLE micro-batch. A
slice's forward does not know this number yet, but its backward does, since all forwards of the micro-batch have run: so
gradients use the final counts. Logged losses add up, since a slice reports by how much it has changed the loss of the slices
so far.

A layer that predicts the token d places on needs tokens after the slice's end. So the whole row is rolled, and cut again.
Its losses become a row as those of the last stage do, so that Megatron divides them by the tokens of the whole micro-batch.
"""

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
    """One router's loss of the slices of a micro-batch so far."""

    counts: torch.Tensor
    """Tokens by expert."""

    probabilities: torch.Tensor
    """Sums of probabilities by expert."""

    loss: torch.Tensor
    """Loss of these."""


class ExpertLosses:
    """Inputs of routers' losses of micro-batches under way, by stage, micro-batch, router and loss."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._so_far: dict[Key, dict[tuple[torch.nn.Module, str], _SoFar]] = {}
        self._whose: tuple[torch.nn.Module, str] | None = None

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            patches.AUX_LOSS: patches.replaced_by(functools.partial(self._apply, "aux_loss")),
            patches.SEQUENCE_AUX_LOSS: patches.replaced_by(functools.partial(self._apply, "seq_aux_loss")),
            patches.BALANCING_LOSS: patches.replaced_by(self._balance),
            patches.Z_LOSS: patches.replaced_by(self._weigh),
        }

    def free(self, stage: int, microbatch: int) -> None:
        self._so_far.pop((stage, microbatch), None)

    def clear(self) -> None:
        self._so_far.clear()

    def _apply(self, name: str, apply: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
        """Note whose loss is computed, and which of a router's."""
        self._whose = router, name
        try:
            return apply(router, *args, **kwargs)
        finally:
            self._whose = None

    def _weigh(self, z_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = z_loss(*args, **kwargs)
        if self._cutting.now is None:
            return loss
        begin, end = self._cutting.span
        return loss * ((end - begin) / self._cutting.length)

    def _balance(
        self,
        loss: Callable[..., Any],
        probs: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        total_num_tokens: Any,
        topk: int,
        num_experts: int,
        moe_aux_loss_coeff: float,
        **others: Any,
    ) -> Any:
        now = self._cutting.now
        if now is None:
            return loss(probs, tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff, **others)
        begin, end = self._cutting.span
        tokens = float(total_num_tokens) * self._cutting.length / (end - begin)
        factor = num_experts * moe_aux_loss_coeff / (topk * tokens * tokens)
        assert self._whose is not None, "a balancing loss belongs to no router"
        of_microbatch = self._so_far.setdefault((now.stage, now.microbatch), {})
        so_far = of_microbatch.get(self._whose)
        if so_far is None:
            zeros = torch.zeros_like(tokens_per_expert), probs.new_zeros(probs.size(1)), probs.new_zeros(())
            so_far = of_microbatch[self._whose] = _SoFar(*zeros)
        return _Balance.apply(probs, tokens_per_expert, so_far, factor)


class _Balance(torch.autograd.Function):
    """By how much a slice changes the loss; the backward uses the counts at its time."""

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


def wraps_of_further(cutting: Cutting) -> dict[patches.Patch, patches.Wrap]:
    return {
        patches.ROLL: patches.replaced_by(functools.partial(_roll, cutting)),
        patches.FURTHER_LOSSES: patches.replaced_by(functools.partial(_process_losses, cutting)),
        patches.ACCEPTED: patches.replaced_by(functools.partial(_count_accepted, cutting)),
    }


def _roll(cutting: Cutting, roll: Callable[..., Any], tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Run `roll_tensor`. Whole rows, which losses get, do not change."""
    if cutting.now is None or tensor is None or tensor.size(-1) == cutting.length:
        return roll(tensor, *args, **kwargs)
    rolled, total = roll(cutting.row_of(tensor), *args, **kwargs)
    return cutting.cut(rolled), total


def _process_losses(
    cutting: Cutting,
    process: Callable[..., Any],
    *,
    labels: torch.Tensor | None,
    loss_mask: torch.Tensor | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    **others: Any,
) -> Any:
    """Run `process_mtp_loss` on rows of labels and of the loss mask, and make rows of the slice's losses."""

    def compute_row(row: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return cutting.pad(compute_language_model_loss(cutting.cut(row), logits))

    compute = compute_language_model_loss
    if cutting.now is not None and labels is not None:
        compute, labels = compute_row, cutting.row_of(labels)
        loss_mask = None if loss_mask is None else cutting.row_of(loss_mask)
    return process(labels=labels, loss_mask=loss_mask, compute_language_model_loss=compute, **others)


def _count_accepted(
    cutting: Cutting,
    count: Callable[..., Any],
    mtp_logits: torch.Tensor,
    mtp_labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `_compute_mtp_acceptance_counts`, which compares predictions with labels, on the slice's own labels."""
    return count(mtp_logits, cutting.cut(mtp_labels), cutting.cut(loss_mask), *args, **kwargs)
