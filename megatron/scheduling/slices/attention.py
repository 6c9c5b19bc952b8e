"""Let Megatron's attention see the keys of earlier slices, and its positions begin where the slice does.

In: `KeptKeys`. Out: wraps.

Each wrap stands for one function of Megatron's, which does all computing as it is. Outside of a slice they do nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from bpipe.runtime.errors import RuntimeFault
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting
from megatron.scheduling.slices.key_value_cache import KeptKeys


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
# What a wrapped forward says of itself.
_SEES_SLICES = "_bpipe_sees_slices"


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

    is_checked = False

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
                f"slices need causal attention, but this layer's mask is {attn_mask_type.name}: train without "
                "--bpipe-slices"
            )
        key, value = kept.join(module, key, value)
        begin = kept.cutting.span[0]
        if begin:
            attn_mask_type = AttnMaskType.causal_bottom_right
            nonlocal is_checked
            if not is_checked:
                is_checked = True
                check_mask(
                    lambda *tensors: forward(module, *tensors, attention_mask, attn_mask_type, *args, **kwargs),
                    *(module, query, key, value, begin),
                )
        return forward(module, query, key, value, attention_mask, attn_mask_type, *args, **kwargs)

    setattr(run, _SEES_SLICES, True)
    return run


def check_mask(attend: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, begin: int) -> None:
    """Ask a kernel what the first token of a slice behind `begin` tokens sees, by tensors of the shapes that it gets:
    query [tokens, batch, heads, width], key and value [begin + tokens, batch, groups, width].

    Queries and keys are zeros, so every visible key counts alike. Waits for the device, once a run. Raises RuntimeFault
    where it sees another number of keys, or not the last of them.
    """
    last, first, beyond = 0, 1, 2
    seen = torch.zeros_like(value)
    seen[begin, ..., last], seen[0, ..., first] = 1, 1
    seen[begin + 1 :, ..., beyond] = 1
    training = module.training
    try:
        # Dropout would hide keys.
        module.eval()
        with torch.no_grad():
            made = attend(torch.zeros_like(query), torch.zeros_like(key), seen)
    finally:
        module.train(training)
    row = made[0].view(*query.shape[1:3], -1)[..., :3].float()
    # Of 16 bits a share has an error of less than a hundredth of it.
    share = torch.tensor([1 / (begin + 1), 1 / (begin + 1), 0.0], device=row.device)
    if not torch.allclose(row, share.expand_as(row), rtol=0.02, atol=0.0):
        found = ", ".join(f"{number:.3g}" for number in row.mean((0, 1)).tolist())
        raise RuntimeFault(
            f"the first token of a slice that follows {begin} tokens must see exactly keys 0 to {begin}: it gives "
            f"the last of them, the first and the later keys the weights {found} instead of {1 / (begin + 1):.3g} "
            "twice and 0, so this attention's causal mask is not aligned to the bottom right: use "
            "--transformer-impl local, or train without --bpipe-slices"
        )


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
                f"the model requests positions of {max_seq_len} tokens in a slice of {end - begin}: train without "
                "--bpipe-slices"
            )
        made = forward(module, cutting.length, *args, **kwargs)
        return (made[0][begin:end], *made[1:]) if isinstance(made, tuple) else made[begin:end]

    # YaRN clears its own.
    run.cache_clear = forward.cache_clear  # type: ignore[attr-defined]
    return run
