"""A step of training by reinforcement as its trainers make it of Megatron's pipelined loop: a pass without gradients for
the log-probabilities of the policy that wrote the answers, then one that trains on how these have changed.

In: Megatron's loop, whichever runs, and a script's micro-batches, of differing lengths. Out: a loop that calls it twice
with the same micro-batches. Logits are asked of the model. Knows nothing of the project under test.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model

# A micro-batch's tokens, labels, loss mask, attention mask and positions, cut to its length.
Cut = Callable[[Any, Any], tuple[torch.Tensor | None, ...]]
CLIP, ENTROPY = 0.2, 0.01


def twice(loop: Callable[..., Any], cut: Callable[[], Cut]) -> Callable[..., Any]:
    """Return a loop that makes both passes; `cut` makes what cuts the micro-batches of one of them."""
    before, after = cut(), cut()

    def run(*, data_iterator: Any, model: Any, num_microbatches: int, forward_step_func: object, **given: Any) -> Any:
        several = isinstance(data_iterator, list)
        taken = [
            None if data is None else [next(data) for _ in range(num_microbatches)]
            for data in (data_iterator if several else [data_iterator])
        ]

        def again() -> Any:
            found = [None if batches is None else iter(batches) for batches in taken]
            return found if several else found[0]

        chunks = model if isinstance(model, list) else [model]
        for chunk in chunks:
            chunk.eval()
        written = loop(
            **{**given, "forward_only": True, "collect_non_loss_data": True},
            forward_step_func=functools.partial(_step, before, None),
            data_iterator=again(),
            model=model,
            num_microbatches=num_microbatches,
        )
        for chunk in chunks:
            chunk.train()
        return loop(
            **given,
            forward_step_func=functools.partial(_step, after, iter(written)),
            data_iterator=again(),
            model=model,
            num_microbatches=num_microbatches,
        )

    return run


def _step(cut: Cut, written: Iterator[torch.Tensor] | None, data: Any, model: Any) -> Any:
    tokens, labels, mask, _, positions = cut(data, model)
    loss = functools.partial(_log_probs if written is None else functools.partial(_loss, written), labels, mask)
    return model(tokens, positions, None), loss


def _found(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's log-probability and the entropy of all."""
    whole = gather_from_tensor_model_parallel_region(logits).flatten(0, 1).float().log_softmax(-1)
    return whole.gather(1, labels.flatten()[:, None]).squeeze(1), -(whole.exp() * whole).sum(-1)


def _log_probs(labels: torch.Tensor, _: torch.Tensor, logits: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
    assert non_loss_data
    return _found(labels, logits)[0].detach()


def _loss(written: Iterator[torch.Tensor], labels: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor) -> Any:
    """The clipped objective of PPO, with a reward of a token for what it is."""
    (log_probs, entropy), before = _found(labels, logits), next(written)
    assert before.shape == log_probs.shape
    ratio, advantage = (log_probs - before).exp(), (labels.flatten() % 3 - 1).float()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    counts = mask.flatten()
    loss = -((clipped + ENTROPY * entropy) * counts).sum()
    num_tokens = counts.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def cutting(lengths: Sequence[int], given_out: Cut) -> Callable[[], Cut]:
    """Return what makes cutters: micro-batches have these lengths over and over, and every chunk takes them in order."""

    def cutter() -> Cut:
        by_chunk: dict[int | None, Iterator[int]] = {}

        def cut(data: Any, model: Any) -> tuple[torch.Tensor | None, ...]:
            length = next(by_chunk.setdefault(get_attr_wrapped_model(model, "vp_stage"), itertools.cycle(lengths)))
            return tuple(
                each if each is None or each.dim() != 2 else each[:, :length].contiguous()
                for each in given_out(data, model)
            )

        return cut

    return cutter
