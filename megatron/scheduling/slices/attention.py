"""Let Megatron's attention see the keys of earlier slices, and its positions begin where the slice does.

In: `KeptKeys`. Out: wraps.

Each wrap stands for one function of Megatron's, which does all computing as it is. Outside of a slice they do nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cutting import Cutting
from megatron.scheduling.slices.kept import KeptKeys


def wraps(kept: KeptKeys) -> dict[patches.Patch, patches.Wrap]:
    """Return what is put in place of what."""
    cutting = kept.cutting
    rotary = functools.partial(_rotary, cutting)
    engine = (
        {}
        if importlib.util.find_spec("transformer_engine") is None
        else {TE_ATTENTION: functools.partial(_engines_attention, kept)}
    )
    return {
        **engine,
        patches.LOCAL_ATTENTION: functools.partial(_core_attention, kept),
        patches.CHECKPOINTED_ATTENTION: functools.partial(_checkpointed, kept),
        patches.ROTARY: rotary,
        patches.YARN: rotary,
    }


# There only where Transformer Engine is, which nobody here has run.
TE_ATTENTION = patches.Patch(
    "megatron.core.extensions.transformer_engine",
    "TEDotProductAttention.forward",
    (
        *("self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias"),
        "packed_seq_params",
        "num_splits",
    ),
)
# What a wrapped forward says of itself; and one that leaves a slice's mask to the kernel.
_SEES_SLICES = "_bpipe_sees_slices"
BY_MASK = "_bpipe_by_mask"


def sees_slices(core_attention: object) -> bool:
    """Return whether a core attention is computed by a wrapped forward: a class of a script's own may have another."""
    return hasattr(type(core_attention).forward, _SEES_SLICES)  # type: ignore[attr-defined]


def _core_attention(kept: KeptKeys, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DotProductAttention.forward`.

    Without a mask it takes a square causal one, which is no slice's but the first's.
    """

    @functools.wraps(forward)
    def run(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if kept.cutting.now is None:
            return forward(module, query, key, value, attention_mask, *args, **kwargs)
        key, value = kept.join(module, key, value)
        if attention_mask is None and kept.cutting.span[0]:
            attention_mask = kept.mask(query.device)
        return forward(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(run, _SEES_SLICES, True)
    return run


def _engines_attention(kept: KeptKeys, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `TEDotProductAttention.forward`, and with it flash attention: a causal mask that ends bottom right is all
    that a slice needs."""
    from megatron.core.transformer.enums import AttnMaskType

    @functools.wraps(forward)
    def run(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: AttnMaskType,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kept.cutting.now is None:
            return forward(module, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(
                f"slices attend causally, and this layer masks {attn_mask_type.name}: train without --bpipe-slices"
            )
        key, value = kept.join(module, key, value)
        if kept.cutting.span[0]:
            attn_mask_type = AttnMaskType.causal_bottom_right
        return forward(module, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)

    setattr(run, _SEES_SLICES, True)
    setattr(run, BY_MASK, True)
    return run


def _checkpointed(kept: KeptKeys, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Attention._checkpointed_attention_forward`: what it saves to compute again from are the kept keys alone."""

    @functools.wraps(forward)
    def run(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if kept.cutting.now is not None:
            key, value = kept.join(module.core_attention, key, value)
        return forward(module, query, key, value, *args, **kwargs)

    return run


def _rotary(cutting: Cutting, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RotaryEmbedding.forward` and YaRN's: one table of the whole sequence, of which each slice has a view.

    Tables of slices would each take a place in Megatron's cache, which drops tables that graphs still hold.
    """

    @functools.wraps(forward)
    def run(module: Any, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        if cutting.now is None:
            return forward(module, max_seq_len, *args, **kwargs)
        begin, end = cutting.span
        if max_seq_len != end - begin:
            raise ValueError(
                f"positions of {max_seq_len} tokens are asked for in a slice of {end - begin}: train without "
                f"--bpipe-slices"
            )
        made = forward(module, cutting.length, *args, **kwargs)
        return (made[0][begin:end], *made[1:]) if isinstance(made, tuple) else made[begin:end]

    # YaRN clears its own.
    run.cache_clear = forward.cache_clear  # type: ignore[attr-defined]
    return run
