"""Say what every stage of a launch holds, by Megatron's own model at true size, without memory.

In: a training's flags. Out: JSON on stdout.

    python -m megatron.scheduling.trace.stages <flags of pretrain_gpt.py> [--trace-attention unfused]

`bpipe trace` starts this and reads it. The stages are those of the first rank of each place in the pipeline, built by
the trainer's builder and wrapped as the trainer wraps them, on torch's meta device; the other ranks are not there, and
no number is computed. What is saved is what `bpipe.runtime.capture` finds, as in a training. Transformer Engine's
modules cannot be built without a GPU: Megatron's own stand in their place, with the shapes of memory of fused kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bpipe.runtime import capture
from bpipe.runtime.graph import hiding
from megatron.scheduling.hooks import upstream
from megatron.scheduling.record import one_stage
from megatron.scheduling.start import startup
from megatron.scheduling.trace import routing, stand_in
from megatron.scheduling.trace.live_bytes import LiveBytes

# What of a launch a machine without a GPU cannot build, and what takes its place here.
_WITHOUT_GPU = ("--transformer-impl", "local")
# Megatron writes its choice there, and ends where it finds another.
_CHOSEN_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
# What begins or ends between a norm and a matrix.
_BESIDE_NORMS = ("layernorm", "mla_up_proj", "mlp")
# How many kinds of nodes are listed of a stage.
_MOST_KINDS = 12


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    from megatron.scheduling.options import flags

    group = flags.add_arguments(parser).add_argument_group("trace")
    group.add_argument("--trace-attention", choices=("flash", "unfused"), default="flash", help="shape of the core")
    return parser


def _parse(flags: Sequence[str]) -> Any:
    with _refusing():
        return one_stage.parse([*flags, *_WITHOUT_GPU], _add_arguments, _fit)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise ValueError for what Megatron does not parse or build here."""
    try:
        yield
    except (AssertionError, ImportError) as error:
        # Not every check of Megatron's has a message; the line that failed says as much.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(f"without a GPU Megatron refuses this launch: {reason}") from error


def _fit(args: Any) -> None:
    """Leave out what is not of the model, and refuse what cannot be traced."""
    upstream.require(args, "stages")
    for name, value, why in (
        (
            "--hybrid-layer-pattern",
            args.hybrid_layer_pattern,
            "Mamba layers run only with mamba_ssm's GPU kernels",
        ),
        ("--fp8-format", args.fp8, "FP8 needs Transformer Engine"),
        ("--fp4-format", args.fp4, "FP4 needs Transformer Engine"),
        ("--bpipe-vocabulary", args.bpipe_vocabulary, "shards of the output layer have their own passes"),
        *_of_layers(args),
        *_of_experts(args),
        *_of_context(args),
    ):
        if value:
            raise ValueError(f"{name} {value}: {why}: use `bpipe simulate`, whose formulas cover it")
    # Kernels of Transformer Engine's; torch's lists of who goes where are as large.
    args.moe_permute_fusion = args.moe_router_fusion = False
    # One replica is enough, and its micro-batches need not fill the pipeline.
    args.global_batch_size = None
    args.perform_initialization = False


def _of_layers(args: Any) -> tuple[tuple[str, object, str], ...]:
    """Return what Megatron's own layers have otherwise than Transformer Engine's, likewise."""
    again = [one for one in args.recompute_modules or () if one in _BESIDE_NORMS]
    unlike = args.multi_latent_attention and args.v_head_dim != args.qk_head_dim + args.qk_pos_emb_head_dim
    return (
        (
            "--recompute-modules",
            " ".join(again),
            "Transformer Engine has a norm and the matrix after it in one layer, Megatron in two",
        ),
        (
            "--v-head-dim",
            (unlike and args.trace_attention == "unfused") * args.v_head_dim,
            "Megatron's own attention needs values as wide as keys",
        ),
    )


def _of_experts(args: Any) -> tuple[tuple[str, object, str], ...]:
    """Return what experts cannot have here: flag, value, why."""
    dispatcher, again = args.moe_token_dispatcher_type, args.recompute_modules or ()
    return (
        (
            "--moe-token-dispatcher-type",
            dispatcher * (dispatcher == "flex"),
            "its kernels come from DeepEP or HybridEP",
        ),
        (
            "--recompute-modules",
            "moe_act" * ("moe_act" in again),
            "only Transformer Engine's grouped experts have it",
        ),
        (
            "--moe-router-load-balancing-type",
            "sinkhorn" * ("sinkhorn" in args.moe_router_load_balancing_type),
            "it iterates until scores agree, and a trace has no scores",
        ),
    )


def _of_context(args: Any) -> tuple[tuple[str, object, str], ...]:
    """Return what context parallelism cannot have here, likewise."""
    if args.context_parallel_size == 1:
        return ()
    kinds = " ".join(sorted({*args.cp_comm_type} - {"p2p"}))
    unfused = args.context_parallel_size * (args.trace_attention == "unfused")
    return (
        ("--cp-comm-type", kinds, "Transformer Engine chooses which copies attention keeps"),
        ("--context-parallel-size", unfused, "Megatron's own attention does not take parts of a sequence"),
    )


def prepare() -> None:
    """Make this process ready to trace. Must be called before `megatron.core` is imported."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    stand_in.install()
    startup.prepare()
    stand_in.shape_modules()
    routing.route_evenly()


def trace(flags: Sequence[str]) -> dict[str, Any]:
    """Return an entry for every stage of the launch with these flags, in the pipeline's order, and what was traced.

    Raises ValueError for what cannot be traced.
    """
    for name in _CHOSEN_ATTENTION:
        os.environ.pop(name, None)
    args = _parse(flags)
    stand_in.shape_attention(args.trace_attention)
    with _refusing():
        return _traced(args)


def main(flags: Sequence[str]) -> None:
    """Trace all stages and print them."""
    with contextlib.redirect_stdout(io.StringIO()):
        prepare()
        document = trace(flags)
    print(json.dumps(document))


def _traced(args: Any) -> dict[str, Any]:
    by_stage: dict[int, dict[str, Any]] = {}
    num_ranks = args.pipeline_model_parallel_size
    for place in range(num_ranks):
        with one_stage.chunks(args, place) as models:
            for chunk, model in enumerate(models):
                by_stage[chunk * num_ranks + place] = _stage(args, model)
    return {"stages": [by_stage[stage] for stage in sorted(by_stage)], "measured": _described(args)}


def _stage(args: Any, model: torch.nn.Module) -> dict[str, Any]:
    runner = one_stage.Runner(args, model, args.micro_batch_size)
    parameters = list(model.parameters())
    given_bytes = sum(one.nbytes for one in runner.inputs if one is not None)
    with LiveBytes(stand_in.META) as live:
        output = runner.forward()
    found = capture.find([output.grad_fn], runner.inputs, stand_in.META)
    of_model = {one.untyped_storage()._cdata for one in parameters}
    saved = [one for one in found if one.storage._cdata not in of_model]
    entry = {
        "micro_batch": args.micro_batch_size,
        "parameters": sum(one.numel() for one in parameters),
        "saved_bytes": sum(one.nbytes for one in saved if one.alone),
        "shared_bytes": sum(one.nbytes for one in saved if not one.alone),
        "held_bytes": given_bytes + live.bytes_now,
        "sent_bytes": 0 if runner.last else output.nbytes,
        "moves_by_kind": _by_kind(saved, alone=True),
        "stays_by_kind": _by_kind(saved, alone=False),
        "hidden": dict(hiding([output.grad_fn])),
    }
    del found, saved
    with live:
        runner.backward(output)
    return {**entry, "peak_bytes": given_bytes + live.most_bytes}


def _by_kind(saved: Sequence[capture.SavedStorage], *, alone: bool) -> dict[str, int]:
    """Return the bytes that kinds of autograd nodes saved, the most first."""
    kinds: Counter[str] = Counter()
    for one in saved:
        if one.alone is alone:
            kinds[one.kind] += one.nbytes
    return dict(kinds.most_common(_MOST_KINDS))


def _described(args: Any) -> dict[str, Any]:
    """Return facts of the trace: readers refuse it for setups that differ in them."""
    return {
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "tensor": args.tensor_model_parallel_size,
        "sequence": args.seq_length,
        "attention": args.trace_attention,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"bpipe: error: {error}", file=sys.stderr)
        sys.exit(2)
