"""Compute log-probabilities and entropies of tokens whose logits are in shards, as trainers by reinforcement need them.

In: a shard's logits, labels, and how ranks gather each other's numbers. Out: values that every rank has alike, with
their gradients for its own logits. No rank has all logits, and 4 numbers per token pass between ranks, once. Knows no
group.

Shapes as in `output`: logits [n, r], labels [n] (rows of the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from bpipe.runtime.vocabulary.output import SoftmaxTotals, statistics, totals

# From a rank's own [4, n] to all ranks' [shards, 4, n], in the order of their rows, the same on every rank.
Gather = Callable[[torch.Tensor], torch.Tensor]


class TokenLogProbs(NamedTuple):
    """Values of every token [n], in 32 bit at least: the logarithm of its label's probability, and the entropy of all
    its probabilities, in nats."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


def vocabulary_parallel_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, first_row: int, gather: Gather, temperature: float = 1.0
) -> TokenLogProbs:
    """Return log-probabilities and entropies of the softmax of logits / temperature. Collective over the shards.

    `logits` are those of the rows from `first_row` on. Gradients flow to them from both results, and every rank has
    those of its own rows: what they give the layer's input is to be summed over shards. A label that is no row of any
    shard has the log-probability of a logit of 0. Raises ValueError for a temperature that is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature:g} must be above 0")
    scaled = logits if temperature == 1 else logits / temperature
    return TokenLogProbs(*cast(Any, _LogProbs).apply(scaled, labels, first_row, gather))


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first_row: int, gather: Gather
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = statistics(logits, labels, first_row)
        wide = logits.to(own.dtype)
        # What the shard adds to the mean logit, relative to its own maximum as its sum is; of a logit of minus infinity
        # nothing.
        mean = ((wide - own[0][:, None]).exp() * wide).nan_to_num(nan=0.0).sum(1)
        every = gather(torch.cat((own, mean[None])))
        found = totals(every[:, :3])
        mean_logit = (every[:, 3] * (every[:, 0] - found.maximum).exp()).sum(0) / found.total
        log_total = found.maximum + found.total.log()
        entropy = log_total - mean_logit
        ctx.first_row = first_row
        ctx.save_for_backward(logits, labels, *found, entropy)
        return found.label_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, *parts, entropy = ctx.saved_tensors
        found, (of_log_prob, of_entropy) = SoftmaxTotals(*parts), gradients
        log_prob = logits.to(entropy.dtype) - (found.maximum + found.total.log())[:, None]
        prob = log_prob.exp()
        # d log p(label) / d logit = [it is the label] - p; d entropy / d logit = -p (log p + entropy).
        entropic = (prob * (log_prob + entropy[:, None])).nan_to_num(nan=0.0)
        gradient = -(of_log_prob[:, None] * prob + of_entropy[:, None] * entropic)
        rows = labels - ctx.first_row
        mine = (rows >= 0) & (rows < logits.shape[1])
        gradient.scatter_add_(1, rows.where(mine, 0)[:, None], (of_log_prob * mine)[:, None])
        return gradient.to(logits.dtype), None, None, None
