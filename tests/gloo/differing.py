"""Micro-batches whose sizes differ because of a user's script.

The sizes follow from the number of forwards that this rank or chunk has run, so all ranks of a pipeline cut a
micro-batch to the same size, as they do in stock Megatron.

    lengths   rows of differing length, so that Megatron's pipeline sends shapes first (variable_seq_lengths)
    partial   some micro-batches recompute all layers, the others none (num_microbatches_with_partial_activation_checkpoints)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pretrain_gpt

# isort: split
import torch
from megatron.core.utils import get_attr_wrapped_model

# Lengths of the micro-batches, repeated; the first is not the largest.
LENGTHS = (48, 64, 40, 64, 56, 24)


def batch_of(data: Iterator[dict[str, torch.Tensor]] | None, model: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(pretrain_gpt.get_batch(data, get_attr_wrapped_model(model, "vp_stage")).values())[:5]


def losses(loss_mask: torch.Tensor) -> Callable[..., Any]:
    return functools.partial(pretrain_gpt.loss_func, loss_mask)


def cut() -> Callable[..., Any]:
    """Return a forward step that cuts micro-batches to `LENGTHS` in turn, separately for every chunk."""
    by_chunk: dict[int | None, Iterator[int]] = {}

    def step(data: Any, model: Any) -> Any:
        length = next(by_chunk.setdefault(get_attr_wrapped_model(model, "vp_stage"), itertools.cycle(LENGTHS)))
        tokens, labels, loss_mask, _, positions = (
            row if row is None or row.dim() != 2 else row[:, :length].contiguous() for row in batch_of(data, model)
        )
        return model(tokens, positions, None, labels=labels, loss_mask=loss_mask), losses(loss_mask)

    return step


def recomputing() -> Callable[..., Any]:
    def step(data: Any, model: Any, everything: bool) -> Any:
        config = get_attr_wrapped_model(model, "config")
        config.recompute_granularity = "full" if everything else None
        config.recompute_method, config.recompute_num_layers = "uniform", 1
        tokens, labels, loss_mask, mask, positions = batch_of(data, model)
        return model(tokens, positions, mask, labels=labels, loss_mask=loss_mask), losses(loss_mask)

    return step


STEPS = {"lengths": cut, "partial": recomputing}
SETTINGS: dict[str, dict[str, Any]] = {
    "lengths": {"variable_seq_lengths": True},
    "partial": {"num_microbatches_with_partial_activation_checkpoints": 1},
}


def train(how: str) -> None:
    """Run our script with another forward step and the model configuration that it needs."""
    configured = pretrain_gpt.gpt_config_from_args

    def changed_config(*args: Any, **kwargs: Any) -> Any:
        config = configured(*args, **kwargs)
        for name, value in SETTINGS[how].items():
            setattr(config.transformer, name, value)
        return config

    with (
        mock.patch.object(pretrain_gpt, "gpt_config_from_args", changed_config),
        mock.patch.object(pretrain_gpt, "forward_step", STEPS[how]()),
    ):
        pretrain_gpt.main()
