"""Turn Megatron's parsed arguments, with ours, into one frozen configuration, or refuse them with the reasons."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, built
from bpipe.config.features.queries import guarded, reasons
from bpipe.config.features.table import Settings, has_experts
from bpipe.config.flags.values import MemoryBudget
from bpipe.schedule.families.families import (
    FAMILIES,
    default_family,
)
from bpipe.schedule.layout import EVEN, SliceLengths, Vocabulary
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs
from bpipe.transport.config import FIELD_OF_FLAG, TransferConfig
from megatron.scheduling.options.flags import Sizes
from megatron.scheduling.options.schedule_choice import Requested, requested, unplaced, vocabulary_of
from megatron.scheduling.placement.positions import Positions

# Fields that need Megatron's own trainer: why, and what to do instead in a loop of one's own.
_BY_LAUNCHER = "launch a script that calls Megatron's pretrain with python -m megatron.scheduling.launch and"
_OF_REPORT = f"a record is written around Megatron's train_step: {_BY_LAUNCHER} --bpipe-report"
BY_TRAINER = {
    "report": _OF_REPORT,
    "report_iterations": _OF_REPORT,
    "peak_tflops": _OF_REPORT,
    "memory": "a budget is planned from Megatron's arguments and learned around its train_step: give "
    f"balance=BalanceConfig(...), as planned by `bpipe simulate --memory`, or {_BY_LAUNCHER} --bpipe-memory",
    "costs": f"they are for a learned budget: leave them out, or {_BY_LAUNCHER} --bpipe-memory --bpipe-cluster",
}


@dataclass(frozen=True)
class SchedulingConfig:
    """Validated settings of driver and hooks."""

    num_ranks: int
    """Ranks of a pipeline."""

    num_chunks: int = 1
    """Stages of each rank."""

    balance: BalanceConfig | None = None
    """How activations move, None if none do; a schedule in `own` says it itself."""

    own: ScheduleConfig | None = None
    """Schedule of our own loop, each iteration with its own number of micro-batches; None if Megatron's loops run."""

    transfers: TransferConfig = TransferConfig()
    """How activations travel. A model's configuration may also say that micro-batches differ in size."""

    plan: tuple[str, ...] = ()
    """Lines that explain the balance."""

    memory: MemoryBudget | None = None
    """The budget, if there is one."""

    costs: Costs | None = None
    """Costs of a plan in time, once the budget's bytes are measured."""

    keep_weights_halves: str = "linear"
    """Layers whose W of a split backward is deferred: "linear" or "none"."""

    message_timeout_s: float = 600.0
    """Seconds after which a message between stages of our own loop is given up."""

    strict: bool = False
    """Whether guarded features are refused."""

    guarded: tuple[str, ...] = ()
    """Guarded features that Megatron's arguments ask for."""

    slice_lengths: SliceLengths = EVEN
    """How long the slices are into which `own` cuts micro-batches."""

    report: str | None = None
    """Folder of the record, if one is written."""

    report_iterations: tuple[int, int] | None = None
    """First and last iteration to record; by default the third to the fifth that this program trains."""

    last_iteration: int | None = None
    """The training's last, if known."""

    peak_tflops: float | None = None
    """Peak of one device, for the MFU; by default from a table of devices."""

    flops_per_microbatch: float | None = None
    """FLOPs of the model for one micro-batch on every pipeline, by Megatron's own count."""

    micro_batch_size: int | None = None
    """Samples of a micro-batch."""

    logits_per_microbatch: int | None = None
    """Logits of one rank's part of the vocabulary and of the sequence."""

    def __post_init__(self) -> None:
        """Take the balance of `own`. Raises ValueError if `own` contradicts another field."""
        if self.own is None:
            return
        for name in ("num_ranks", "num_chunks"):
            if getattr(self, name) != getattr(self.own, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but {getattr(self.own, name)} in the schedule given as own: "
                    "give both the same"
                )
        if self.balance not in (None, self.own.balance):
            raise ValueError(
                "balance is given in the configuration, but own is a schedule with another balance or none: give it "
                "in own only"
            )
        object.__setattr__(self, "balance", self.own.balance)

    @property
    def active(self) -> bool:
        """Whether anything of Megatron is to be hooked at all."""
        return any((self.balance, self.own, self.report is not None))

    @property
    def positions(self) -> Positions:
        """The process of each rank of the schedule."""
        return (
            Positions(self.num_ranks, mirrored=(False,) * self.num_chunks)
            if self.own is None
            else Positions.of(self.own.layout)
        )

    def first_schedule(self) -> Schedule:
        """Return the schedule of `own`, or Megatron's with a full pipeline, which has the pairs of all others."""
        if self.own is not None:
            return built(self.own)
        name = default_family(self.num_chunks)
        full = FAMILIES[name].filling(self.num_ranks)
        return built(ScheduleConfig(name, self.num_ranks, full, num_chunks=self.num_chunks, balance=self.balance))

    def flops(self, num_microbatches: int) -> float | None:
        """Return the model's FLOPs of one iteration of the whole world."""
        return None if self.flops_per_microbatch is None else self.flops_per_microbatch * num_microbatches


def config_from_args(args: Any) -> SchedulingConfig:
    """Return the configuration of arguments that Megatron has validated. Raises ValueError with a line per reason."""
    if not hasattr(args, "bpipe"):
        # Megatron returns a YAML file's values instead of what was parsed, so --bpipe may have been given or not.
        refuse(args, balance=True)
    asked = _asked(args)
    own = asked.own
    sizes = Sizes.of(args, 1 if own is None else own.layout.num_pipes)
    differing = differ(args) or slices_differ(args, 1 if own is None else own.slices)
    values = {name: vars(args)[flag[2:].replace("-", "_")] for flag, name in FIELD_OF_FLAG.items()}
    transfers = TransferConfig(**{name: value for name, value in values.items() if value is not None})
    return SchedulingConfig(
        balance=asked.config.balance,
        plan=asked.plan.lines,
        memory=args.bpipe_memory,
        costs=asked.plan.costs,
        transfers=replace(transfers, differing=transfers.differing or differing),
        message_timeout_s=args.bpipe_timeout or 60.0 * args.distributed_timeout_minutes,
        guarded=tuple(feature.name for feature in guarded(args, args.bpipe, own is not None)),
        strict=args.bpipe_strict,
        slice_lengths=args.bpipe_slice_lengths,
        report=args.bpipe_report,
        num_ranks=sizes.num_ranks,
        num_chunks=sizes.num_chunks,
        own=own,
        keep_weights_halves=args.bpipe_keep_weights_halves,
        report_iterations=_iterations(args),
        # Unknown if the length is given in samples, as batches may have several sizes.
        last_iteration=args.train_iters or None,
        peak_tflops=args.bpipe_peak_tflops,
        flops_per_microbatch=_flops_per_microbatch(args, sizes) if args.bpipe_report is not None else None,
        micro_batch_size=args.micro_batch_size,
        logits_per_microbatch=_logits_per_microbatch(args),
    )


def _asked(args: Any) -> Requested:
    """Return the schedule that is asked for. Raises ValueError with everything that prevents it."""
    problems, asked, own_loop = list(_out_of_range(args)), None, False
    try:
        asked = requested(args)
        own_loop = asked.own_loop
        problems += unplaced(args, asked.config) if own_loop else []
    except ValueError as error:
        problems.append(str(error))
    if args.bpipe or own_loop or args.bpipe_report is not None:
        problems += reasons(args, args.bpipe, own_loop, args.bpipe_strict)
    end_where(problems)
    assert asked is not None
    return asked


def _out_of_range(args: Any) -> Iterator[str]:
    """Yield the flags of ours that have an impossible value."""
    if args.bpipe:
        # Not at the top: reading the flags needs no torch.
        from bpipe.transport.connect import candidates
        from megatron.scheduling.start import startup

        try:
            candidates(args.bpipe_transport, startup.device_type())
        except ValueError as error:
            yield str(error)
    chosen, end = _iterations(args), args.train_iters or None
    if chosen is not None and not 1 <= chosen[0] <= chosen[1]:
        yield (
            f"--bpipe-report-iterations {args.bpipe_report_iterations}: must be one number, or two with a hyphen, "
            "such as 3-5"
        )
    elif chosen is not None and end is not None and chosen[1] > end:
        yield (
            f"--bpipe-report-iterations {args.bpipe_report_iterations}: the training ends with iteration {end}; "
            f"choose from 1-{end}"
        )


def _iterations(args: Any) -> tuple[int, int] | None:
    """Return the first and the last iteration to record; (0, 0) for a text that names none, None without a text."""
    if args.bpipe_report_iterations is None:
        return None
    chosen = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", args.bpipe_report_iterations)
    return (int(chosen[1]), int(chosen[2] or chosen[1])) if chosen else (0, 0)


def _logits_per_microbatch(args: Any) -> int | None:
    if args.padded_vocab_size is None or args.seq_length is None:
        return None
    tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    shards = 1 if vocabulary_of(args) is Vocabulary.WHOLE else args.pipeline_model_parallel_size
    return int(tokens * args.padded_vocab_size // (args.tensor_model_parallel_size * shards))


def _flops_per_microbatch(args: Any, sizes: Sizes) -> float | None:
    if args.padded_vocab_size is None:
        # Without a tokenizer nothing will train.
        return None
    # Not at the top: the CPU stand-in has to come before Megatron.
    from megatron.training.training import num_floating_point_operations

    return float(num_floating_point_operations(args, args.micro_batch_size * sizes.num_replicas))


# Settings with which micro-batches of one stage save differing sizes: by the router's choices, packing, lengths of
# sequences, and which micro-batches recompute or offload.
_DIFFERING: tuple[Callable[[Settings], object], ...] = (
    lambda s: has_experts(s) and not s.moe_pad_expert_input_to_capacity,
    lambda s: s.sft or s.dataloader_inter_document_masking,
    lambda s: s.variable_seq_lengths,
    lambda s: s.num_microbatches_with_partial_activation_checkpoints is not None,
    # Groups whose backward comes soon stay on the device.
    lambda s: s.fine_grained_activation_offloading,
)


def differ(settings: object) -> bool:
    """Whether micro-batches of one stage may save differing sizes by these settings."""
    return any(applies(Settings(settings)) for applies in _DIFFERING)


def slices_differ(settings: object, slices: int) -> bool:
    """Whether slices of one stage save differing sizes: by their lengths, or by unfused scores of ever more keys."""
    even = getattr(settings, "bpipe_slice_lengths", EVEN) == EVEN
    s = Settings(settings)
    # By default, Megatron's selective recomputation is that of attention.
    selective = s.recompute_granularity == "selective" and "core_attn" in (s.recompute_modules or ("core_attn",))
    again = s.recompute_granularity == "full" or selective
    # The length of a slice is a multiple of the ranks that share it.
    unit = (s.tensor_model_parallel_size or 1) if s.sequence_parallel else 1
    return slices > 1 and (
        not even or bool((s.seq_length or 0) % (slices * unit)) or (s.transformer_impl == "local" and not again)
    )


def refuse(settings: object, balance: bool, executor: bool = False, strict: bool = False) -> None:
    """Raise ValueError with every reason against these arguments, or a model's configuration, which may set more."""
    problems = reasons(settings, balance, executor, strict)
    # Only a training with a session loads this module.
    guards = sys.modules.get("terra.run.guards")
    if balance and guards is not None and guards.is_any_open():
        problems.append(
            "a terra.Session is open: under it a stage saves placeholders without the memory that --bpipe would "
            "move; close the session, or train without --bpipe"
        )
    end_where(problems)


def end_where(problems: Sequence[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if problems:
        raise ValueError("\n  ".join(["this run cannot start:", *problems]))
