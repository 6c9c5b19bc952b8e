"""Turn Megatron's parsed arguments into one frozen configuration, or refuse with the reason. The only reader of Megatron's arguments.

In: an argparse parser, later its namespace. Out: `SchedulingConfig`. Knows no tensors and starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.scheduling.placement import PLACEMENTS

TRANSPORTS = ("auto", "nccl", "gloo")


@dataclass(frozen=True)
class SchedulingConfig:
    """What the hooks need to know, validated. `report` is a folder or None; a pipeline has `num_ranks` ranks of `num_chunks` chunks."""

    balance: bool
    transport: str
    timeout_s: float
    minimum_bytes: int
    poison: bool
    report: str | None
    num_ranks: int
    num_chunks: int

    @property
    def active(self) -> bool:
        """Whether anything of Megatron is to be hooked at all."""
        return self.balance or self.report is not None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our group of flags; give this to Megatron as its `extra_args_provider`."""
    group = parser.add_argument_group("bpipe", "memory-balanced pipeline parallelism")
    group.add_argument(
        "--bpipe",
        action="store_true",
        help="Balance activation memory over the pipeline stages: early stages send activations of some micro-batches "
        "to their partner stage and take them back before their backward pass. Changes no result.",
    )
    group.add_argument(
        "--bpipe-transport",
        choices=TRANSPORTS,
        default="auto",
        help="How activations travel between the two ranks of a pair. auto: nccl between GPUs, gloo between CPUs.",
    )
    group.add_argument(
        "--bpipe-placement",
        choices=PLACEMENTS,
        default="adjacent",
        help="adjacent: the two stages of a pair take GPUs of one node where they can. none: Megatron's own rank order.",
    )
    group.add_argument(
        "--bpipe-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="A transfer that has not ended after this time ends the run with an error that names it.",
    )
    group.add_argument(
        "--bpipe-min-bytes",
        type=int,
        default=65536,
        metavar="BYTES",
        help="Saved tensors smaller than this stay where they are: moving them costs more than it frees.",
    )
    group.add_argument(
        "--bpipe-poison",
        action="store_true",
        help="For debugging: fill memory with NaN before it is freed and before it is loaded into, so that a missing wait shows.",
    )
    group.add_argument(
        "--bpipe-report",
        metavar="DIR",
        default=None,
        help="Write what every stage really held, beside what the schedule predicted, and each iteration's exact loss and "
        "gradient norm. Works with and without --bpipe.",
    )
    return parser


@dataclass(frozen=True)
class Refusal:
    """Something of Megatron's that `--bpipe` cannot do yet: its name in the documentation, when it applies, why, and the way out."""

    feature: str
    applies: Callable[[Any], bool]
    reason: str
    remedy: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "interleaving with another micro-batch group",
        lambda a: a.virtual_pipeline_model_parallel_size is not None and _other_group(a),
        "interleaved 1F1B is balanced for groups of as many micro-batches as there are stages",
        "drop --microbatch-group-size-per-virtual-pipeline-stage",
    ),
    Refusal(
        "CUDA graphs",
        lambda a: a.cuda_graph_impl != "none",
        "CUDA graphs fix the addresses of activations, which move",
        "use --cuda-graph-impl none",
    ),
    Refusal(
        "FP8 and FP4",
        lambda a: a.fp8 is not None or a.fp4 is not None,
        "FP8 and FP4 keep state beside activations",
        "drop --fp8-format / --fp4-format",
    ),
    Refusal(
        "activation offloading",
        lambda a: a.cpu_offloading_num_layers > 0 or a.fine_grained_activation_offloading,
        "activation offloading moves the same tensors",
        "drop --cpu-offloading-num-layers / --fine-grained-activation-offloading",
    ),
    Refusal(
        "combined 1F1B",
        lambda a: a.overlap_moe_expert_parallel_comm,
        "the combined 1F1B schedule runs other steps",
        "drop --overlap-moe-expert-parallel-comm",
    ),
    Refusal("paged stash", lambda a: a.moe_paged_stash, "paged stash runs a step again", "drop --moe-paged-stash"),
    Refusal(
        "mixture of experts",
        lambda a: a.num_experts is not None,
        "mixture-of-experts saves a different size for every micro-batch, which is not supported yet",
        "drop --num-experts",
    ),
    Refusal(
        "variable sequence lengths",
        lambda a: a.variable_seq_lengths,
        "micro-batches of differing length are not supported yet",
        "leave variable_seq_lengths at False",
    ),
    Refusal(
        "distributed saved activations",
        lambda a: a.distribute_saved_activations,
        "saved activations already distributed over tensor-parallel ranks live in a shared buffer",
        "drop --distribute-saved-activations",
    ),
    Refusal(
        "FSDP",
        lambda a: a.use_megatron_fsdp or a.use_torch_fsdp2,
        "FSDP frees parameters that saved tensors share",
        "drop --use-megatron-fsdp / --use-torch-fsdp2",
    ),
    Refusal(
        "in-process restart",
        lambda a: a.inprocess_restart,
        "an in-process restart cannot rebuild the pairs' process groups",
        "drop --inprocess-restart",
    ),
    Refusal(
        "partial recomputation of micro-batches",
        lambda a: a.recompute_num_layers is not None and a.pipeline_model_parallel_size > 1 and _partial_recompute(a),
        "recomputation that differs between micro-batches saves differing sizes",
        "leave num_microbatches_with_partial_activation_checkpoints unset",
    ),
)


def _other_group(args: Any) -> bool:
    return args.microbatch_group_size_per_vp_stage not in (None, args.pipeline_model_parallel_size)


def _partial_recompute(args: Any) -> bool:
    return getattr(args, "num_microbatches_with_partial_activation_checkpoints", None) is not None


def config_from_args(args: Any) -> SchedulingConfig:
    """The configuration, once Megatron has validated its own arguments. Raises ValueError with one line a reason."""
    problems = []
    if args.bpipe_timeout <= 0:
        problems.append(f"--bpipe-timeout {args.bpipe_timeout:g}: must be above 0 seconds")
    if args.bpipe_min_bytes < 1:
        problems.append(f"--bpipe-min-bytes {args.bpipe_min_bytes}: must be at least 1")
    wanted = "--bpipe" if args.bpipe else "--bpipe-report"
    if args.bpipe or args.bpipe_report is not None:
        problems += [f"{wanted}: {refusal.reason}; {refusal.remedy}" for refusal in REFUSALS if refusal.applies(args)]
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
    return SchedulingConfig(
        balance=args.bpipe,
        transport=args.bpipe_transport,
        timeout_s=args.bpipe_timeout,
        minimum_bytes=args.bpipe_min_bytes,
        poison=args.bpipe_poison,
        report=args.bpipe_report,
        num_ranks=args.pipeline_model_parallel_size,
        num_chunks=args.virtual_pipeline_model_parallel_size or 1,
    )
