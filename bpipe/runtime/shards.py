"""Compute a rank's shard of the output layer, as our executor asks for S and T of algorithm 1 or 2, and of the
embedding, IF and IB.

In: a layer that makes logits, what the last stage made for all shards, and what all shards have gathered. Out: a
shard's statistics, then its part of the gradient of the last stage's output; the losses of a micro-batch's tokens, for
whoever wants them. Knows no group, no model.

Algorithm 1, `OutputShard`: between S and T a micro-batch has its logits and the graph behind them here, in the layer's
own type. T makes the gradient of the logits in their place, and autograd goes on from there: through the layer,
whatever it does, once for each micro-batch and in their order. Algorithm 2, `EarlyShard`: S makes what the shard gives
that gradient, too, as far as it can be known before the statistics of all are. Once they are, `late` puts it right, and
what is left for T is the layer's weight: so the layer must be one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from bpipe.runtime.stage import Tensors
from bpipe.runtime.streams import used_here
from bpipe.runtime.vocabulary.output import (
    SoftmaxTotals,
    early_part,
    late_part,
    logits_gradient,
    losses,
    statistics,
    totals,
)
from bpipe.schedule.action import Action


class _BetweenPasses(NamedTuple):
    """Of a micro-batch, from S to T. Without gradients there is nothing to go back through, and the logits are gone."""

    x: torch.Tensor
    logits: torch.Tensor | None
    labels: torch.Tensor
    token_gradients: torch.Tensor


Told = Callable[[int, torch.Tensor, torch.Tensor], None]


def _storages(*held: torch.Tensor | None) -> tuple[torch.UntypedStorage, ...]:
    """Return each storage once."""
    return tuple(
        {storage._cdata: storage for storage in (one.untyped_storage() for one in held if one is not None)}.values()
    )


class OutputShard:
    """Rows `first_row` and on of an output layer of `vocabulary` rows: `layer` makes their logits [..., r] of a stage's
    output [..., h].

    The last stage makes its output, the labels [n] as rows of the whole vocabulary, and the gradient [n] of each
    token's loss, where n tokens are those of the logits in their order. `told(microbatch, losses,
    largest)` is called in T with the losses [n], 32 bit at least, and whether a label's logit is the largest.
    """

    def __init__(
        self, layer: Callable[[torch.Tensor], torch.Tensor], first_row: int, vocabulary: int, told: Told | None = None
    ) -> None:
        self._layer, self._first_row, self._vocabulary, self._told = layer, first_row, vocabulary, told
        self._held: dict[int, _BetweenPasses] = {}

    def begin(self) -> None:
        """Begin an iteration: drop what an unfinished one left."""
        self._held.clear()

    def storages(self, microbatch: int) -> tuple[torch.UntypedStorage, ...]:
        """Return what is held of a micro-batch between its S and its T."""
        return _storages(*self._held[microbatch])

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
        _tell(self._told, action, found, labels, self._vocabulary)
        if logits is None:
            return ()
        gradient = logits_gradient(_rows(logits), labels, self._first_row, found, token_gradients, overwrite=True)
        torch.autograd.backward(logits, gradient.view_as(logits))
        assert x.grad is not None, "logits depend on what they are made of"
        # What is added up over all shards is 32 bit, or the error would grow with their number.
        return (x.grad.to(torch.promote_types(x.dtype, torch.float32)),)


class Matrix(Protocol):
    """An output layer's rows: logits are a stage's output times them, and nothing else."""

    @property
    def weight(self) -> torch.Tensor:
        """Weight, [r, h]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [..., r] of x [..., h]."""

    def backward_weight(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the weight's gradient what that of the logits brings."""


class _Early(NamedTuple):
    """Of a micro-batch, from S to `late`, and to T: what a shard gives the input's gradient, as far as its own
    statistics say."""

    part: torch.Tensor
    statistics: torch.Tensor
    labels: torch.Tensor
    token_gradients: torch.Tensor


class EarlyShard:
    """Shard of the output layer by algorithm 2.

    `late` may run beside S and T, in a thread or on its own stream: it shares nothing with T.
    """

    def __init__(self, layer: Matrix, first_row: int, vocabulary: int, told: Told | None = None) -> None:
        self._layer, self._first_row, self._vocabulary, self._told = layer, first_row, vocabulary, told
        # With what `late` needs: were that gone when `late` has run, what is held until T would depend on how fast
        # other ranks are.
        self._held: dict[int, tuple[_BetweenPasses, _Early | None]] = {}
        self._early: dict[int, _Early] = {}

    def begin(self) -> None:
        """Begin an iteration: drop what an unfinished one left."""
        self._held.clear()
        self._early.clear()

    def storages(self, microbatch: int) -> tuple[torch.UntypedStorage, ...]:
        """Return what is held of a micro-batch between its S and its T."""
        held, early = self._held[microbatch]
        return _storages(*held, *(early or ()))

    def forward(self, action: Action, received: Tensors) -> Tensors:
        x, labels, token_gradients = received
        back = torch.is_grad_enabled()
        with torch.no_grad():
            logits = self._layer.logits(x)
        own = statistics(_rows(logits), labels, self._first_row)
        early = None
        if back:
            part = early_part(_rows(logits), self._layer.weight, own, token_gradients)
            early = self._early[action.microbatch] = _Early(part, own, labels, token_gradients)
        self._held[action.microbatch] = _BetweenPasses(x, logits if back else None, labels, token_gradients), early
        return (own,)

    def late(self, microbatch: int, received: Tensors) -> Tensors:
        """Return this shard's part of the gradient of the last stage's output, [n, h], 32 bit at least, from the
        statistics of all shards."""
        (gathered,) = received
        early = self._early.pop(microbatch)
        used_here(gathered, *early)
        part, own, labels, token_gradients = early
        return (late_part(part, self._layer.weight, labels, self._first_row, own, totals(gathered), token_gradients),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gathered,) = received
        found = totals(gathered)
        (x, logits, labels, token_gradients), _ = self._held.pop(action.microbatch)
        _tell(self._told, action, found, labels, self._vocabulary)
        if logits is not None:
            gradient = logits_gradient(_rows(logits), labels, self._first_row, found, token_gradients, overwrite=True)
            self._layer.backward_weight(x, gradient.view_as(logits))
        return ()


class Table(Protocol):
    """Rows of an embedding."""

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., h] of tokens [...]: this shard's rows, zeros for the others."""

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add to the rows' gradient what that of their embeddings [..., h] brings."""


class InputShard:
    """A rank's rows of the embedding, as our executor asks for IF and IB.

    `begin` says of which tokens [...], by micro-batch.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._tokens: Sequence[torch.Tensor] = ()

    def begin(self, tokens: Sequence[torch.Tensor]) -> None:
        self._tokens = tokens

    def forward(self, action: Action, received: Tensors) -> Tensors:
        return (self._table.part(self._tokens[action.microbatch]),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gradient,) = received
        self._table.add_gradient(self._tokens[action.microbatch], gradient)
        return ()


def _tell(told: Told | None, action: Action, found: SoftmaxTotals, labels: torch.Tensor, vocabulary: int) -> None:
    if told is not None:
        told(action.microbatch, losses(found, labels, vocabulary), found.label_logit == found.maximum)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[n, r], in the same memory."""
    return logits.detach().flatten(0, -2)
