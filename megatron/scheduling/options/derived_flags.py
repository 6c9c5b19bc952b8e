"""Let flags of Megatron's follow from the schedule that a run asks for.

In: Megatron's parsed arguments, before it judges them. Out: the same, with as many virtual stages per rank as the
schedule has, and what else its stages and its pipes need. Raises ValueError for what is no schedule, and for stages
that this model does not have. Imports no Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bpipe.config.features.feature import Settings
from bpipe.names import unknown
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.read import read_file
from bpipe.schedule.files.text import NAME
from bpipe.schedule.layout import REDISTRIBUTE, Layout
from bpipe.schedule.lowering.align import align, is_listing
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.hooks import upstream
from megatron.scheduling.options import pipes
from megatron.scheduling.options.redistribution import redistribute
from megatron.scheduling.placement.positions import Positions


def complete(args: Any) -> None:
    """Set what follows from the schedule asked for, where it can have only one number of stages per rank, or has two
    pipes.

    Before Megatron's `validate_args`, and after it took arguments from a checkpoint.
    """
    # A YAML configuration replaces the command line, and ours with it; it is refused later.
    split = getattr(args, "bpipe_vocabulary", None)
    if split == REDISTRIBUTE:
        redistribute(args)
    elif split is not None:
        upstream.require(args, "derived_flags")
        _file_by_layer(args)
    name = getattr(args, "bpipe_schedule", None)
    if name is None:
        return
    upstream.require(args, "derived_flags")
    num_pipes = FAMILIES[name].num_pipes if name in FAMILIES else of_file(name).layout.num_pipes
    try:
        pipes.share(args, num_pipes)
        layout = _layout(args, name, args.pipeline_model_parallel_size * num_pipes)
        if layout is not None:
            follow(args, Positions.of(layout))
    except ValueError as error:
        raise ValueError(f"--bpipe-schedule {name}: {error}") from None


def _layout(args: Any, name: str, num_ranks: int) -> Layout | None:
    """Who computes which stage; None where the run says how many chunks a rank has, and any number goes round the
    ranks."""
    if name not in FAMILIES:
        # Whatever else is not the run's is refused when all of that is known.
        return of_file(name).layout
    family = FAMILIES[name]
    if family.min_chunks == family.max_chunks:
        return family.layout(num_ranks, family.min_chunks)
    # What two pipes need does not depend on the number; where nobody gives one, a rank has the fewest chunks that there
    # are.
    return family.layout(num_ranks, family.min_chunks) if family.num_pipes > 1 else None


def follow(args: Any, positions: Positions) -> None:
    """Set what these stages need. Raises ValueError for a model or a pipeline that cannot be cut so."""
    num_ranks, num_chunks = args.pipeline_model_parallel_size, len(positions.mirrored)
    if num_chunks > 1:
        if num_ranks < 2:
            raise ValueError(
                "a pipeline of one rank has nothing to pass on: use --pipeline-model-parallel-size 2 or more"
            )
        # What a checkpoint says of virtual stages is of the run that saved it.
        if args.use_mp_args_from_checkpoint_args:
            args.num_layers_per_virtual_pipeline_stage = None
        pattern = Settings(args).hybrid_layer_pattern
        if pattern:
            _need_segments(pattern, num_ranks * num_chunks)
        elif args.num_layers_per_virtual_pipeline_stage is None and args.pipeline_model_parallel_layout is None:
            if args.num_virtual_stages_per_pipeline_rank is None:
                args.num_virtual_stages_per_pipeline_rank = num_chunks
            _need_equal_stages(args, num_ranks * args.num_virtual_stages_per_pipeline_rank)
        if num_ranks == 2:
            # Megatron's interleaved loop needs it between two ranks; that loop does not run.
            args.overlap_p2p_comm = True
    if not positions.native:
        _file_by_layer(args)


def _file_by_layer(args: Any) -> None:
    """What the distributed optimizer files by its buffers is another rank's elsewhere."""
    if args.use_distributed_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        args.dist_ckpt_optim_fully_reshardable = True
        upstream.remark(
            "the distributed optimizer's state is saved by layer, as with --dist-ckpt-optim-fully-reshardable"
        )


def _need_segments(pattern: str, num_stages: int) -> None:
    """Megatron takes the number of a hybrid model's stages from its pattern, and no flag beside it."""
    # What follows a / predicts further tokens.
    segments = pattern.split("/")[0].split("|")
    if len(segments) != num_stages:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} has {len(segments)} stages, but the schedule has {num_stages}: "
            f"separate the layers with {num_stages - 1} |"
        )


def _need_equal_stages(args: Any, num_stages: int) -> None:
    """Without flags that say otherwise all stages have equally many layers; Megatron would end at an assertion,
    while it builds."""
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
    """Return the schedule of a file, on the grid. Raises ValueError where there is none, or nothing that can be read.

    Torch prints some of its own, such as DualPipeV, as every rank's order alone: to train, no more is needed.
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
    # A plain CSV names itself nowhere.
    nameless = schedule.name == "csv" and NAME.fullmatch(path.stem) and path.stem not in FAMILIES
    return replace(schedule, name=path.stem) if nameless else schedule
