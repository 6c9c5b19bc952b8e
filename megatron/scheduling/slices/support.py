"""Judge whether a model's layers can be given slices.

In: the chunks of a model that is about to train. Out: nothing, or a ValueError.

Arguments do not say all: a script may build layers of its own, and a mixer that is not wrapped would see its slice
alone and train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.scheduling.slices.attention import sees_slices

_WAY_OUT = "train without --bpipe-slices"


def judge(models: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError, a line each, for every kind of layer that would see only its own slice."""
    problems = dict.fromkeys(problem for model in models for problem in _problems(model))
    if problems:
        raise ValueError("\n  ".join(["--bpipe-slices: this model cannot be cut:", *problems]))


def _problems(model: torch.nn.Module) -> Iterator[str]:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, TransformerLayer):
            if not isinstance(module.self_attention, (Attention, IdentityOp)):
                yield (
                    f"{type(module.self_attention).__name__} is not one of Megatron's attention classes and sees "
                    f"only its own slice: {_WAY_OUT}"
                )
            if not isinstance(module.cross_attention, IdentityOp):
                yield f"{name} attends to another sequence, which has no slices: {_WAY_OUT}"
        if isinstance(module, Attention):
            core: Any = module.core_attention
            if not sees_slices(core):
                yield (
                    f"{type(core).__name__} sees only the keys of its own slice: use Megatron's core attention, or "
                    f"{_WAY_OUT}"
                )
            elif module.attn_mask_type is not AttnMaskType.causal:
                yield (
                    f"{name} has the mask {module.attn_mask_type.name}, but earlier slices cannot see later ones: "
                    f"{_WAY_OUT}"
                )
        if type(module).__module__.startswith("megatron.core.ssm."):
            yield f"{name} carries a state from token to token, but slices do not pass it on: {_WAY_OUT}"
