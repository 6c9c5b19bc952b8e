"""Find what every stage of a launch holds, by Megatron's own model at true size, without memory.

    python -m megatron.scheduling.trace.stages <flags of pretrain_gpt.py> [--trace-attention unfused]

`bpipe trace` starts this and reads the JSON that it prints. The stages are those of the first rank of each place in the
pipeline, made by the trainer's builder with the trainer's wrappers on torch's meta device. The other ranks do not exist,
and no number is computed. Saved tensors are found by `bpipe.runtime.capture`, as in a training. Transformer Engine's
modules cannot be built without a GPU, so Megatron's own replace them, with the memory of fused kernels.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bpipe.runtime import capture
from bpipe.runtime.graph import hiding
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup
from megatron.scheduling.trace import stand_in

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
    stand_in.install()
    startup.prepare()
    stand_in.shape_modules()
    stand_in.route_evenly()


def trace(flags: Sequence[str]) -> dict[str, Any]:
    """Return an entry for every stage of the launch with these flags, in order, and what was traced.

    Raises ValueError for what cannot be traced.
    """
    for name in _CHOSEN_ATTENTION:
        os.environ.pop(name, None)
    by_stage: dict[int, dict[str, Any]] = {}
    with one_stage.refusing("without a GPU Megatron refuses this launch"):
        args = one_stage.parse([*flags, *_WITHOUT_GPU], _add_arguments, _fit)
        stand_in.shape_attention(args.trace_attention)
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
    with LiveBytes(stand_in.META) as live:
        output = runner.forward()
    storages = capture.find([output.grad_fn], runner.inputs, stand_in.META)
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


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        sys.exit(2)
