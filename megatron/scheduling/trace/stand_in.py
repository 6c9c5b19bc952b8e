"""Let "cuda" mean torch's meta device, whose tensors have sizes and no memory.

In: a process in which `megatron` has not been imported yet. Out: the same, in which Megatron's own modules are built and
run at any size; no number is right, every size is. What only a GPU has is there by its shape of memory: the fused
softmax, flash attention, dropout with masks of one byte. Knows no schedule.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from megatron.scheduling import cpu

META = torch.device("meta")

# Transformer Engine's modules, and kernels of Apex, exist on a GPU alone. Neither of the two kernels saves anything:
# one adds to a gradient in place, the other is another way to compute a norm.
_MISSING = ("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-rope-fusion")
ARGUMENTS = ("--distributed-backend", "gloo", "--transformer-impl", "local", *_MISSING)
# Megatron's fused softmax imports these, by the kind of mask.
_SOFTMAX_KERNELS = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda")
# Megatron's modules import this by name.
_ROTATE = "apply_rotary_pos_emb"
# Transformer Engine's layers have these projections of latent attention whole on every tensor-parallel rank.
_WHOLE = ("q_down_proj", "kv_down_proj")
# torch's RMSNorm on a GPU keeps its input and a 32-bit scale a row.
_RMS_STATISTICS = torch.float32


def install() -> None:
    """Replace the CUDA runtime by the meta device. Call once, before Megatron is imported."""
    functions: Any = torch
    answers = {**cpu.answers_of_one_device(), "current_device": lambda: META}
    cpu.ARGUMENTS = ARGUMENTS
    cpu.stand_in(META, answers, cpu.accelerator_answers())
    for name in _SOFTMAX_KERNELS:
        _add_softmax_kernel(name)
    functions.dropout = functions.nn.functional.dropout = _dropout
    functions.rms_norm = functions.nn.functional.rms_norm = _rms_norm


def _add_softmax_kernel(name: str) -> None:
    """Add a module whose softmax makes a tensor as large as its input, and so does its backward."""
    if importlib.util.find_spec(name) is not None:
        return
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.forward = module.backward = lambda tensor, *_: torch.empty_like(tensor)
    module.get_batch_per_block = lambda *_: 1
    sys.modules[name] = module


def _dropout(given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As on a GPU: one kernel, and a mask of one byte a value."""
    return torch.native_dropout(given, p, training)[0] if training and p else given


class _RmsNorm(torch.autograd.Function):
    """The shape of torch's fused kernel: it saves its input, its weight and a scale a row."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        scales = torch.empty((*given.shape[:-1], 1), dtype=_RMS_STATISTICS, device=given.device)
        ctx.save_for_backward(given, weight, scales)
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        given, weight, _ = ctx.saved_tensors
        return torch.empty_like(given), None if weight is None else torch.empty_like(weight)


def _rms_norm(
    given: torch.Tensor, normalized_shape: object, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    # Transformer Engine's wants it in one piece: a key that is a part of what was projected would keep all of that.
    normed: torch.Tensor = _RmsNorm.apply(given.contiguous(), weight)
    return normed


class _FlashAttention(torch.autograd.Function):
    """The shape of flash attention: it saves what it is given, what it gives, and one 32-bit number per row and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, batch, heads = query.shape[:3]
        given = query.new_empty((rows, batch, heads * value.shape[-1]))
        sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, given, sums)
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


def shape_attention(kind: str) -> None:
    """Let Megatron's own attention core have the shape of flash attention, or its own: "unfused".

    Call once Megatron is imported.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    core: Any = DotProductAttention
    made, forward = _own(core)
    core.__init__ = functools.partialmethod(_made, made)
    core.forward = _flash_forward if kind == "flash" else functools.partialmethod(_unfused_forward, forward)


@functools.cache
def _own(core: Any) -> tuple[Any, Any]:
    """Return the class's own constructor and forward, as they were when first asked for."""
    return core.__init__, core.forward


def _made(
    self: Any, made: Any, *args: Any, k_channels: object = None, v_channels: object = None, **kwargs: Any
) -> None:
    """Make a core for keys and values of widths of their own, and for a rank's part of a sequence, too: both only
    Transformer Engine's takes."""
    core_config = copy.copy(kwargs.pop("config"))
    core_config.context_parallel_size = 1
    made(self, *args, config=core_config, **kwargs)


def _unfused_forward(
    self: Any, forward: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # As Transformer Engine hands them to any core of its.
    return forward(self, query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)


def _flash_forward(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> torch.Tensor:
    # The kernels want each in one piece: a value that is a part of what was projected would keep all of that.
    attended: torch.Tensor = _FlashAttention.apply(query.contiguous(), key.contiguous(), value.contiguous())
    return attended


class _Alone:
    """A group of one rank, as far as a layer asks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def shape_modules() -> None:
    """Let Megatron's own layers have the shapes of fused ones. Call once, when Megatron is imported."""
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear: Any = ColumnParallelLinear
    linear.__init__ = functools.partialmethod(_made_whole, linear.__init__)
    # Megatron compiles this one, to let a storage have another's memory.
    random._get_share_storage = lambda: _share_storage
    _with_fused_rotation()


def _made_whole(self: Any, made: Any, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
    if tp_comm_buffer_name in _WHOLE:
        kwargs["tp_group"] = _Alone()
    made(self, *args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)


def _share_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    target.untyped_storage().resize_(source.untyped_storage().nbytes())


def _with_fused_rotation() -> None:
    """Let positions be rotated as the fused kernel does it, which saves the angles alone."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and hasattr(module, _ROTATE):
            setattr(module, _ROTATE, _rotated)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(gradients[0]), None


def _rotated(given: torch.Tensor, angles: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    turned: torch.Tensor = _Rotation.apply(given, angles)
    return turned
