"""Let layers that predict further tokens look behind a slice's end.

In: `Cutting`. Out: wraps of what they roll rows and compute their losses by.

The layer of depth d embeds the token d places on, and its labels and loss mask are d places on, too. Those of a slice's
last tokens are the next slice's. So what was cut is rolled as the whole row that it was cut from, and cut again. Losses
become a row as those of the last stage do, so that Megatron divides them by the tokens of the whole micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting


def wraps(cutting: Cutting) -> dict[patches.Patch, patches.Wrap]:
    """Return what is put in place of what."""
    return {
        patches.ROLL: functools.partial(_roll, cutting),
        patches.FURTHER_LOSSES: functools.partial(_losses, cutting),
        patches.ACCEPTED: functools.partial(_accepted, cutting),
    }


def _roll(cutting: Cutting, roll: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `roll_tensor`: of rows nothing changes, which is what losses are given."""

    @functools.wraps(roll)
    def run(tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if cutting.now is None or tensor is None or tensor.size(-1) == cutting.length:
            return roll(tensor, *args, **kwargs)
        rolled, total = roll(cutting.row_of(tensor), *args, **kwargs)
        return cutting.cut(rolled), total

    return run


def _losses(cutting: Cutting, process: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `process_mtp_loss`: give it rows of labels and of the loss mask, and make rows of the slice's losses."""

    @functools.wraps(process)
    def run(
        *,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        **others: Any,
    ) -> Any:
        def of_slice(row: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return cutting.pad(compute_language_model_loss(cutting.cut(row), logits))

        if cutting.now is None or labels is None:
            compute = compute_language_model_loss
        else:
            compute = of_slice
            labels = cutting.row_of(labels)
            loss_mask = None if loss_mask is None else cutting.row_of(loss_mask)
        return process(labels=labels, loss_mask=loss_mask, compute_language_model_loss=compute, **others)

    return run


def _accepted(cutting: Cutting, count: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_compute_mtp_acceptance_counts`: it compares predictions with labels, of which a slice has its own."""

    @functools.wraps(count)
    def run(
        mtp_logits: torch.Tensor, mtp_labels: torch.Tensor, loss_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return count(mtp_logits, cutting.cut(mtp_labels), cutting.cut(loss_mask), *args, **kwargs)

    return run
