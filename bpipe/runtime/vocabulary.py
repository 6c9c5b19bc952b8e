"""The layers of the vocabulary in shards: which rows a shard holds, and what it computes of them.

Output layer:

    S    logits of the shard's rows; `statistics` of them: a maximum, a sum of exponentials, the label's logit
    C1   every rank gathers the statistics of all, and makes the same `totals` of them: the same bits on every rank
    T    `logits_gradient`: softmax minus one at the label, times the gradient of each token's loss

Algorithm 1: the part of the input's gradient that follows from T's gradient of the logits is reduced after T. Algorithm
2: S computes `early_part`, with the shard's own maximum and sum instead of the totals; once these are there,
`late_part` corrects it, and nothing is reduced after T. Statistics, losses and what is reduced are in 32 bit at least.
Between S and T the logits stay as they are: T computes their exponentials again, a few tokens at a time. Tokens that do
not count have a gradient of zero, which the caller sets. Source: Yeung et al., "Balancing Pipeline Parallelism with
Vocabulary Parallelism", 2024.

Embedding:

    IF   `embedded`: rows of the shard, zeros for other tokens: the sum of all parts is that of one table, bit for bit
    IB   `rows_gradient`: the gradients of the shard's tokens, added up by row

Shapes: n tokens, r rows of the shard, h hidden. logits [n, r], labels [n] (rows of the whole vocabulary), weight [r,
h].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

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
