"""Losses of further tokens from shards of the output layer.

In the last stage's forward, Megatron's `process_mtp_loss` makes logits of each further token and losses of them, and adds
these to the training through the hidden state that the next token's logits are made of. With shards:

    last stage's forward   zeros replace all losses; autograd says how much each counts; S and T are of all tokens
    last rank's T          losses are known: Megatron's function runs again on them, only for its log

The hidden states of the next token and of each further one are concatenated in what the last stage sends to all shards, and
are one sequence for S and T.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch

from megatron.scheduling.hooks import patches
from megatron.scheduling.vocabulary.output_shards import LossInputs, OutputLayerShard


class FurtherLosses:
    """Wrappers of Megatron's losses of further tokens and of its count of right predictions."""

    def __init__(self) -> None:
        self._logs = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        return {
            patches.FURTHER_LOSSES: patches.replaced_by(self._process),
            patches.ACCEPTED: patches.replaced_by(self._count),
        }

    def _process(self, process: Callable[..., Any], *, output_layer: Any, is_training: bool, **arguments: Any) -> Any:
        if not isinstance(output_layer, OutputLayerShard):
            return process(output_layer=output_layer, is_training=is_training, **arguments)
        if is_training:
            others = {name: value for name, value in arguments.items() if name != "hidden_states"}
            output_layer.log = functools.partial(self._log, process, others)
        # It would log zeros.
        return process(output_layer=output_layer, is_training=False, **arguments)

    @torch.no_grad()
    def _log(
        self,
        process: Callable[..., Any],
        arguments: dict[str, Any],
        losses: Sequence[torch.Tensor],
        largest: Sequence[torch.Tensor],
    ) -> None:
        """Log losses [b, s] of each further token, and whether its label had the largest logit."""
        logits, computed = iter(largest), iter(losses)
        replaced = {
            "hidden_states": torch.zeros(1 + len(losses), 1, 1, device=losses[0].device),
            "output_layer": lambda *_, **__: (next(logits), None),
            "compute_language_model_loss": lambda *_: next(computed),
            "scale_logits_fn": None,
        }
        with patch.object(self, "_logs", True):
            process(**{**arguments, **replaced}, is_training=True)

    def _count(
        self,
        count: Callable[..., Any],
        mtp_logits: torch.Tensor,
        mtp_labels: torch.Tensor,
        loss_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._logs:
            return count(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        # Two classes, of which the second is right: no rank has the logits of more.
        largest = mtp_logits.t()
        classes = torch.stack((~largest, largest), -1).float()
        return count(classes, torch.ones_like(mtp_labels), loss_mask, args[0], True)


def joined(tokens: Sequence[LossInputs]) -> torch.Tensor:
    """Return the concatenated hidden states of all tokens."""
    return tokens[0].hidden if len(tokens) == 1 else torch.cat([token.hidden for token in tokens])


def in_order(values: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Return values [n] of several [b, s], in the order of the logits [s, b, r], of which each of `parts` ranks has a
    part of s of all."""
    turned = [value.detach().t() for value in values]
    if len(values) == 1:
        return turned[0].flatten()
    return torch.cat([value.reshape(parts, -1, value.size(1)) for value in turned], 1).flatten()


def apart(values: torch.Tensor, shape: torch.Size, parts: int) -> list[torch.Tensor]:
    """Return the several [b, s] of this shape from values [n], the inverse of `in_order`."""
    batch, length = shape
    several = values.view(parts, -1, length // parts, batch)
    return [value.reshape(length, batch).t().contiguous() for value in several.unbind(1)]


def counts_of_further(tokens: Sequence[LossInputs]) -> list[torch.Tensor]:
    """Return how much the training's loss grows with each further token's losses.

    Megatron would give it to their graph in the backward, which is too late for shards.
    """
    if len(tokens) == 1:
        return []
    hidden = tokens[0].hidden
    none = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden)
    # The backward needs the graph of the hidden state.
    return list(torch.autograd.grad(hidden, [token.losses for token in tokens[1:]], none, retain_graph=True))
