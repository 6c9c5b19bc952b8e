"""Keep the keys and values of a micro-batch for its later slices, and collect their gradients.

A layer keeps all keys of a micro-batch in ONE tensor, and all values in another; each slice writes its part, and attends to a
view of the beginning. Concatenating would save (k + 1) / 2 times as much, since every slice's attention saves its inputs.
Slices write and read through aliases with version counters of their own: for autograd an earlier slice's view has not
changed, and it has not.

Backwards run from the last slice to the first. The last one brings gradients of all keys; each earlier one adds its own to
their beginning, and takes out those of its own keys. One autograd node does both, so recomputing a forward is no special case.
"""

from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime import RuntimeFault
from bpipe.schedule.action import Key
from bpipe.schedule.memory import KeptMemory
from megatron.scheduling.slices.cuts import Cutting


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
