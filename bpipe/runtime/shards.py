"""A rank's shards of the output layer (S and T) and of the embedding (IF and IB): which rows they hold, what is computed of
them, and how the executor calls them.

    S    logits of the shard's rows; `statistics` of them: a maximum, a sum of exponentials, the label's logit
    C1   every rank gathers the statistics of all, and makes the same `totals` of them: the same bits on every rank
    T    `logits_gradient`: softmax minus one at the label, times the gradient of each token's loss
    IF   `embedded`: rows of the shard, zeros for other tokens: the sum of all parts is that of one table, bit for bit
    IB   `rows_gradient`: the gradients of the shard's tokens, added up by row

Algorithm 1, `OutputShard`: between S and T a micro-batch has its logits and their graph here, in the layer's own type. T
writes the gradient of the logits over them, a few tokens at a time, and autograd goes on from there through the layer, once
for each micro-batch and in their order; the part of the input's gradient is reduced after T. Algorithm 2, `EarlyShard`: S also
computes `early_part` of the gradient of the last stage's output, with the shard's own maximum and sum instead of the totals.
Once these are there, `late_part` corrects it, and T only adds to the gradient of the layer's weight. So the layer must be one
matrix. Statistics, losses and what is reduced are in 32 bit at least. Tokens that do not count have a gradient of zero, which
the caller sets. Source: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.

Shapes: n tokens, r rows of the shard, h hidden. logits [n, r], labels [n] (rows of the whole vocabulary), weight [r, h].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from bpipe.runtime.stage import Tensors
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


# Megatron pads to this times the tensor-parallel size by default.
MULTIPLE = 128
# Logits of a shard that are in 32 bit at once: 32 MiB.
_WIDE_AT_ONCE = 2**23


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the vocabulary in equal shards, one for each of `tensor` * `pipeline` ranks.

    Tensor parallelism is outermost: the ranks of a pipeline share the rows that its tensor-parallel rank holds without
    shards, so no row leaves its pipeline.

    Raises ValueError if shards would differ: additional rows would take part in the softmax and change the loss.
    """

    vocabulary: int
    tensor: int
    pipeline: int

    def __post_init__(self) -> None:
        if self.vocabulary % self.num_shards:
            multiple = math.lcm(MULTIPLE, self.pipeline)
            raise ValueError(
                f"a vocabulary of {self.vocabulary} rows cannot be split into {self.num_shards} equal shards, of "
                f"{self.tensor} tensor- times {self.pipeline} pipeline-parallel ranks: pad it with "
                f"--make-vocab-size-divisible-by {multiple}"
            )

    @property
    def num_shards(self) -> int:
        return self.tensor * self.pipeline

    @property
    def each(self) -> int:
        """Rows of one shard."""
        return self.vocabulary // self.num_shards

    def shard(self, tensor_rank: int, pipeline_rank: int) -> int:
        """Return the number of a rank's shard."""
        return tensor_rank * self.pipeline + pipeline_rank

    def of(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.each, (shard + 1) * self.each)


class SoftmaxTotals(NamedTuple):
    """Totals of every token over the whole vocabulary, [n]."""

    maximum: torch.Tensor
    """The largest logit."""

    total: torch.Tensor
    """The sum of exponentials relative to `maximum`."""

    label_logit: torch.Tensor


@torch.no_grad()
def statistics(logits: torch.Tensor, labels: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return a shard's statistics [3, n]: its maximum, its sum of exponentials relative to that, and the label's
    logit, 0 if another shard has it."""
    own = torch.empty(3, len(logits), dtype=_wide(logits), device=logits.device)
    rows, inside = rows_of(labels, first_row, logits.shape[1])
    own[2] = logits.gather(1, rows[:, None]).squeeze(1).where(inside, 0)
    for tokens in _blocks(logits):
        wide = logits[tokens].to(own.dtype, copy=True)
        own[0, tokens] = wide.amax(1)
        own[1, tokens] = wide.sub_(own[0, tokens, None]).exp_().sum(1)
        # Otherwise two of them would be in memory while the next is made.
        del wide
    return own


@torch.no_grad()
def totals(gathered: torch.Tensor) -> SoftmaxTotals:
    """Return the totals of the statistics of all shards, [shards, 3, n]."""
    maxima, sums, label_logits = gathered.unbind(1)
    maximum = maxima.amax(0)
    return SoftmaxTotals(maximum, (sums * (maxima - maximum).exp()).sum(0), label_logits.sum(0))


@torch.no_grad()
def losses(softmax: SoftmaxTotals, labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return losses [n]: minus the logarithm of the label's probability.

    For a label that is no row it is the logarithm of the sum, as in Megatron's own loss.
    """
    inside = (labels >= 0) & (labels < vocabulary)
    return softmax.total.log() - (softmax.label_logit - softmax.maximum).where(inside, 0)


@torch.no_grad()
def logits_gradient(
    logits: torch.Tensor, labels: torch.Tensor, first_row: int, softmax: SoftmaxTotals, token_gradients: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of a shard's logits [n, r], written over them. `token_gradients` [n]: of every token's loss."""
    rows, inside = rows_of(labels, first_row, logits.shape[1])
    for tokens in _blocks(logits):
        wide = logits[tokens].to(_wide(logits), copy=True)
        wide.sub_(softmax.maximum[tokens, None]).exp_().div_(softmax.total[tokens, None])
        wide.scatter_add_(1, rows[tokens, None], -inside[tokens, None].to(wide.dtype))
        logits[tokens] = wide.mul_(token_gradients[tokens, None])
        del wide
    return logits


@torch.no_grad()
def early_part(
    logits: torch.Tensor, weight: torch.Tensor, own: torch.Tensor, token_gradients: torch.Tensor
) -> torch.Tensor:
    """Return a shard's part of the gradient of the layer's input, [n, h] in 32 bit, as known before the totals.

    `own` are its statistics. The gradients of the tokens' losses are in it already: with the loss scale of a
    half-precision training no probability is too small.
    """
    part = torch.empty(len(logits), weight.shape[1], dtype=own.dtype, device=own.device)
    for tokens in _blocks(logits):
        wide = logits[tokens].to(own.dtype, copy=True).sub_(own[0, tokens, None]).exp_()
        wide.mul_((token_gradients[tokens] / own[1, tokens])[:, None])
        part[tokens] = (wide.to(weight.dtype) @ weight).to(own.dtype)
    return part


@torch.no_grad()
def late_part(
    early: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    first_row: int,
    own: torch.Tensor,
    softmax: SoftmaxTotals,
    token_gradients: torch.Tensor,
) -> torch.Tensor:
    """Return a shard's part of the gradient of the layer's input, [n, h] in 32 bit, written over `early`."""
    share = own[1] * (own[0] - softmax.maximum).exp() / softmax.total
    rows, inside = rows_of(labels, first_row, len(weight))
    at_label = (token_gradients * inside)[:, None] * weight[rows].to(early.dtype)
    return early.mul_(share[:, None]).sub_(at_label)


@torch.no_grad()
def embedded(weight: torch.Tensor, tokens: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return embeddings [n, h], of the weight's type."""
    rows, inside = rows_of(tokens, first_row, len(weight))
    return weight[rows].where(inside[:, None], 0)


@torch.no_grad()
def rows_gradient(gradient: torch.Tensor, tokens: torch.Tensor, first_row: int, num_rows: int) -> torch.Tensor:
    """Return the rows' gradient [r, h] in 32 bit at least, from the embeddings' gradient [n, h]."""
    rows, inside = rows_of(tokens, first_row, num_rows)
    total = torch.zeros(num_rows, gradient.shape[1], dtype=_wide(gradient), device=gradient.device)
    return total.index_add_(0, rows[inside], gradient[inside].to(total.dtype))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def rows_of(labels: torch.Tensor, first_row: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels or tokens as rows of a shard, 0 for those of other shards, and whether they are the shard's."""
    rows = labels - first_row
    inside = (rows >= 0) & (rows < num_rows)
    return rows.where(inside, 0), inside


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Return the tokens, a few at a time."""
    count = max(1, _WIDE_AT_ONCE // logits.shape[1])
    return (slice(first, first + count) for first in range(0, len(logits), count))
