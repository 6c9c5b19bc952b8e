"""Turn Megatron's parsed arguments into one frozen configuration, or refuse with the reason. The only reader of Megatron's arguments.

In: an argparse parser, later its namespace. Out: `SchedulingConfig`. Knows no tensors and starts nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bpipe.generate.families import (
    DEFAULTS,
    FAMILIES,
    default,
    that_are_made_for_bounds,
    that_take_delays,
    that_take_groups,
    that_take_shards,
)
from bpipe.generate.family import UnitCosts
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import TextError, read_costs, read_numbers, read_share
from bpipe.models.layout import REDISTRIBUTE
from bpipe.program import BalanceConfig, ScheduleConfig, built
from bpipe.transport import AUTO, NAMES
from megatron.scheduling import upstream
from megatron.scheduling.choosing import balance_of, own_schedule, unplaced
from megatron.scheduling.placement import PLACEMENTS
from megatron.scheduling.positions import Positions
from megatron.scheduling.refusals import end_where, reasons, refuse
from megatron.scheduling.sizes import Sizes

# Megatron's --timing-log-level from which on our timers run: the one for what happens many times an iteration.
TIMERS_LEVEL = 2

# How the output layer may be split in training, and how that is scheduled.
SPLIT = {
    "1": "with everything else going on beside it",
    "2": "the same, with a micro-batch less on each rank, and what a shard gives back made before it is known exactly",
    "interlaced": "all ranks at once with nothing beside it",
}


@dataclass(frozen=True)
class SchedulingConfig:
    """What driver and hooks need to know, validated. `report` is a folder or None; a pipeline has `num_ranks` ranks of `num_chunks` chunks.

    `bounds`: the most micro-batches of a chunk that a balanced rank holds, one number for all or one for each, by default the fewest that
    all pairs can keep.
    `own` is what our own loop runs, each iteration with its own number of micro-batches; None where Megatron's loops run. Where it splits
    backwards, `keep_weights_halves` says of what W is put off.
    `report_iterations` are the first and the last to record, by default the third to the fifth that this program trains; `last_iteration`
    is the training's, where that is known. Every `metrics_interval` iterations Megatron's writers are told, every
    `timers_interval` our timers are printed as Megatron prints its own.
    `flops_per_microbatch` are the model's FLOPs of one micro-batch on every pipeline, by Megatron's own count; `logits_per_microbatch` are
    those of one rank's part of the vocabulary and of the sequence. `audit`: so many micro-batches of each chunk are compared.
    """

    balance: bool
    num_ranks: int
    num_chunks: int
    bounds: tuple[int, ...] | None = None
    own: ScheduleConfig | None = None
    keep_weights_halves: str = "linear"
    transport: str = AUTO
    timeout_s: float = 300.0
    message_timeout_s: float = 600.0
    minimum_bytes: int = 65536
    poison: bool = False
    synchronous: bool = False
    report: str | None = None
    report_iterations: tuple[int, int] | None = None
    last_iteration: int | None = None
    peak_tflops: float | None = None
    metrics_interval: int | None = None
    timers_interval: int | None = None
    flops_per_microbatch: float | None = None
    micro_batch_size: int | None = None
    logits_per_microbatch: int | None = None
    audit: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError where `own` says otherwise."""
        for name in ("num_ranks", "num_chunks") if self.own is not None else ():
            if getattr(self, name) != getattr(self.own, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but of the schedule in own {getattr(self.own, name)}: give both the same"
                )
        if self.own is not None and self.balance is not (self.own.balance is not None):
            raise ValueError(
                f"balance is {self.balance}, but own is a schedule {'with' if self.own.balance else 'without'} balance: give own a "
                "BalanceConfig() where activations are to move, and none where they are not"
            )

    @property
    def balancing(self) -> BalanceConfig | None:
        """How to balance, if at all."""
        return balance_of(self.balance, self.bounds)

    @property
    def active(self) -> bool:
        """Whether anything of Megatron is to be hooked at all."""
        return self.balance or self.own is not None or self.report is not None

    @property
    def positions(self) -> Positions:
        """Which process is which rank of the schedule."""
        return Positions(self.num_ranks, mirrored=(False,) * self.num_chunks) if self.own is None else Positions.of(self.own.layout)

    def first_schedule(self) -> Schedule:
        """Of as many micro-batches as `own` has, or as fill the pipeline: the pairs of all others are the same."""
        if self.own is not None:
            return built(self.own)
        name = default(self.num_chunks)
        full = FAMILIES[name].filling(self.num_ranks)
        return built(ScheduleConfig(name, self.num_ranks, full, self.num_chunks, self.balancing))

    def flops(self, num_microbatches: int) -> float | None:
        """The model's FLOPs of one iteration of the whole world."""
        return None if self.flops_per_microbatch is None else self.flops_per_microbatch * num_microbatches


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
        "--bpipe-schedule",
        default=None,
        metavar="NAME|FILE",
        help=f"The pipeline schedule: {', '.join(FAMILIES)}, or a file that `bpipe schedule --input` reads. By default what Megatron's "
        f"own loop runs: {DEFAULTS[0]}, with virtual stages {DEFAULTS[1]}. These two it goes on running; any other is run by a loop of "
        "our own. Works with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-group",
        type=_group,
        default=None,
        metavar="G|auto",
        help=f"Of {that_take_groups()} but Megatron's own: how many micro-batches go through a chunk before the next. auto: for "
        "--bpipe-bound chosen with the rest of the order, and without a bound the usual number.",
    )
    group.add_argument(
        "--bpipe-bound",
        type=_numbers,
        default=None,
        metavar="N|N,N,...",
        help="With --bpipe: the most micro-batches of a chunk that a rank holds, one number for all or one for each; only what must "
        "leaves. By default the fewest that all pairs of ranks can keep. "
        f"{that_are_made_for_bounds()} without a number as --bpipe-group has its order chosen for one that all have.",
    )
    group.add_argument(
        "--bpipe-kept",
        type=_share,
        default=None,
        metavar="W",
        help="Where a schedule splits backwards: the share of what a forward saved that is counted between the halves, such as 0.5; "
        "by default all of it.",
    )
    group.add_argument(
        "--bpipe-costs",
        type=_costs,
        default=None,
        metavar="F,I,W",
        help="Where a schedule splits backwards and is chosen among several: what a rank's forward and the halves of its backward of a "
        "micro-batch take, all its chunks together, such as 1,1.2,0.8; by default all alike.",
    )
    group.add_argument(
        "--bpipe-hop",
        type=_hop,
        default=None,
        metavar="H",
        help="What a message from one rank to the next takes, in the unit of --bpipe-costs; by default no time.",
    )
    group.add_argument(
        "--bpipe-delay",
        type=int,
        default=None,
        metavar="N",
        help=f"Of {that_take_delays()}: how many micro-batches' I stand before a W.",
    )
    group.add_argument(
        "--bpipe-vocabulary",
        choices=(*SPLIT, REDISTRIBUTE),
        default=None,
        help="Split the output layer over all ranks of the pipeline, which compute it between the last stage's forward and its backward: "
        f"{'; '.join(f'{name}, {what}' for name, what in SPLIT.items())}. Of {that_take_shards()}, run by our own loop. "
        f"{REDISTRIBUTE}: leave it whole, and give the last stage fewer layers, by a layout of Megatron's that is chosen from the sizes. "
        "By default the last stage computes it, and layers are where they are.",
    )
    group.add_argument(
        "--bpipe-executor",
        action="store_true",
        help="Run also what Megatron's own loop could by our loop. Changes no result.",
    )
    group.add_argument(
        "--bpipe-keep-weights-halves",
        choices=("linear", "none"),
        default=SchedulingConfig.keep_weights_halves,
        help="Where a schedule splits backwards, what it puts off: the weights' gradients of linear layers, or none, so that the whole "
        "backward runs at once.",
    )
    group.add_argument(
        "--bpipe-transport",
        choices=(AUTO, *NAMES),
        default=AUTO,
        help="How activations travel between the two ranks of a pair. nccl, gloo: both ranks send and receive. peer: the evictor alone "
        "copies, into memory of its partner on the same machine. host: into its own host memory. auto: whichever the pair's link "
        "measures best at the start.",
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
        default=None,
        metavar="SECONDS",
        help=f"A transfer that has not ended after this time ({SchedulingConfig.timeout_s:g} by default), or a message of our own loop (by "
        "default as long as Megatron waits for its own, --distributed-timeout-minutes), ends the run with an error that names it. On GPUs "
        "the host waits for none: there NCCL's watchdog ends the run, naming the process group, and copies of peer and host are not timed.",
    )
    group.add_argument(
        "--bpipe-min-bytes",
        type=int,
        default=SchedulingConfig.minimum_bytes,
        metavar="BYTES",
        help="Saved tensors smaller than this stay where they are: moving them costs more than it frees.",
    )
    group.add_argument(
        "--bpipe-poison",
        action="store_true",
        help="For debugging: fill memory with NaN before it is freed and before it is loaded into, so that a missing wait shows.",
    )
    group.add_argument(
        "--bpipe-sync-transfers",
        action="store_true",
        help="For measuring what overlap is worth: wait for every transfer where it is issued.",
    )
    group.add_argument(
        "--bpipe-report",
        metavar="DIR",
        default=None,
        help="Write what every stage really held, beside what the schedule predicted, each iteration's exact loss and gradient norm, "
        "and a record of some iterations for `bpipe report DIR`. Works with and without --bpipe.",
    )
    group.add_argument(
        "--bpipe-report-iterations",
        default=None,
        metavar="FIRST-LAST",
        help="The iterations to record action by action: a number, or two with a hyphen between. By default the third to the fifth that "
        "this program trains.",
    )
    group.add_argument(
        "--bpipe-peak-tflops",
        type=float,
        default=None,
        metavar="TFLOPS",
        help="What one device can do at most in dense 16-bit TFLOP/s, for the MFU. By default from a table of devices.",
    )
    group.add_argument(
        "--terra-audit",
        type=int,
        default=None,
        metavar="N",
        help="Before a CUDA graph: compare what N micro-batches of each chunk issue in the second iteration, forward and backward, and say "
        "in the log, a source line each, what a capture of the stage would freeze, lose or break on. Of Megatron's own loops. Changes no "
        "result.",
    )
    return parser


def _group(text: str) -> int | None:
    """None: chosen."""
    return None if text == "auto" else _microbatches(text, ", and not auto")


def _costs(text: str) -> UnitCosts:
    try:
        return UnitCosts(*read_costs(text, 3, 3))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, a forward and the halves of a backward, F,I,W") from None


def _hop(text: str) -> Fraction:
    try:
        return read_costs(text, 1, 1)[0]
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _microbatches(text: str, nor: str = "") -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of micro-batches{nor}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return read_numbers(text)
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> Fraction:
    try:
        return read_share(text, "share")
    except TextError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def config_from_args(args: Any) -> SchedulingConfig:
    """The configuration, once Megatron has validated its own arguments. Raises ValueError with one line a reason."""
    if not hasattr(args, "bpipe"):
        # Megatron gives what the file says instead of what was parsed, so nobody knows whether --bpipe was asked for.
        refuse(args, balance=True)
    upstream.require(args, "arguments")
    problems = list(_out_of_range(args))
    own = None
    try:
        own = own_schedule(args)
        problems += [] if own is None else unplaced(args, own)
    except ValueError as error:
        problems.append(str(error))
    if args.bpipe or own is not None or args.bpipe_report is not None:
        problems += reasons(args, args.bpipe, own is not None)
    problems += _audited(args, own is not None)
    end_where(problems)
    num_pipes = 1 if own is None else own.layout.num_pipes
    sizes = Sizes.of(args, num_pipes)
    writers = args.tensorboard_dir or args.wandb_project
    return SchedulingConfig(
        balance=args.bpipe,
        bounds=args.bpipe_bound,
        transport=args.bpipe_transport,
        timeout_s=SchedulingConfig.timeout_s if args.bpipe_timeout is None else args.bpipe_timeout,
        message_timeout_s=60.0 * args.distributed_timeout_minutes if args.bpipe_timeout is None else args.bpipe_timeout,
        minimum_bytes=args.bpipe_min_bytes,
        poison=args.bpipe_poison,
        synchronous=args.bpipe_sync_transfers,
        report=args.bpipe_report,
        num_ranks=sizes.num_ranks,
        num_chunks=sizes.num_chunks,
        own=own,
        keep_weights_halves=args.bpipe_keep_weights_halves,
        report_iterations=_iterations(args),
        last_iteration=_last_iteration(args),
        peak_tflops=args.bpipe_peak_tflops,
        metrics_interval=args.tensorboard_log_interval if writers else None,
        timers_interval=args.log_interval if args.timing_log_level >= TIMERS_LEVEL else None,
        flops_per_microbatch=_flops_per_microbatch(args, sizes) if args.bpipe_report is not None else None,
        micro_batch_size=args.micro_batch_size,
        logits_per_microbatch=_logits_per_microbatch(args),
        audit=args.terra_audit,
    )


def _audited(args: Any, own: bool) -> Iterator[str]:
    """A line for everything that `--terra-audit` cannot stand beside."""
    if args.terra_audit is None:
        return
    if args.terra_audit < 2:
        yield f"--terra-audit {args.terra_audit}: what changes from micro-batch to micro-batch needs 2 or more"
    ours = {"--bpipe": args.bpipe, "--bpipe-schedule": own, "--bpipe-report": args.bpipe_report is not None}
    for flag in (flag for flag, given in ours.items() if given):
        yield (
            f"--terra-audit with {flag}: what we issue around a stage would be taken for the stage's own; audit it in a run of one or two "
            f"iterations without {flag}, which computes the same"
        )


def _out_of_range(args: Any) -> Iterator[str]:
    """A line for every one of our flags whose value cannot be."""
    if args.bpipe_timeout is not None and args.bpipe_timeout <= 0:
        yield f"--bpipe-timeout {args.bpipe_timeout:g}: must be above 0 seconds"
    if args.bpipe_min_bytes < 1:
        yield f"--bpipe-min-bytes {args.bpipe_min_bytes}: must be at least 1"
    if args.bpipe_peak_tflops is not None and args.bpipe_peak_tflops <= 0:
        yield f"--bpipe-peak-tflops {args.bpipe_peak_tflops:g}: must be above 0"
    if args.bpipe:
        # Not at the top: who only reads the flags needs no torch.
        from bpipe.transport.connect import candidates
        from megatron.scheduling import startup

        try:
            candidates(args.bpipe_transport, startup.device_type())
        except ValueError as error:
            yield str(error)
    chosen, end = _iterations(args), _last_iteration(args)
    if chosen is not None and not 1 <= chosen[0] <= chosen[1]:
        yield f"--bpipe-report-iterations {args.bpipe_report_iterations}: must be a number or two with a hyphen, such as 3-5"
    elif chosen is not None and end is not None and chosen[1] > end:
        yield f"--bpipe-report-iterations {args.bpipe_report_iterations}: the training ends with iteration {end}; choose from 1-{end}"


def _iterations(args: Any) -> tuple[int, int] | None:
    """The first and the last iteration to record; (0, 0) where the text names none, None where there is no text."""
    if args.bpipe_report_iterations is None:
        return None
    chosen = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", args.bpipe_report_iterations)
    return (int(chosen[1]), int(chosen[2] or chosen[1])) if chosen else (0, 0)


def _last_iteration(args: Any) -> int | None:
    """The training's, where its length is given in iterations; one given in samples may have batches of several sizes."""
    return args.train_iters or None


def _logits_per_microbatch(args: Any) -> int | None:
    if args.padded_vocab_size is None or args.seq_length is None:
        return None
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    shards = args.pipeline_model_parallel_size if args.bpipe_vocabulary in SPLIT else 1
    return int(tokens * args.padded_vocab_size // (args.tensor_model_parallel_size * shards))


def _flops_per_microbatch(args: Any, sizes: Sizes) -> float | None:
    if args.padded_vocab_size is None:
        # No tokenizer yet, so nothing will train: the arguments are only being looked at.
        return None
    # Not at the top: the CPU stand-in has to come before Megatron.
    from megatron.training.training import num_floating_point_operations

    return float(num_floating_point_operations(args, args.micro_batch_size * sizes.num_replicas))
