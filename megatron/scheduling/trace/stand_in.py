"""Let "cuda" mean torch's meta device, whose tensors have sizes and no memory.

Megatron's own modules are then built and run at any size; no number is right, but every size is. Kernels that only a GPU has
are replaced by functions that save tensors of the same shapes: the fused softmax, flash attention, dropout with masks of one
byte. Tokens go evenly to all experts, as the formulas of `bpipe.predict` assume: a dispatcher needs scores only for how many
tokens go where, and these numbers are real and on the host.
"""

import copy
import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.scheduling import cpu
from megatron.scheduling.hooks.patches import replaced_by

META = torch.device("meta")

# Transformer Engine's modules and kernels of Apex exist only on a GPU. These kernels save nothing.
ARGUMENTS = tuple(
    """--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-rope-fusion""".split()
)
# Megatron's fused softmax imports these modules, by the kind of mask.
_SOFTMAX_KERNELS = ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda")
# Megatron's dispatchers import this by name, to exchange how many tokens they send.
_GATHER = "gather_from_sequence_parallel_region"
# Several of Megatron's modules import this function by name.
_ROTATE = "apply_rotary_pos_emb"
# Transformer Engine's layers do not split these projections of latent attention over tensor-parallel ranks.
_WHOLE = ("q_down_proj", "kv_down_proj")


def install() -> None:
    """Replace the CUDA runtime by the meta device. Call once, before Megatron is imported."""
    functions: Any = torch
    cpu.ARGUMENTS = ARGUMENTS
    cpu.install(META)
    for name in _SOFTMAX_KERNELS:
        _add_softmax_kernel(name)
    functions.dropout = functions.nn.functional.dropout = _dropout
    functions.rms_norm = functions.nn.functional.rms_norm = _rms_norm


def _add_softmax_kernel(name: str) -> None:
    """Add a module whose softmax and its backward each make a tensor as large as the input."""
    if importlib.util.find_spec(name) is not None:
        return
    module: Any = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.forward = module.backward = lambda tensor, *_: torch.empty_like(tensor)
    module.get_batch_per_block = lambda *_: 1
    sys.modules[name] = module


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """As on a GPU: one kernel, and a mask of one byte per value."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


class _RmsNorm(torch.autograd.Function):
    """The shape of torch's fused kernel on a GPU, which saves its input, its weight and a 32-bit scale per row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        scales = torch.empty((*input.shape[:-1], 1), dtype=torch.float32, device=input.device)
        ctx.save_for_backward(input, weight, scales)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight)


def _rms_norm(
    input: torch.Tensor, normalized_shape: object, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    # Contiguous, as for Transformer Engine's: a key that is a view of a projection would keep all of the projection.
    return _RmsNorm.apply(input.contiguous(), weight)


class _FlashAttention(torch.autograd.Function):
    """The shape of flash attention, which saves its inputs, its output, and one 32-bit number per row and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, batch, heads = query.shape[:3]
        output = query.new_empty((rows, batch, heads * value.shape[-1]))
        sums = torch.empty((batch, heads, rows), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


def shape_attention(kind: str) -> None:
    """Give Megatron's own attention core the shape of flash attention ("flash"), or leave its own ("unfused").

    Call after Megatron was imported.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    core: Any = DotProductAttention
    init, forward = _own_methods(core)
    core.__init__ = functools.partialmethod(_init_core, init)
    core.forward = functools.partialmethod(_attend, None if kind == "flash" else forward)


@functools.cache
def _own_methods(core: Any) -> tuple[Any, Any]:
    """Return the class's own constructor and forward, as they were at the first call."""
    return core.__init__, core.forward


def _init_core(
    self: Any, init: Any, *args: Any, k_channels: object = None, v_channels: object = None, **kwargs: Any
) -> None:
    """Accept widths of keys and values, and a rank's part of a sequence, as only Transformer Engine's core does."""
    core_config = copy.copy(kwargs.pop("config"))
    core_config.context_parallel_size = 1
    init(self, *args, config=core_config, **kwargs)


def _attend(
    self: Any, forward: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    # Contiguous, as for Transformer Engine's cores: a value that is a view of a projection would keep all of it.
    if forward is None:
        return _FlashAttention.apply(query.contiguous(), key.contiguous(), value.contiguous())
    return forward(self, query.contiguous(), key.contiguous(), value.contiguous(), *args, **kwargs)


def shape_modules() -> None:
    """Give Megatron's own layers the shapes of fused ones. Call once, after Megatron was imported."""
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    linear: Any = ColumnParallelLinear
    linear.__init__ = functools.partialmethod(_init_linear, linear.__init__)
    # Megatron compiles this function, which lets a storage share another's memory.
    random._get_share_storage = lambda: (
        lambda target, source: target.untyped_storage().resize_(source.untyped_storage().nbytes())
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and hasattr(module, _ROTATE):
            setattr(module, _ROTATE, lambda input, angles, *_, **__: _Rotation.apply(input, angles))


def _init_linear(self: Any, init: Any, *args: Any, tp_comm_buffer_name: str | None = None, **kwargs: Any) -> None:
    if tp_comm_buffer_name in _WHOLE:
        kwargs["tp_group"] = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    init(self, *args, tp_comm_buffer_name=tp_comm_buffer_name, **kwargs)


class _Rotation(torch.autograd.Function):
    """The shape of the fused rotation of positions, which saves only the angles."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(angles)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(gradients[0]), None


def even_loads(config: Any, tokens: int, experts: int) -> torch.Tensor:
    """Return how many of `tokens` go to each of the first `experts`; a remainder is spread."""
    num_sent, num_experts = tokens * int(config.moe_router_topk), int(config.num_moe_experts)
    loads = (torch.arange(experts + 1) * num_sent // num_experts).diff()
    capacity = config.moe_expert_capacity_factor
    return loads if capacity is None else loads.clamp(max=math.ceil(num_sent / num_experts * capacity))


class _EvenLoads(TorchFunctionMode):
    """Computes sums of a map of tokens and experts (one row per token), and its selections."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.sum and args[0].dtype is torch.bool and args[0].is_meta:
            return even_loads(self._config, *args[0].shape)
        if function is torch.Tensor.masked_select:
            values, mask = args
            # Both are transposed here: one row per expert.
            return _Selection.apply(values, mask, int(even_loads(self._config, mask.shape[1], mask.shape[0]).sum()))
        return function(*args, **(kwargs or {}))


class _Selection(torch.autograd.Function):
    """Torch's selection by a mask, which saves its input and the mask, without values."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
        ctx.save_for_backward(values, mask)
        return values.new_empty(number)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


def route_evenly() -> None:
    """Let dispatchers count even loads. Call once, after Megatron was imported."""
    from megatron.core.transformer.moe import token_dispatcher

    plain = getattr(token_dispatcher, _GATHER)
    setattr(token_dispatcher, _GATHER, functools.partial(_gathered, plain))
    for owner, name in (
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess"),
        (token_dispatcher.MoEAllGatherTokenDispatcher, "dispatch_postprocess"),
    ):
        setattr(owner, name, replaced_by(_run_evenly)(getattr(owner, name)))


def _run_evenly(method: Callable[..., Any], dispatcher: Any, *args: Any) -> Any:
    with _EvenLoads(dispatcher.config):
        return method(dispatcher, *args)


def _gathered(plain: Callable[..., Any], numbers: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
    """Return a tensor on the host for every rank: all ranks route alike."""
    if numbers.device.type == "cpu":
        return numbers.repeat(group.size())
    return plain(numbers, *args, group=group, **kwargs)
