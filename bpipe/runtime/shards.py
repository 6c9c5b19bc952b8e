"""A rank's shards of the output layer (S and T) and of the embedding (IF and IB), as the executor calls them.

Algorithm 1, `OutputShard`: between S and T a micro-batch has its logits and their graph here, in the layer's own type.
T writes the gradient of the logits over them, and autograd goes on from there through the layer, once for each
micro-batch and in their order. Algorithm 2, `EarlyShard`: S also computes the shard's part of the gradient of the last
stage's output, as far as it is known before the statistics of all shards. Once these are there, `late` corrects it, and
T only adds to the gradient of the layer's weight. So the layer must be one matrix.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from bpipe.runtime.stage import Tensors
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
from bpipe.transport.streams import used_here


class _BetweenPasses(NamedTuple):
    """A micro-batch from S to T; without gradients it has no logits."""

    x: torch.Tensor
    logits: torch.Tensor | None
    labels: torch.Tensor
    token_gradients: torch.Tensor


Told = Callable[[int, torch.Tensor, torch.Tensor], None]


def _storages(*tensors: torch.Tensor | None) -> tuple[torch.UntypedStorage, ...]:
    """Return each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return tuple({storage._cdata: storage for storage in storages}.values())


class OutputShard:
    """A shard of the output layer by algorithm 1.

    It receives the last stage's output [..., h], the labels [n] as rows of the whole vocabulary, and the gradient [n]
    of each token's loss. The n tokens are those of the logits in their order.

    Args:
        layer: Returns the shard's logits [..., r] of a stage's output [..., h].
        first_row: Of the shard in the vocabulary.
        vocabulary: Number of rows of the whole layer.
        told: Called in T with the micro-batch, its losses [n] in 32 bit at least, and whether each label's logit is
            the largest.
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
        trains = torch.is_grad_enabled()
        logits = self._layer(x.requires_grad_(trains))
        self._held[action.microbatch] = _BetweenPasses(x, logits if trains else None, labels, token_gradients)
        return (statistics(_rows(logits), labels, self._first_row),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gathered,) = received
        softmax = totals(gathered)
        x, logits, labels, token_gradients = self._held.pop(action.microbatch)
        _tell(self._told, action, softmax, labels, self._vocabulary)
        if logits is None:
            return ()
        gradient = logits_gradient(_rows(logits), labels, self._first_row, softmax, token_gradients)
        torch.autograd.backward(logits, gradient.view_as(logits))
        assert x.grad is not None, "logits depend on the layer's input"
        # The sum over all shards is in 32 bit, or its error would grow with their number.
        return (x.grad.to(torch.promote_types(x.dtype, torch.float32)),)


class Matrix(Protocol):
    """The rows of an output layer that is one matrix."""

    @property
    def weight(self) -> torch.Tensor:
        """Weight, [r, h]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [..., r] of x [..., h]."""

    def backward_weight(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the part of the logits' gradient to the weight's gradient."""


class _Early(NamedTuple):
    """A micro-batch from S to `late`, and to T: the shard's part of the input's gradient by its own statistics."""

    part: torch.Tensor
    statistics: torch.Tensor
    labels: torch.Tensor
    token_gradients: torch.Tensor


class EarlyShard:
    """A shard of the output layer by algorithm 2; arguments as of `OutputShard`.

    `late` may run next to S and T, in a thread or on its own stream: it shares nothing with T.
    """

    def __init__(self, layer: Matrix, first_row: int, vocabulary: int, told: Told | None = None) -> None:
        self._layer, self._first_row, self._vocabulary, self._told = layer, first_row, vocabulary, told
        # With what `late` needs: if that were dropped after `late`, the bytes held until T would depend on how fast other
        # ranks are.
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
        trains = torch.is_grad_enabled()
        with torch.no_grad():
            logits = self._layer.logits(x)
        own = statistics(_rows(logits), labels, self._first_row)
        early = None
        if trains:
            part = early_part(_rows(logits), self._layer.weight, own, token_gradients)
            early = self._early[action.microbatch] = _Early(part, own, labels, token_gradients)
        self._held[action.microbatch] = _BetweenPasses(x, logits if trains else None, labels, token_gradients), early
        return (own,)

    def late(self, microbatch: int, received: Tensors) -> Tensors:
        """Return this shard's part of the gradient of the last stage's output, [n, h] in 32 bit at least, from the
        statistics of all shards."""
        (gathered,) = received
        early = self._early.pop(microbatch)
        used_here(gathered, *early)
        part, own, labels, token_gradients = early
        return (late_part(part, self._layer.weight, labels, self._first_row, own, totals(gathered), token_gradients),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gathered,) = received
        softmax = totals(gathered)
        (x, logits, labels, token_gradients), _ = self._held.pop(action.microbatch)
        _tell(self._told, action, softmax, labels, self._vocabulary)
        if logits is not None:
            gradient = logits_gradient(_rows(logits), labels, self._first_row, softmax, token_gradients)
            self._layer.backward_weight(x, gradient.view_as(logits))
        return ()


class Table(Protocol):
    """Rows of an embedding."""

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., h] of tokens [...]: this shard's rows, zeros for the others."""

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of the tokens' embeddings [..., h] to that of the rows."""


class InputShard:
    """A rank's rows of the embedding."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._tokens: Sequence[torch.Tensor] = ()

    def begin(self, tokens: Sequence[torch.Tensor]) -> None:
        """Begin an iteration with the tokens [...] of each micro-batch."""
        self._tokens = tokens

    def forward(self, action: Action, received: Tensors) -> Tensors:
        return (self._table.part(self._tokens[action.microbatch]),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gradient,) = received
        self._table.add_gradient(self._tokens[action.microbatch], gradient)
        return ()


def _tell(told: Told | None, action: Action, softmax: SoftmaxTotals, labels: torch.Tensor, vocabulary: int) -> None:
    if told is not None:
        told(action.microbatch, losses(softmax, labels, vocabulary), softmax.label_logit == softmax.maximum)


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[n, r], in the same memory."""
    return logits.detach().flatten(0, -2)
