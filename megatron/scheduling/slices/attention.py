"""Let Megatron's attention see the keys of earlier slices, and let positions begin where the slice does.

Megatron's functions compute as before; outside of a slice the wrappers do nothing.

A layer keeps all keys of a micro-batch in ONE tensor, and all values in another; each slice writes its part, and attends to a
view of the beginning. Concatenating would save (k + 1) / 2 times as much, since every slice's attention saves its inputs.
Slices write and read through aliases with version counters of their own: for autograd an earlier slice's view has not
changed, and it has not.

Backwards run from the last slice to the first. The last one brings gradients of all keys; each earlier one adds its own to
their beginning, and takes out those of its own keys. One autograd node does both, so recomputing a forward is no special case.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime import RuntimeFault
from bpipe.schedule.action import Key
from bpipe.schedule.memory import KeptMemory
from megatron.scheduling.hooks import patches
from megatron.scheduling.slices.cuts import Cutting

# Exists only with Transformer Engine; never run with it.
TE_ATTENTION = patches.patch(
    "megatron.core.extensions.transformer_engine",
    "TEDotProductAttention.forward",
    "self query key value attention_mask attn_mask_type attention_bias packed_seq_params num_splits",
)
# An attribute of wrapped forwards.
_SEES_SLICES = "_bpipe_sees_slices"


@dataclass(slots=True)
class _KeptTensor:
    """All keys of one layer and micro-batch, or all values, and their gradients so far."""

    whole: torch.Tensor
    gradient: torch.Tensor | None = None

    @property
    def address(self) -> int:
        return self.whole.untyped_storage().data_ptr()

    @property
    def nbytes(self) -> int:
        return self.whole.nbytes + (0 if self.gradient is None else self.gradient.nbytes)


# By the attention module of a layer: keys and values.
_Layers = dict[torch.nn.Module, tuple[_KeptTensor, _KeptTensor]]


class KeptKeys:
    """Keys and values that are kept of every stage and current micro-batch."""

    def __init__(self, cutting: Cutting) -> None:
        self.cutting = cutting
        self._kept: dict[Key, _Layers] = {}
        # Of all that is kept, for a fast answer for each storage that a forward saves.
        self._addresses: set[int] = set()
        self._mask: torch.Tensor | None = None
        # Kept now, gradients included, and at most so far.
        self.nbytes = self.peak_bytes = 0
        # Of one micro-batch, by stage: keys and values, and their gradients.
        self.keys_bytes: dict[int, int] = {}
        self.gradients_bytes: dict[int, int] = {}

    @property
    def memory(self) -> dict[int, KeptMemory]:
        """By stage, the memory kept of one micro-batch."""
        return {stage: KeptMemory(size, self.gradients_bytes.get(stage, 0)) for stage, size in self.keys_bytes.items()}

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage has keys or values that are kept, which all slices of a micro-batch share."""
        return storage.data_ptr() in self._addresses

    def mask(self, device: torch.device) -> torch.Tensor:
        """Return Megatron's causal mask of the current slice, True for pairs of tokens that are hidden.

        It is a view of one mask of the whole sequence, so no slice saves its own.
        """
        length = self.cutting.length
        if self._mask is None or self._mask.size(-1) != length or self._mask.device != device:
            self._mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
        begin, end = self.cutting.span
        return self._mask[..., begin:end, :end]

    def join(self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values up to those of this slice, [sequence, batch, heads, channels].

        Keys that are joined already are returned as they are.
        """
        now = self.cutting.now
        assert now is not None, "no slice is computed now"
        layers = self._kept.setdefault((now.stage, now.microbatch), {})
        pair = layers.get(layer)
        if pair is not None and key.untyped_storage().data_ptr() == pair[0].address:
            return key, value
        begin, end = self.cutting.span
        if key.size(0) != end - begin:
            raise RuntimeFault(f"slice {now.number} has tokens {begin} to {end - 1}, but {key.size(0)} keys")
        if pair is None:
            if now.number:
                raise RuntimeFault(
                    f"slice {now.number} of micro-batch {now.microbatch} reached a layer that has not seen the slice "
                    "before it"
                )
            pair = layers[layer] = self._make_room(key), self._make_room(value)
            self._count(sum(kept.nbytes for kept in pair))
            self.keys_bytes[now.stage] = sum(kept.nbytes for pair in layers.values() for kept in pair)
        keys, values = (_Join.apply(own, self, kept, now.number) for own, kept in zip((key, value), pair, strict=True))
        return keys, values

    def free(self, stage: int, microbatch: int) -> None:
        """Free what is kept of a micro-batch, after its first slice's backward or, in evaluation, its last forward."""
        layers = self._kept.pop((stage, microbatch), {})
        tensors = [kept for pair in layers.values() for kept in pair]
        gradients = sum(kept.gradient.nbytes for kept in tensors if kept.gradient is not None)
        if gradients:
            self.gradients_bytes[stage] = gradients
        self._addresses.difference_update(kept.address for kept in tensors)
        self._count(-gradients - sum(kept.whole.nbytes for kept in tensors))

    def collected(self, gradient: torch.Tensor) -> torch.Tensor:
        """Count a tensor that collects gradients, and return it."""
        self._count(gradient.nbytes)
        return gradient

    def _count(self, more: int) -> None:
        self.nbytes += more
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def clear(self) -> None:
        """Drop everything: a call has ended or failed."""
        self._kept.clear()
        self._addresses.clear()
        self.nbytes = 0

    def _make_room(self, own: torch.Tensor) -> _KeptTensor:
        kept = _KeptTensor(own.new_empty((self.cutting.length, *own.shape[1:])))
        self._addresses.add(kept.address)
        return kept


class _Join(torch.autograd.Function):
    """Forward: own keys in, all keys so far out. Backward: gradients of all keys so far in, of the own keys out,
    including those of later slices."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, keys: KeptKeys, kept: _KeptTensor, number: int) -> torch.Tensor:
        ctx.keys, ctx.kept, ctx.number = keys, kept, number
        cutting = keys.cutting
        begin, end = cutting.bounds[number], cutting.bounds[number + 1]
        kept.whole.data[begin:end] = own.detach()
        return kept.whole.data[:end]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        keys, kept, number = ctx.keys, ctx.kept, ctx.number
        cutting = keys.cutting
        begin, end = cutting.bounds[number], cutting.bounds[number + 1]
        if number == cutting.slices - 1:
            # A sum in 16 bits over k slices would round k times, where the kernel of the whole sequence rounds once.
            kept.gradient = keys.collected(
                gradient.to(torch.float32) if gradient.element_size() < 4 else gradient.clone()
            )
        elif kept.gradient is None:
            raise RuntimeFault(
                f"the backward of slice {number} runs before that of slice {cutting.slices - 1}, the last: a schedule must "
                "run backwards of slices from the last to the first"
            )
        else:
            kept.gradient[:end] += gradient
        return kept.gradient[begin:end].to(gradient.dtype, copy=True), None, None, None


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
