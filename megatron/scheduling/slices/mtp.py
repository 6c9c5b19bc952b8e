"""Let layers that predict further tokens see tokens after a slice's end.

The layer of depth d embeds the token d places on, and its labels and loss mask are d places on, too. Those of a slice's last
tokens are in the next slice. So the whole row is rolled, and cut again. Losses become a row as those of the last stage do, so
that Megatron divides them by the tokens of the whole micro-batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting


def wraps(cutting: Cutting) -> dict[patches.Patch, patches.Wrap]:
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
