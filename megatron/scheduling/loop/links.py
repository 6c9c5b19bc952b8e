"""Groups for messages between neighbours, and for collectives over shards of a vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from bpipe.schedule.hosts import Pair
from bpipe.transport.collectives import INPUT_SORTS, SORTS, SharedGroups, connect_shared
from bpipe.transport.edges import Edge, connect_edges
from megatron.scheduling.placement.pipelines import pipelines
from megatron.scheduling.placement.positions import Positions


def connect_neighbours(
    edges: Sequence[Pair], positions: Positions, timeout_s: float, device: torch.device
) -> dict[int, Edge]:
    """Return this rank's edges by the position of the neighbour; `edges` are pairs of positions.

    Collective over the world.
    """
    rank, ways = dist.get_rank(), pipelines(positions)
    pairs = sorted((min(pair), max(pair)) for way in ways for pair in ((way[low], way[high]) for low, high in edges))
    groups = connect_edges(pairs, _backend(device), timeout_s, device)
    pipeline = next(way for way in ways if rank in way)
    return {pipeline.index(neighbour): edge for neighbour, edge in groups.items()}


def make_communicators(config: Any, communicator: Any, is_ring: bool) -> None:
    """Exchange one number with both neighbours by Megatron's own messages, to make the communicators of its loop.

    NCCL makes a communicator at its first use. If messages pass in batches (`batch_isend_irecv`), all ranks of the
    pipeline do that together, and a rank that first waits for its partner's sizes never comes: a deadlock from 8 stages
    on. Collective over the pipeline.

    Args:
        config: The model's configuration.
        communicator: What Megatron's loop was called with, or None.
        is_ring: Whether the last rank sends to the first, too.

    Raises:
        ValueError: Messages go between several modules.
    """
    if communicator is None:
        communicator = P2PCommunicator(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
    elif not isinstance(communicator, P2PCommunicator):
        raise ValueError(
            f"--bpipe balances the stages of one module, but messages go through a {type(communicator).__name__}: "
            "train without --bpipe"
        )
    number = torch.zeros((1, 1, 1), dtype=config.pipeline_dtype, device=torch.cuda.current_device())
    has_before, has_after = is_ring or not communicator.is_pp_first_stage, is_ring or not communicator.is_pp_last_stage
    communicator.send_forward_backward_recv_forward_backward(
        number if has_after else None, number if has_before else None, has_before, has_after, tuple(number.shape)
    )


def connect_shards(positions: Positions, timeout_s: float, device: torch.device, input_shards: bool) -> SharedGroups:
    """Return this rank's groups for collectives of all ranks that share a vocabulary. Collective over the world."""
    ways = pipelines(positions)
    # With tensor parallelism the ranks of several pipelines.
    own = tuple(sorted(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())))
    groups: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(groups, own)
    sorts = (*SORTS, *INPUT_SORTS) if input_shards else SORTS
    return connect_shared(ways, sorted(set(groups)), _backend(device), timeout_s, device, sorts)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"
