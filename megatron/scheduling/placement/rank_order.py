"""Take the place in Megatron's rank order that puts pipeline pairs on one node.

Megatron orders ranks by dimension and cannot express pairs. So before the process group exists the processes exchange their
`RANK`s; `LOCAL_RANK`, and with it the GPU, stays. The schedule says which ranks are pairs. In the log a stage is called by
its position in the schedule.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bpipe.balance.pairs import choose_partners
from bpipe.config.features.table import Settings
from bpipe.placement import Part, Topology, pair_adjacent, pairs_apart
from bpipe.record.report.memory import without_transfers
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.hosts import mirrored_pairs
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.options.schedule_choice import first_schedule
from megatron.scheduling.placement.positions import Positions

if TYPE_CHECKING:
    from megatron.scheduling.options.arguments import SchedulingConfig


def apply(args: Any) -> None:
    """Change this process's rank as `--bpipe-placement` says, if any pair moves anything."""
    # A YAML configuration replaces the command line, and ours with it; it is refused later.
    if not getattr(args, "bpipe", False) or args.bpipe_placement == "none":
        return
    try:
        placed = _pairs_in(first_schedule(args))
    except ValueError:
        # It is reported before training begins, with whatever else is wrong.
        return
    # By default Megatron's validation sets the shards of a weight. It refuses sizes that do not fit the world itself.
    shards, tensor = Settings(args).tensor_parallel_num_weight_shards, args.tensor_model_parallel_size
    if placed is None or shards not in (None, tensor):
        return
    # Replicas of several pipes stay together, like ranks that share a sequence: they are Megatron's next dimension.
    context, pipeline = placed[1].num_pipes * args.context_parallel_size, args.pipeline_model_parallel_size
    data, rest = divmod(args.world_size, tensor * context * pipeline)
    if not rest:
        topology = Topology(tensor, context, pipeline, data, _gpus_per_node(args.world_size))
        args.rank = _take(args.rank, topology, args.use_tp_pp_dp_mapping, *placed)


# The partner of each of Megatron's pipeline ranks, and their positions in the schedule.
_Pairs = tuple[tuple[int, ...], Positions]


def _pairs_in(schedule: Schedule) -> _Pairs | None:
    """Return the pairs of a schedule.

    None if no pair moves anything, except to host memory of the own node, or if pairs of two pipes are of both halves, so
    that no node could take them all. Raises ValueError for stages that Megatron cannot place so.
    """
    positions = Positions.of(schedule.layout)
    if all(rank == host for rank, host in links_of(schedule)):
        return None
    # The plan of a pool looks for hosts on a rank's own node: those are adjacent that would be pairs.
    partners = (None if schedule.is_pooled else schedule.partners) or choose_partners(without_transfers(schedule), None)
    # With two pipes mirror images stay together, so the pairs of one half place those of the other.
    others = tuple(positions.rank_at(partners[positions.position_of(rank)]) for rank in range(positions.pipeline_size))
    return (others, positions) if all(others[other] == rank for rank, other in enumerate(others)) else None


def _check_in_time() -> None:
    """Raise RuntimeError if ranks are fixed already, or unknown."""
    # Not at the top: importing this module needs no torch.
    import torch.distributed as dist

    if dist.is_initialized():
        raise RuntimeError(
            "place() was called too late: the process group exists, and ranks cannot change any more. Call it earlier"
        )
    if _PLACED in os.environ:
        raise RuntimeError(
            f"place() was already called in this process, whose rank was {os.environ[_PLACED]}: call it only once"
        )
    for name in ("RANK", "WORLD_SIZE"):
        if name not in os.environ:
            raise RuntimeError(
                f"place() reads {name} from the environment, where it is not set: launch with torchrun, or set it as "
                "torchrun does"
            )


def place(
    *,
    pipeline: int,
    tensor: int = 1,
    context: int = 1,
    pipeline_before_data: bool = False,
    config: SchedulingConfig | None = None,
) -> int:
    """Give this process the rank that puts the two stages of a pair on one node, for programs without Megatron's parser.

    Call it once, in every process, before any process group exists and before anything has read `RANK`: it reads `RANK`
    and `WORLD_SIZE`, and `LOCAL_WORLD_SIZE` for the GPUs of a node, and sets `RANK`. If no pair moves anything, nothing
    changes.

    Args:
        pipeline: Number of the schedule's ranks; with two pipes twice Megatron's.
        tensor: Megatron's tensor-parallel size.
        context: Megatron's context-parallel size.
        pipeline_before_data: Megatron's `--use-tp-pp-dp-mapping`.
        config: The configuration for `install`, whose schedule has the pairs. Without it they are those of 1F1B and
            interleaved 1F1B: first and last, and so on.

    Returns:
        The rank.

    Raises:
        ValueError: The sizes do not divide the world, or are not the configuration's.
        RuntimeError: It is too late.
    """
    _check_in_time()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    if min(sizes.values()) < 1 or world % (tensor * context * pipeline):
        raise ValueError(
            f"{' times '.join(f'{name} {size}' for name, size in sizes.items())} does not divide the world size of "
            f"{world} processes"
        )
    pipes = 1 if config is None else config.positions.num_pipes
    if pipes > 1 and pipeline_before_data:
        raise ValueError(
            "replicas of the two pipes must be neighbours in data parallelism, and pipeline_before_data separates "
            "them: leave it out"
        )
    data = world // (tensor * context * pipeline)
    topology = Topology(tensor, pipes * context, pipeline // pipes, data, _gpus_per_node(world))
    placed = None if pipeline < 4 else (mirrored_pairs(pipeline), Positions(pipeline))
    if config is not None:
        if pipeline != config.num_ranks:
            raise ValueError(
                f"pipeline {pipeline} differs from num_ranks {config.num_ranks} of the configuration: give place() the "
                "same number"
            )
        placed = _pairs_in(config.first_schedule())
    os.environ[_PLACED] = str(rank)
    return rank if placed is None else _take(rank, topology, pipeline_before_data, *placed)


# In the environment, as the rank is: a child process that inherits one inherits the other.
_PLACED = "BPIPE_PLACED_FROM_RANK"


def _take(
    place: int, topology: Topology, pipeline_before_data: bool, partners: tuple[int, ...], positions: Positions
) -> int:
    """Set `RANK` as the placement says. The first process prints the table."""
    parts = pair_adjacent(topology, partners)
    rank = rank_of(parts[place], topology, pipeline_before_data)
    os.environ["RANK"] = str(rank)
    if place == 0:
        print(describe(topology, parts, partners, positions), flush=True)
    return rank


def _gpus_per_node(world: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def rank_of(part: Part, topology: Topology, pipeline_before_data: bool) -> int:
    """Return Megatron's rank of a part: tensor innermost, then context, then data and pipeline in either order."""
    inner = part.tensor + topology.tensor * part.context
    if pipeline_before_data:
        return inner + topology.block * (part.stage + topology.pipeline * part.replica)
    return inner + topology.block * (part.replica + topology.data * part.stage)


def describe(topology: Topology, parts: tuple[Part, ...], partners: tuple[int, ...], positions: Positions) -> str:
    """Return the table: the stages of each node, and the pairs that use the network."""

    def place_of(part: Part) -> int:
        return positions.position_of(part.stage, part.context * positions.num_pipes // topology.context)

    lines = [f"bpipe: placement adjacent: {topology.world} ranks, {topology.gpus_per_node} per node"]
    for first in range(0, topology.world, topology.gpus_per_node):
        stages = [str(place_of(part)) for part in parts[first : first + topology.gpus_per_node]]
        lines.append(f"bpipe:   node {first // topology.gpus_per_node}: stages {' '.join(stages)}")
    apart = pairs_apart(topology, parts, partners)
    if apart:
        named = ", ".join(
            f"{a}-{b}" for a, b in sorted(tuple(sorted(map(positions.position_of, pair))) for pair in apart)
        )
        lines.append(
            f"bpipe:   pairs {named} span two nodes and will use the network: a pair needs {2 * topology.block} GPUs "
            f"on one node, but a node has {topology.gpus_per_node}"
        )
    return "\n".join(lines)
