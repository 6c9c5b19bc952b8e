"""Keep the two copies of a tied weight equal where the first stage and the last are of one rank.

In: the rank's first chunk, which embeds, and its last, which has the output layer. Out: the second copy filled from the
first, and their gradients added up. Between two ranks Megatron does both by an all-reduce; two numbers have one sum, so
the bits are the same. Knows no schedule and no groups.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model


def fill(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Give the last chunk's copy the first's value, if the two are tied and of this rank.

    Both must be new, without wrappers.
    """
    weights = _both(first, last)
    if weights is not None:
        # Buckets of the distributed optimizer have these alone, so that a rank's share of both is the same part of
        # them.
        unmarked = [weight for weight in weights if not getattr(weight, "shared_embedding", False)]
        assert not unmarked, "Megatron marks both copies as shared"
        weights[1].data.copy_(weights[0].data)


def add_up(first: torch.nn.Module, last: torch.nn.Module) -> None:
    """Give both copies the sum of their gradients, if they are tied and of this rank. Frozen ones have none."""
    weights = _both(*(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in (first, last)))
    if weights is None:
        return
    gradients = [weight.main_grad if hasattr(weight, "main_grad") else weight.grad for weight in weights]
    if any(gradient is None for gradient in gradients):
        return
    gradients[0].add_(gradients[1])
    gradients[1].copy_(gradients[0])


def _both(first: Any, last: Any) -> tuple[Any, Any] | None:
    """Return the copy of the first stage and that of the last, or of what predicts further tokens beside it."""
    if not first.pre_process or not (last.post_process or getattr(last, "mtp_process", False)):
        return None
    if not last.share_embeddings_and_output_weights and not getattr(last, "mtp_process", False):
        return None
    copy = last.shared_embedding_or_output_weight()
    # Of an output layer in shards there is none: `tied_shards`.
    return None if copy is None else (first.shared_embedding_or_output_weight(), copy)
