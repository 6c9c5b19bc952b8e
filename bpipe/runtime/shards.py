"""Compute a rank's shard of the output layer by autograd, as our executor asks for S and T of algorithm 1.

In: a layer that makes logits, what the last stage made for all shards, and what all shards have gathered. Out: a shard's statistics, then
its part of the gradient of the last stage's output; the losses of a micro-batch's tokens, for whoever wants them. Knows no group, no model.

Between S and T a micro-batch has its logits and the graph behind them here, in the layer's own type. T makes the gradient of the logits in
their place, and autograd goes on from there: through the layer, whatever it does, once for each micro-batch and in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bpipe.ir.action import Action
from bpipe.runtime.stage import Tensors
from bpipe.vocabulary.output import logits_gradient, losses, statistics, totals


class _BetweenPasses(NamedTuple):
    """Of a micro-batch, from S to T. Without gradients there is nothing to go back through, and the logits are gone."""

    x: torch.Tensor
    logits: torch.Tensor | None
    labels: torch.Tensor
    token_gradients: torch.Tensor


class OutputShard:
    """Rows `first_row` and on of an output layer of `vocabulary` rows: `layer` makes their logits [..., r] of a stage's output [..., h].

    The last stage makes its output, the labels [n] as rows of the whole vocabulary, and the gradient [n] of each token's loss, where n
    tokens are those of the logits in their order. `told(microbatch, losses)` is called in T with the losses [n], 32 bit at least.
    """

    def __init__(
        self,
        layer: Callable[[torch.Tensor], torch.Tensor],
        first_row: int,
        vocabulary: int,
        told: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        self._layer, self._first_row, self._vocabulary, self._told = layer, first_row, vocabulary, told
        self._held: dict[int, _BetweenPasses] = {}

    def begin(self) -> None:
        """Nothing is held of an iteration that did not end."""
        self._held.clear()

    def forward(self, action: Action, received: Tensors) -> Tensors:
        x, labels, token_gradients = received
        back = torch.is_grad_enabled()
        logits = self._layer(x.requires_grad_(back))
        self._held[action.microbatch] = _BetweenPasses(x, logits if back else None, labels, token_gradients)
        return (statistics(_rows(logits), labels, self._first_row),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gathered,) = received
        found = totals(gathered)
        x, logits, labels, token_gradients = self._held.pop(action.microbatch)
        if self._told is not None:
            self._told(action.microbatch, losses(found, labels, self._vocabulary))
        if logits is None:
            return ()
        gradient = logits_gradient(_rows(logits), labels, self._first_row, found, token_gradients, overwrite=True)
        torch.autograd.backward(logits, gradient.view_as(logits))
        assert x.grad is not None, "logits depend on what they are made of"
        # What is added up over all shards is 32 bit, or the error would grow with their number.
        return (x.grad.to(torch.promote_types(x.dtype, torch.float32)),)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[n, r], in the same memory."""
    return logits.detach().flatten(0, -2)
