"""Log-probabilities and entropies of tokens whose logits are in shards, as reinforcement learning needs them.

No rank has all logits, and 4 numbers per token pass between ranks, once. Shapes as in `output`: logits [n, r], labels
[n] (rows of the whole vocabulary).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from bpipe.runtime.vocabulary.output import SoftmaxTotals, rows_of, statistics, totals

# From a rank's own [4, n] to all ranks' [shards, 4, n], in the order of their rows, the same on every rank.
Gather = Callable[[torch.Tensor], torch.Tensor]


class TokenLogProbs(NamedTuple):
    """Values of every token [n], in 32 bit at least."""

    log_probs: torch.Tensor
    """The logarithm of the label's probability."""

    entropy: torch.Tensor
    """The entropy of all probabilities, in nats."""


def vocabulary_parallel_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, first_row: int, gather: Gather, temperature: float = 1.0
) -> TokenLogProbs:
    """Return log-probabilities and entropies of the softmax of logits / temperature. Collective over the shards.

    Gradients flow from both results to the logits of this rank's rows, so the gradient of the layer's input has to be
    summed over shards. A label that is no row of any shard has the log-probability of a logit of 0.

    Args:
        logits: Of this shard's rows.
        labels: Rows of the whole vocabulary.
        first_row: Of this shard.
        gather: How ranks gather each other's numbers.
        temperature: Above 0.

    Raises:
        ValueError: For another temperature.
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
        # The shard's part of the mean logit, relative to its own maximum as its sum is; 0 for a logit of minus infinity.
        mean = ((wide - own[0][:, None]).exp() * wide).nan_to_num(nan=0.0).sum(1)
        gathered = gather(torch.cat((own, mean[None])))
        softmax = totals(gathered[:, :3])
        mean_logit = (gathered[:, 3] * (gathered[:, 0] - softmax.maximum).exp()).sum(0) / softmax.total
        log_total = softmax.maximum + softmax.total.log()
        entropy = log_total - mean_logit
        ctx.first_row = first_row
        ctx.save_for_backward(logits, labels, *softmax, entropy)
        return softmax.label_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels, *parts, entropy = ctx.saved_tensors
        softmax, (of_log_prob, of_entropy) = SoftmaxTotals(*parts), gradients
        log_prob = logits.to(entropy.dtype) - (softmax.maximum + softmax.total.log())[:, None]
        prob = log_prob.exp()
        # d log p(label) / d logit = [it is the label] - p; d entropy / d logit = -p (log p + entropy).
        entropic = (prob * (log_prob + entropy[:, None])).nan_to_num(nan=0.0)
        gradient = -(of_log_prob[:, None] * prob + of_entropy[:, None] * entropic)
        rows, inside = rows_of(labels, ctx.first_row, logits.shape[1])
        gradient.scatter_add_(1, rows[:, None], (of_log_prob * inside)[:, None])
        return gradient.to(logits.dtype), None, None, None
