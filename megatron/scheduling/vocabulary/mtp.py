"""Compute the losses of further tokens from shards of the output layer.

In: Megatron's `process_mtp_loss`, by which the last stage's forward makes logits of each further token, losses of them,
and adds these to the training through the hidden state that the next token's logits are made of. Out: wraps of it, and
what shards need of several tokens at once.

    last stage's forward   zeros stand in for all losses; autograd says how much each counts, S and T are of all tokens
    last rank's T          losses are known: Megatron's function runs again, on them and for its log alone

The hidden states of the next token and of each further one lie one behind another in what the last stage sends to all
shards, and are one sequence to S and T.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.scheduling.hooks import patches
from megatron.scheduling.vocabulary.output_shards import LossInputs, OutputLayerShard


class FurtherLosses:
    """Wraps of Megatron's losses of further tokens and of its count of right predictions."""

    def __init__(self) -> None:
        self._logs = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return what to put in place of what."""
        return {patches.FURTHER_LOSSES: self._wrap_losses, patches.ACCEPTED: self._wrap_accepted}

    def _wrap_losses(self, process: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(process)
        def weighed(*, output_layer: Any, is_training: bool, hidden_states: torch.Tensor, **given: Any) -> Any:
            if not isinstance(output_layer, OutputLayerShard):
                return process(output_layer=output_layer, is_training=is_training, hidden_states=hidden_states, **given)
            if is_training:
                output_layer.log_later(functools.partial(self._log, process, given))
            # What it would log are zeros.
            return process(output_layer=output_layer, is_training=False, hidden_states=hidden_states, **given)

        return weighed

    @torch.no_grad()
    def _log(
        self,
        process: Callable[..., Any],
        given: dict[str, Any],
        losses: Sequence[torch.Tensor],
        largest: Sequence[torch.Tensor],
    ) -> None:
        """Log losses [b, s] of each further token, and whether its label had the largest logit."""
        logits, computed = iter(largest), iter(losses)
        known = {
            "hidden_states": torch.zeros(1 + len(losses), 1, 1, device=losses[0].device),
            "output_layer": lambda *_, **__: (next(logits), None),
            "compute_language_model_loss": lambda *_: next(computed),
            "scale_logits_fn": None,
        }
        self._logs = True
        try:
            process(**{**given, **known}, is_training=True)
        finally:
            self._logs = False

    def _wrap_accepted(self, count: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(count)
        def counted(
            mtp_logits: torch.Tensor, mtp_labels: torch.Tensor, loss_mask: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._logs:
                return count(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
            # Of two classes, of which the second is right: no rank has the logits of more.
            largest = mtp_logits.t()
            classes = torch.stack((~largest, largest), -1).float()
            return count(classes, torch.ones_like(mtp_labels), loss_mask, args[0], True)

        return counted


def joined(each: Sequence[LossInputs]) -> torch.Tensor:
    """Return the hidden states of all tokens one behind another."""
    return each[0].hidden if len(each) == 1 else torch.cat([one.hidden for one in each])


def in_order(each: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """Return values [n] of several [b, s]: in the order of the logits, which are [s, b, r], where each of so many
    ranks has a part of s of all."""
    turned = [one.detach().t() for one in each]
    if len(each) == 1:
        return turned[0].flatten()
    return torch.cat([one.reshape(parts, -1, one.size(1)) for one in turned], 1).flatten()


def apart(values: torch.Tensor, shape: torch.Size, parts: int) -> list[torch.Tensor]:
    """Return the several [b, s] of this shape whose values [n] lie as `in_order` puts them."""
    batch, length = shape
    several = values.view(parts, -1, length // parts, batch)
    return [one.reshape(length, batch).t().contiguous() for one in several.unbind(1)]


def counts_of_further(each: Sequence[LossInputs]) -> list[torch.Tensor]:
    """Return how much the training's loss grows with each further token's losses: what Megatron would give their graph
    in the backward, behind which no shard could begin."""
    if len(each) == 1:
        return []
    hidden = each[0].hidden
    none = torch.zeros((), dtype=hidden.dtype, device=hidden.device).expand_as(hidden)
    # The graph behind the hidden state is the backward's.
    return list(torch.autograd.grad(hidden, [one.losses for one in each[1:]], none, retain_graph=True))
