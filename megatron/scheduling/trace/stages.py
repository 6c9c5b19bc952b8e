"""Find what every stage of a launch holds, by Megatron's own model at true size, without memory.

    python -m megatron.scheduling.trace.stages <flags of pretrain_gpt.py> [--trace-attention unfused]

`bpipe trace` starts this and reads the JSON that it prints. The stages are those of the first rank of each place in the
pipeline, made by the trainer's builder with the trainer's wrappers on torch's meta device. The other ranks do not exist,
and no number is computed. Saved tensors are found by `bpipe.runtime.capture`, as in a training. Transformer Engine's
modules cannot be built without a GPU, so Megatron's own replace them, with the memory of fused kernels.

"cuda" means torch's meta device, whose tensors have sizes and no memory. Kernels that only a GPU has are replaced by functions
that save tensors of the same shapes: the fused softmax, flash attention, dropout with masks of one byte. Tokens go evenly to
all experts, as the formulas of `bpipe.predict` assume: a dispatcher needs scores only for how many tokens go where, and these
numbers are real and on the host.
"""

import argparse
import contextlib
import copy
import functools
import importlib.util
import io
import json
import logging
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bpipe.runtime import capture
from bpipe.runtime.graph import hiding
from megatron.scheduling import cpu
from megatron.scheduling.hooks.patches import replaced_by
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup

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
# Flags for what a machine without a GPU cannot build.
_WITHOUT_GPU = ("--transformer-impl", "local")
# Megatron sets these by its choice, and ends if they are set otherwise.
_CHOSEN_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
# Recomputed modules that begin or end between a norm and a matrix.
_BESIDE_NORMS = ("layernorm", "mla_up_proj", "mlp")
# Number of kinds of nodes that are listed for a stage.
_MOST_KINDS = 12


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make on a device without counters."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The most so far, after any operation.
        self.most_bytes = 0
        self._device = device.type
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def bytes_now(self) -> int:
        """Bytes of the storages that are still alive."""
        self._alive = {address: entry for address, entry in self._alive.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        earlier = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in earlier and storage.device.type == self._device:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most_bytes = max(self.most_bytes, self.bytes_now)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.scheduling.options import flags

    group = flags.add_arguments(parser).add_argument_group("trace")
    group.add_argument("--trace-attention", choices=("flash", "unfused"), default="flash", help="shape of the core")
    return parser


def _fit(args: Any) -> None:
    """Change what does not affect the model, and refuse what cannot be traced."""
    for flag, value, reason in _problems(args):
        if value:
            raise ValueError(f"{flag} {value}: {reason}: use `bpipe simulate`, whose formulas cover it")
    # Kernels of Transformer Engine's; torch's index lists are as large.
    args.moe_permute_fusion = args.moe_router_fusion = False
    # The replica that is traced has all of its weights.
    args.overlap_param_gather = False
    # One replica is enough, and its micro-batches need not fill the pipeline.
    args.global_batch_size = None
    args.perform_initialization = False


def _problems(args: Any) -> Iterator[tuple[str, object, str]]:
    """Yield flags that cannot be traced, each with its value, which is false if it is not used, and the reason."""
    again, unfused = args.recompute_modules or (), args.trace_attention == "unfused"
    yield "--hybrid-layer-pattern", args.hybrid_layer_pattern, "Mamba layers run only with mamba_ssm's GPU kernels"
    yield "--fp8-format", args.fp8, "FP8 needs Transformer Engine"
    yield "--fp4-format", args.fp4, "FP4 needs Transformer Engine"
    yield "--bpipe-vocabulary", args.bpipe_vocabulary, "shards of the output layer have their own passes"
    yield (
        "--recompute-modules",
        " ".join(module for module in again if module in _BESIDE_NORMS),
        "Transformer Engine has a norm and the matrix after it in one layer, Megatron in two",
    )
    unlike = args.multi_latent_attention and args.v_head_dim != args.qk_head_dim + args.qk_pos_emb_head_dim
    yield (
        "--v-head-dim",
        (unlike and unfused) * args.v_head_dim,
        "Megatron's own attention needs values as wide as keys",
    )
    dispatcher, balancing = args.moe_token_dispatcher_type, args.moe_router_load_balancing_type
    yield (
        "--moe-token-dispatcher-type",
        dispatcher * (dispatcher == "flex"),
        "its kernels come from DeepEP or HybridEP",
    )
    yield "--recompute-modules", "moe_act" * ("moe_act" in again), "only Transformer Engine's grouped experts have it"
    yield (
        "--moe-router-load-balancing-type",
        "sinkhorn" * ("sinkhorn" in balancing),
        "it iterates until scores agree, and a trace has no scores",
    )
    if args.context_parallel_size > 1:
        kinds = " ".join(sorted({*args.cp_comm_type} - {"p2p"}))
        yield "--cp-comm-type", kinds, "Transformer Engine chooses which copies attention keeps"
        yield (
            "--context-parallel-size",
            args.context_parallel_size * unfused,
            "Megatron's own attention does not take parts of a sequence",
        )


def prepare() -> None:
    """Prepare this process. Must be called before `megatron.core` is imported."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    install()
    startup.prepare()
    shape_modules()
    route_evenly()


def trace(flags: Sequence[str]) -> dict[str, Any]:
    """Return an entry for every stage of the launch with these flags, in order, and what was traced.

    Raises ValueError for what cannot be traced.
    """
    for name in _CHOSEN_ATTENTION:
        os.environ.pop(name, None)
    by_stage: dict[int, dict[str, Any]] = {}
    with one_stage.refusing("without a GPU Megatron refuses this launch"):
        args = one_stage.parse([*flags, *_WITHOUT_GPU], _add_arguments, _fit)
        shape_attention(args.trace_attention)
        num_ranks = args.pipeline_model_parallel_size
        for place in range(num_ranks):
            with one_stage.chunks(args, place) as models:
                for chunk, model in enumerate(models):
                    by_stage[chunk * num_ranks + place] = _stage(args, model)
    measured = {**one_stage.measured(args), "attention": args.trace_attention}
    return {"stages": [by_stage[stage] for stage in sorted(by_stage)], "measured": measured}


def main(flags: Sequence[str]) -> None:
    """Trace all stages and print them."""
    with contextlib.redirect_stdout(io.StringIO()):
        prepare()
        document = trace(flags)
    print(json.dumps(document))


def _stage(args: Any, model: torch.nn.Module) -> dict[str, Any]:
    runner = one_stage.Runner(args, model, args.micro_batch_size)
    parameters = list(model.parameters())
    received_bytes = sum(tensor.nbytes for tensor in runner.inputs if tensor is not None)
    with LiveBytes(META) as live:
        output = runner.forward()
    storages = capture.find([output.grad_fn], runner.inputs, META)
    of_model = {parameter.untyped_storage()._cdata for parameter in parameters}
    saved = [storage for storage in storages if storage.storage._cdata not in of_model]
    entry = {
        "micro_batch": args.micro_batch_size,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "saved_bytes": sum(storage.nbytes for storage in saved if storage.alone),
        "shared_bytes": sum(storage.nbytes for storage in saved if not storage.alone),
        "held_bytes": received_bytes + live.bytes_now,
        "sent_bytes": 0 if runner.last else output.nbytes,
        "moves_by_kind": _by_kind(saved, alone=True),
        "stays_by_kind": _by_kind(saved, alone=False),
        "hidden": dict(hiding([output.grad_fn])),
    }
    del storages, saved
    with live:
        runner.backward(output)
    return {**entry, "peak_bytes": received_bytes + live.most_bytes}


def _by_kind(saved: Sequence[capture.SavedStorage], *, alone: bool) -> dict[str, int]:
    """Return the bytes that kinds of autograd nodes saved, the largest first."""
    kinds: Counter[str] = Counter()
    for storage in saved:
        if storage.alone is alone:
            kinds[storage.kind] += storage.nbytes
    return dict(kinds.most_common(_MOST_KINDS))


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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        sys.exit(2)
