"""Let Megatron's attention see the keys of earlier slices, and let positions begin where the slice does.

Megatron's functions compute as before; outside of a slice the wrappers do nothing.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from bpipe.runtime import RuntimeFault
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting
from megatron.scheduling.slices.key_value_cache import KeptKeys

# Exists only with Transformer Engine; never run with it.
TE_ATTENTION = patches.patch(
    "megatron.core.extensions.transformer_engine",
    "TEDotProductAttention.forward",
    "self query key value attention_mask attn_mask_type attention_bias packed_seq_params num_splits",
)
# An attribute of wrapped forwards.
_SEES_SLICES = "_bpipe_sees_slices"


def wraps(kept: KeptKeys) -> dict[patches.Patch, patches.Wrap]:
    rotary = functools.partial(_rotary, kept.cutting)
    wraps: dict[patches.Patch, patches.Wrap] = {
        patches.LOCAL_ATTENTION: functools.partial(_core_attention, kept),
        patches.CHECKPOINTED_ATTENTION: patches.replaced_by(functools.partial(_checkpointed, kept)),
        patches.ROTARY: rotary,
        patches.YARN: rotary,
    }
    if importlib.util.find_spec("transformer_engine") is not None:
        wraps[TE_ATTENTION] = functools.partial(_engines_attention, kept)
    return wraps


def sees_slices(core_attention: object) -> bool:
    """Whether a core attention has a wrapped forward: a script's own class may have another."""
    return hasattr(type(core_attention).forward, _SEES_SLICES)  # type: ignore[attr-defined]


def _core_attention(kept: KeptKeys, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DotProductAttention.forward`. Without a mask it uses a square causal one, which fits only the first slice."""

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
    """Wrap `TEDotProductAttention.forward`, and with it flash attention: a slice needs only a causal mask that is aligned
    to the bottom right."""
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
    """Check which keys the first token of a slice after `begin` tokens sees. Waits for the device, once per run.

    Queries and keys are zeros of the real shapes, so every visible key has the same weight.

    Args:
        attend: The kernel.
        module: The attention, whose dropout is switched off meanwhile.
        query: [tokens, batch, heads, width].
        key: [begin + tokens, batch, groups, width].
        value: As the key.
        begin: Number of earlier tokens.

    Raises:
        RuntimeFault: The token sees another number of keys, or not the last of them.
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
            output = attend(torch.zeros_like(query), torch.zeros_like(key), seen)
    finally:
        module.train(training)
    row = output[0].view(*query.shape[1:3], -1)[..., :3].float()
    # In 16 bits the relative error of a share is below 0.01.
    share = torch.tensor([1 / (begin + 1), 1 / (begin + 1), 0.0], device=row.device)
    if not torch.allclose(row, share.expand_as(row), rtol=0.02, atol=0.0):
        weights = ", ".join(f"{number:.3g}" for number in row.mean((0, 1)).tolist())
        raise RuntimeFault(
            f"the first token of a slice that follows {begin} tokens must see exactly keys 0 to {begin}: it gives "
            f"the last of them, the first and the later keys the weights {weights} instead of {1 / (begin + 1):.3g} "
            "twice and 0, so this attention's causal mask is not aligned to the bottom right: use "
            "--transformer-impl local, or train without --bpipe-slices"
        )


def _checkpointed(
    kept: KeptKeys,
    forward: Callable[..., Any],
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `Attention._checkpointed_attention_forward`, which saves only the kept keys for recomputing."""
    if kept.cutting.now is not None:
        key, value = kept.join(module.core_attention, key, value)
    return forward(module, query, key, value, *args, **kwargs)


def _rotary(cutting: Cutting, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RotaryEmbedding.forward` and YaRN's: each slice has a view of one table of the whole sequence.

    A table for each slice would fill Megatron's cache, which drops tables that graphs still hold.
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
        table = forward(module, cutting.length, *args, **kwargs)
        return (table[0][begin:end], *table[1:]) if isinstance(table, tuple) else table[begin:end]

    # YaRN clears its own cache.
    run.cache_clear = forward.cache_clear  # type: ignore[attr-defined]
    return run
