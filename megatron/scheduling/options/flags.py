"""Declare our flags to Megatron's parser, and set Megatron's arguments that follow from the schedule of a run, before
Megatron validates them.

Two pipes in opposite directions over p ranks, with v stages per rank each, are to Megatron pipelines of p/2 ranks with
2v virtual stages, and twice as many replicas: ranks i and p-1-i have the same stages and are neighbours in data
parallelism, so Megatron itself handles gradients, norms, the optimizer, samples and checkpoints of both. Imports no
torch and no Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bpipe.config.features.table import Settings
from bpipe.config.flags.flag import declare
from bpipe.config.flags.trainer import TRAINER
from bpipe.names import unknown
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.unit_grid import align, is_listing
from bpipe.schedule.files.document import read_file
from bpipe.schedule.files.text import NAME
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.hooks import upstream
from megatron.scheduling.placement.positions import Positions


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our groups of flags; give this to Megatron as its `extra_args_provider`."""
    for group in TRAINER:
        to = parser.add_argument_group(f"bpipe: {group.title}", "memory-balanced pipeline parallelism")
        for flag in group.flags:
            declare(to, flag.of_launch)
    return parser


def complete(args: Any) -> None:
    """Set the virtual stages of a schedule with a fixed number of them, and what its stages and pipes need.

    Call it before Megatron's `validate_args`, and after arguments were taken from a checkpoint. Raises ValueError for a
    schedule that does not exist, and for stages that this model does not have.
    """
    # A YAML configuration replaces the command line, and ours with it; it is refused later.
    if getattr(args, "bpipe_vocabulary", None) is not None:
        _file_by_layer(args)
    name = getattr(args, "bpipe_schedule", None)
    if name is None:
        return
    num_pipes = FAMILIES[name].num_pipes if name in FAMILIES else of_file(name).layout.num_pipes
    try:
        share(args, num_pipes)
        layout = _layout(name, args.pipeline_model_parallel_size * num_pipes)
        if layout is not None:
            follow(args, Positions.of(layout))
    except ValueError as error:
        raise ValueError(f"--bpipe-schedule {name}: {error}") from None


def _layout(name: str, num_ranks: int) -> Layout | None:
    """Return the placement of stages; None if a rank may have any number of chunks, which then go round the ranks."""
    if name not in FAMILIES:
        # A file that does not fit the run is refused later, when all sizes are known.
        return of_file(name).layout
    family = FAMILIES[name]
    # Two pipes need the same with any number of chunks; without one, a rank has the fewest.
    is_fixed = family.min_chunks == family.max_chunks or family.num_pipes > 1
    return family.layout(num_ranks, family.min_chunks) if is_fixed else None


def follow(args: Any, positions: Positions) -> None:
    """Set what these stages need. Raises ValueError for a model or a pipeline that cannot have them."""
    num_ranks, num_chunks = args.pipeline_model_parallel_size, len(positions.mirrored)
    if num_chunks > 1:
        if num_ranks < 2:
            raise ValueError(
                "a pipeline of one rank has nothing to pass on: use --pipeline-model-parallel-size 2 or more"
            )
        # A checkpoint has the virtual stages of the run that saved it.
        if args.use_mp_args_from_checkpoint_args:
            args.num_layers_per_virtual_pipeline_stage = None
        pattern = Settings(args).hybrid_layer_pattern
        if pattern:
            # Megatron takes the number of a hybrid model's stages from its pattern; what follows a / predicts further
            # tokens.
            num_stages, num_segments = num_ranks * num_chunks, len(pattern.split("/")[0].split("|"))
            if num_segments != num_stages:
                raise ValueError(
                    f"--hybrid-layer-pattern {pattern} has {num_segments} stages, but the schedule has {num_stages}: "
                    f"separate the layers with {num_stages - 1} |"
                )
        elif args.num_layers_per_virtual_pipeline_stage is None and args.pipeline_model_parallel_layout is None:
            if args.num_virtual_stages_per_pipeline_rank is None:
                args.num_virtual_stages_per_pipeline_rank = num_chunks
            _need_equal_stages(args, num_ranks * args.num_virtual_stages_per_pipeline_rank)
        if num_ranks == 2:
            # Megatron requires it of its interleaved loop between two ranks, which does not run.
            args.overlap_p2p_comm = True
    if not positions.native:
        _file_by_layer(args)


def _file_by_layer(args: Any) -> None:
    """Let the distributed optimizer save by layer: in its buffers, other ranks have other layers."""
    if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        args.dist_ckpt_optim_fully_reshardable = True
        upstream.remark(
            "the distributed optimizer's state is saved by layer, as with --dist-ckpt-optim-fully-reshardable"
        )


def _need_equal_stages(args: Any, num_stages: int) -> None:
    """Raise ValueError for layers that do not divide: Megatron would fail an assertion while it builds."""
    if args.num_layers is None or args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers:
        return
    extra = bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
    whole, rest = divmod(args.num_layers + extra, num_stages)
    if rest:
        nearest = " or ".join(str(count * num_stages - extra) for count in (whole, whole + 1) if count)
        raise ValueError(
            f"{args.num_layers} layers cannot be divided into {num_stages} equal stages: use --num-layers {nearest}, "
            "or assign layers to stages with --pipeline-model-parallel-layout"
        )


@lru_cache(maxsize=1)
def of_file(name: str) -> Schedule:
    """Return the schedule of a file, on the grid. Raises ValueError if there is none or it cannot be read.

    Torch prints some of its schedules, such as DualPipeV, as orders only, which is enough to train.
    """
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"--bpipe-schedule {name}: {unknown('schedule', name, FAMILIES)}; nor is there a file of that name"
        )
    try:
        schedule = read_file(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--bpipe-schedule {error}") from None
    if is_listing(schedule):
        try:
            schedule = align(schedule)
        except ValueError as error:
            raise ValueError(f"--bpipe-schedule {name}: {error}") from None
    # A plain CSV has no name.
    nameless = schedule.name == "csv" and NAME.fullmatch(path.stem) and path.stem not in FAMILIES
    return replace(schedule, name=path.stem) if nameless else schedule


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    num_ranks: int
    """Ranks of a pipeline."""
    num_chunks: int
    """Chunks of a rank in each pipe."""
    num_replicas: int
    """Pipelines, each with all its pipes."""
    num_microbatches: int | None
    """Micro-batches of all pipes in an iteration; None if the first iteration's are unknown before the run."""

    @classmethod
    def of(cls, args: Any, num_pipes: int) -> Sizes:
        """Return the sizes of arguments that Megatron has validated."""
        replicas = args.data_parallel_size // num_pipes
        known = args.global_batch_size is not None and args.step_batch_size_schedule is None
        return cls(
            num_ranks=args.pipeline_model_parallel_size * num_pipes,
            num_chunks=(args.virtual_pipeline_model_parallel_size or 1) // num_pipes,
            num_replicas=replicas,
            num_microbatches=args.global_batch_size // (args.micro_batch_size * replicas) if known else None,
        )


def share(args: Any, num_pipes: int) -> None:
    """Set Megatron's sizes of `num_pipes` pipes, once. Raises ValueError for sizes that they cannot have."""
    if num_pipes == 1 or getattr(args, "bpipe_num_pipes", 1) == num_pipes:
        return
    problems = list(_unfit(args, num_pipes))
    if problems:
        raise ValueError("\n  ".join(problems))
    num_ranks, chunks = args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank
    args.bpipe_num_pipes = num_pipes
    args.pipeline_model_parallel_size = num_ranks // num_pipes
    # Layers per virtual stage and a layout of layers are the same for both.
    if chunks is not None:
        args.num_virtual_stages_per_pipeline_rank = chunks * num_pipes
    upstream.remark(
        f"Megatron counts {num_pipes} pipes over the same {num_ranks} ranks as pipelines of {num_ranks // num_pipes} "
        f"ranks, with {num_pipes} times as many virtual stages per rank and {num_pipes} times as many data-parallel "
        "replicas; its lines below use these numbers"
    )


def _unfit(args: Any, num_pipes: int) -> Iterator[str]:
    """Yield why these arguments cannot have that many pipes."""
    num_ranks = args.pipeline_model_parallel_size
    if num_ranks < 2 * num_pipes:
        # Megatron knows virtual stages only where a pipeline has two ranks or more.
        yield (
            f"{num_pipes} pipes need {2 * num_pipes} ranks or more, not {num_ranks}: use "
            f"--pipeline-model-parallel-size {2 * num_pipes}"
        )
    elif num_ranks % num_pipes:
        yield (
            f"{num_pipes} pipes need an even number of ranks, not {num_ranks}: use --pipeline-model-parallel-size "
            f"{num_ranks - 1} or {num_ranks + 1}"
        )
    block = args.tensor_model_parallel_size * args.context_parallel_size * num_ranks
    if args.world_size % block:
        yield (
            f"{args.world_size} processes are not a multiple of {block} (tensor {args.tensor_model_parallel_size} "
            f"times context {args.context_parallel_size} times pipeline {num_ranks}): launch {block}, or a multiple "
            "of it"
        )
    elif args.global_batch_size is not None and args.micro_batch_size is not None:
        replicas = args.world_size // block
        together = args.micro_batch_size * num_pipes * replicas
        below, rest = divmod(args.global_batch_size, together)
        if rest:
            nearest = " or ".join(str(count * together) for count in (below, below + 1) if count)
            yield (
                f"all pipes need the same number of micro-batches, but {args.global_batch_size} samples are not a "
                f"multiple of {together} ({num_pipes} micro-batches of {args.micro_batch_size} on each of {replicas} "
                f"replicas): use --global-batch-size {nearest}"
            )
    if args.use_tp_pp_dp_mapping:
        yield (
            "replicas of the two pipes must be neighbours in data parallelism, and this rank order separates them: "
            "drop --use-tp-pp-dp-mapping"
        )
    if args.use_mp_args_from_checkpoint_args:
        yield (
            "a checkpoint stores Megatron's sizes, which differ from the sizes of its pipes: drop "
            "--use-mp-args-from-checkpoint-args and give --pipeline-model-parallel-size and the other sizes"
        )
