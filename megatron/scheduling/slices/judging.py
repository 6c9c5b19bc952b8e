"""Judge whether a model's layers can be given slices.

In: the chunks of a model that is about to train. Out: nothing, or a ValueError.

Arguments do not say all: a script may build layers of its own, and a mixer that is not wrapped would see its slice
alone and train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.scheduling.slices.attention import BY_MASK, sees_slices

_WAY_OUT = "train without --bpipe-slices"
# Tokens of either half of the sequence on which masks are tried, and how far outputs may be apart, as a part of the
# largest: kernels of 16 bit choose their tiles by the length. Another mask differs by as much as the outputs are.
_TRIED_TOKENS, _APART = 128, 0.05


def judge(models: Sequence[torch.nn.Module]) -> None:
    """Raise ValueError, a line each, for every kind of layer that would see only its own slice."""
    problems = dict.fromkeys(problem for model in models for problem in _problems(model))
    if not problems:
        problems = dict.fromkeys(_problems_of_masks(models))
    if problems:
        raise ValueError("\n  ".join(["--bpipe-slices: this model cannot be cut:", *problems]))


def _problems_of_masks(models: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Try Transformer Engine's attention, which no machine of ours has run, once for each rank."""
    from megatron.core.transformer.attention import Attention

    for module in (module for model in models for module in model.modules()):
        if isinstance(module, Attention) and hasattr(type(module.core_attention).forward, BY_MASK):
            apart = difference_of_masks(module)
            if not apart <= _APART:
                yield (
                    f"{type(module.core_attention).__name__} masks fewer queries than keys otherwise than slices need: "
                    f"outputs of the second of {2 * _TRIED_TOKENS} tokens' halves are {apart:.3g} of the largest apart, "
                    f"at most {_APART} may be: use --transformer-impl local, or {_WAY_OUT}"
                )
            return


@torch.no_grad()
def difference_of_masks(attention: Any) -> float:
    """Return how far the second half of a sequence attends otherwise alone than in the whole, as a part of the largest
    output."""
    from megatron.core.transformer.enums import AttnMaskType

    core, config = attention.core_attention, attention.config
    heads, groups = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
    width = value_width = attention.hidden_size_per_attention_head
    if config.multi_latent_attention:
        groups, width, value_width = heads, attention.q_head_dim, config.v_head_dim
    generator = torch.Generator().manual_seed(1)
    shapes = [(2 * _TRIED_TOKENS, 1, *rest) for rest in ((heads, width), (groups, width), (groups, value_width))]
    device = next(attention.parameters()).device
    query, key, value = (
        torch.randn(shape, generator=generator).to(device=device, dtype=config.params_dtype) for shape in shapes
    )
    training = core.training
    core.eval()
    try:
        whole = core(query, key, value, None, attn_mask_type=AttnMaskType.causal)[_TRIED_TOKENS:]
        alone = core(query[_TRIED_TOKENS:], key, value, None, attn_mask_type=AttnMaskType.causal_bottom_right)
    finally:
        core.train(training)
    return float((alone - whole).abs().max() / whole.abs().max())


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
                    f"{type(module.self_attention).__name__} is no attention of Megatron's, and sees its own slice "
                    f"alone: {_WAY_OUT}"
                )
            if not isinstance(module.cross_attention, IdentityOp):
                yield f"{name} attends to another sequence, which has no slices: {_WAY_OUT}"
        if isinstance(module, Attention):
            core: Any = module.core_attention
            if not sees_slices(core):
                yield (
                    f"{type(core).__name__} sees the keys of its own slice alone: take Megatron's core attention, "
                    f"or {_WAY_OUT}"
                )
            elif module.attn_mask_type is not AttnMaskType.causal:
                yield f"{name} masks {module.attn_mask_type.name}, and earlier slices cannot see later ones: {_WAY_OUT}"
        if type(module).__module__.startswith("megatron.core.ssm."):
            yield f"{name} carries a state from token to token, which slices do not: {_WAY_OUT}"
