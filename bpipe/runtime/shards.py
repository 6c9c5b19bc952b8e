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
from bpipe.runtime.vocabulary import early_part, late_part, logits_gradient, losses, statistics, totals
from bpipe.schedule.action import Action
from bpipe.transport.streams import used_here


class _BetweenPasses(NamedTuple):
    """A micro-batch from S to T; without gradients it has no logits."""

    x: torch.Tensor
    logits: torch.Tensor | None
    labels: torch.Tensor
    token_gradients: torch.Tensor


Told = Callable[[int, torch.Tensor, torch.Tensor], None]


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
        """Return what is held of a micro-batch between its S and its T, each storage once."""
        storages = (tensor.untyped_storage() for tensor in self._tensors(microbatch) if tensor is not None)
        return tuple({storage._cdata: storage for storage in storages}.values())

    def _tensors(self, microbatch: int) -> tuple[torch.Tensor | None, ...]:
        return self._held[microbatch]

    def forward(self, action: Action, received: Tensors) -> Tensors:
        x, labels, token_gradients = received
        trains = torch.is_grad_enabled()
        logits = self._logits(x)
        own = statistics(_rows(logits), labels, self._first_row)
        self._held[action.microbatch] = _BetweenPasses(x, logits if trains else None, labels, token_gradients)
        if trains:
            self._prepare(action.microbatch, logits, own)
        return (own,)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        (gathered,) = received
        softmax = totals(gathered)
        x, logits, labels, token_gradients = self._held.pop(action.microbatch)
        if self._told is not None:
            is_largest = softmax.label_logit == softmax.maximum
            self._told(action.microbatch, losses(softmax, labels, self._vocabulary), is_largest)
        if logits is None:
            return ()
        gradient = logits_gradient(_rows(logits), labels, self._first_row, softmax, token_gradients)
        return self._input_gradient(x, logits, gradient.view_as(logits))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x.requires_grad_(torch.is_grad_enabled()))

    def _prepare(self, microbatch: int, logits: torch.Tensor, own: torch.Tensor) -> None:
        """Do nothing: the gradient of the layer's input is computed in T."""

    def _input_gradient(self, x: torch.Tensor, logits: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        torch.autograd.backward(logits, gradient)
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


class EarlyShard(OutputShard):
    """A shard of the output layer by algorithm 2.

    `late` may run next to S and T, in a thread or on its own stream: it shares nothing with T.
    """

    def __init__(self, layer: Matrix, first_row: int, vocabulary: int, told: Told | None = None) -> None:
        super().__init__(layer.logits, first_row, vocabulary, told)
        self._matrix = layer
        self._early: dict[int, _Early] = {}
        # The same until T: if what `late` needs were dropped after it, the bytes held until T would depend on how fast
        # other ranks are.
        self._until_t: dict[int, _Early] = {}

    def begin(self) -> None:
        super().begin()
        self._early.clear()
        self._until_t.clear()

    def _tensors(self, microbatch: int) -> tuple[torch.Tensor | None, ...]:
        return *super()._tensors(microbatch), *self._until_t.get(microbatch, ())

    @torch.no_grad()
    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x)

    def _prepare(self, microbatch: int, logits: torch.Tensor, own: torch.Tensor) -> None:
        _, _, labels, token_gradients = self._held[microbatch]
        part = early_part(_rows(logits), self._matrix.weight, own, token_gradients)
        self._early[microbatch] = self._until_t[microbatch] = _Early(part, own, labels, token_gradients)

    def late(self, microbatch: int, received: Tensors) -> Tensors:
        """Return this shard's part of the gradient of the last stage's output, [n, h] in 32 bit at least, from the
        statistics of all shards."""
        (gathered,) = received
        early = self._early.pop(microbatch)
        used_here(gathered, *early)
        part, own, labels, token_gradients = early
        return (late_part(part, self._matrix.weight, labels, self._first_row, own, totals(gathered), token_gradients),)

    def backward(self, action: Action, received: Tensors) -> Tensors:
        self._until_t.pop(action.microbatch, None)
        return super().backward(action, received)

    def _input_gradient(self, x: torch.Tensor, logits: torch.Tensor, gradient: torch.Tensor) -> Tensors:
        self._matrix.backward_weight(x, gradient)
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


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """[n, r], in the same memory."""
    return logits.detach().flatten(0, -2)
