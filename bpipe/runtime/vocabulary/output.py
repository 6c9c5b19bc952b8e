"""Compute the output layer's loss and its gradients shard by shard.

In: a shard's logits, labels. Out: losses, parts of gradients.

    S    logits of the shard's rows; `statistics` of them: a maximum, a sum of exponentials, the label's logit
    C1   everybody gathers everybody's statistics, and makes the same `totals` of them: the same bits on every rank
    T    `logits_gradient`: softmax minus one at the label, times the gradient of each token's loss

Algorithm 1: what T's gradient of the logits gives the layer's input is reduced behind T. Algorithm 2: S computes
`early_part`, with the shard's own maximum and sum in place of all; once the totals are there `late_part` puts that
right, and nothing is reduced behind T. Statistics, losses and what is reduced are 32 bit at least, whatever the logits.
What stays between S and T are the logits as they are: T computes their exponentials again, a few tokens at a time.
Tokens that do not count have a gradient of zero: whoever masks them is outside. Source: Yeung et al., "Balancing
Pipeline Parallelism with Vocabulary Parallelism", 2024. Knows no group, no layer, no order.

Shapes: n tokens, r rows of the shard, h hidden. logits [n, r], labels [n] (rows of the whole vocabulary), weight [r,
h].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

# Of a shard's logits so many are in 32 bit at once: 32 MiB.
_WIDE_AT_ONCE = 2**23


class SoftmaxTotals(NamedTuple):
    """Totals of every token over the whole vocabulary, [n]: the largest logit, the sum of exponentials relative to
    it, the label's logit."""

    maximum: torch.Tensor
    total: torch.Tensor
    label_logit: torch.Tensor


@torch.no_grad()
def statistics(logits: torch.Tensor, labels: torch.Tensor, first_row: int) -> torch.Tensor:
    """Return a shard's statistics [3, n]: its maximum, its sum of exponentials relative to that, and the label's
    logit, 0 where another shard has it."""
    found = torch.empty(3, len(logits), dtype=_wide(logits), device=logits.device)
    rows, mine = _own(labels, first_row, logits.shape[1])
    found[2] = logits.gather(1, rows[:, None]).squeeze(1).where(mine, 0)
    for tokens in _blocks(logits):
        wide = logits[tokens].to(found.dtype, copy=True)
        found[0, tokens] = wide.amax(1)
        found[1, tokens] = wide.sub_(found[0, tokens, None]).exp_().sum(1)
        # Or two of them would be here while the next is made.
        del wide
    return found


@torch.no_grad()
def totals(gathered: torch.Tensor) -> SoftmaxTotals:
    """Return the totals of the statistics of all shards, [shards, 3, n]."""
    maxima, sums, label_logits = gathered.unbind(1)
    maximum = maxima.amax(0)
    return SoftmaxTotals(maximum, (sums * (maxima - maximum).exp()).sum(0), label_logits.sum(0))


@torch.no_grad()
def losses(found: SoftmaxTotals, labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return losses [n]: minus the logarithm of the label's probability.

    A label that is no row leaves the sum's logarithm, as in Megatron's own loss.
    """
    inside = (labels >= 0) & (labels < vocabulary)
    return found.total.log() - (found.label_logit - found.maximum).where(inside, 0)


@torch.no_grad()
def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    first_row: int,
    found: SoftmaxTotals,
    token_gradients: torch.Tensor,
    overwrite: bool = False,
) -> torch.Tensor:
    """Return the gradient of a shard's logits [n, r], of their type.

    `token_gradients` [n] is that of every token's loss.

    `overwrite`: write it over the logits, which nobody needs any more.
    """
    gradient = logits if overwrite else torch.empty_like(logits)
    rows, mine = _own(labels, first_row, logits.shape[1])
    for tokens in _blocks(logits):
        wide = (
            logits[tokens]
            .to(_wide(logits), copy=True)
            .sub_(found.maximum[tokens, None])
            .exp_()
            .div_(found.total[tokens, None])
        )
        wide.scatter_add_(1, rows[tokens, None], -mine[tokens, None].to(wide.dtype))
        gradient[tokens] = wide.mul_(token_gradients[tokens, None])
        del wide
    return gradient


@torch.no_grad()
def early_part(
    logits: torch.Tensor, weight: torch.Tensor, own: torch.Tensor, token_gradients: torch.Tensor
) -> torch.Tensor:
    """Return what a shard gives the layer's input, [n, h], 32 bit, as far as it is known before the totals.

    `own` are its statistics.

    The gradients of the tokens' losses are in it already: with the scale of a half-precision training no probability is
    too small.
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
    found: SoftmaxTotals,
    token_gradients: torch.Tensor,
) -> torch.Tensor:
    """Return all that a shard gives the layer's input, [n, h], 32 bit, written over `early`.

    The sum over shards is its gradient.
    """
    share = own[1] * (own[0] - found.maximum).exp() / found.total
    rows, mine = _own(labels, first_row, len(weight))
    at_label = (token_gradients * mine)[:, None] * weight[rows].to(early.dtype)
    return early.mul_(share[:, None]).sub_(at_label)


@torch.no_grad()
def summed(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Sum all shards' parts of an input's gradient in 32 bit at least, rounded once."""
    total = parts[0].to(_wide(parts[0]), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _own(labels: torch.Tensor, first_row: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels as rows of the shard, any row where they are none of it, and whether they are."""
    rows = labels - first_row
    mine = (rows >= 0) & (rows < num_rows)
    return rows.where(mine, 0), mine


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Return the tokens, a few at a time."""
    each = max(1, _WIDE_AT_ONCE // logits.shape[1])
    return (slice(first, first + each) for first in range(0, len(logits), each))
