"""Connect the pairs of every pipeline of the world, and its neighbours where our own loop runs; have Megatron connect
its own.

In: a schedule and the wanted transport. Out: this rank's connection, and a table for the log; groups for messages.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from bpipe.ir.host_buffers import links_of, num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.ir.hosts import uses_host_memory
from bpipe.ir.memory import peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.runtime.streams import copying_on, total_bytes
from bpipe.transport.collectives import INPUT_SORTS, SORTS, SharedGroups, connect_shared
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory, connect_all, connect_own
from bpipe.transport.edges import Edge, connect_edges
from bpipe.transport.host_memory import Buffers
from bpipe.transport.table import Pair, describe
from megatron.scheduling.loop.directory import pipelines
from megatron.scheduling.placement.positions import Positions


def connect_neighbours(
    edges: Sequence[Pair], positions: Positions, timeout_s: float, device: torch.device
) -> dict[int, Edge]:
    """Return this rank's edges for messages, by the place of the neighbour; `edges` are places of neighbours.

    Collective over the world.
    """
    rank, ways = dist.get_rank(), pipelines(positions)
    pairs = sorted((min(both), max(both)) for way in ways for both in ((way[low], way[high]) for low, high in edges))
    groups = connect_edges(pairs, _backend(device), timeout_s, device)
    mine = next(way for way in ways if rank in way)
    return {mine.index(neighbour): both for neighbour, both in groups.items()}


def make_communicators(config: Any, communicator: Any, is_ring: bool) -> None:
    """Exchange one number with both neighbours by Megatron's own messages, so that the communicators of its loop are
    there before it runs.

    NCCL makes a communicator at its first use. Where messages pass in batches (`batch_isend_irecv`) all ranks of the
    pipeline do that together, and a rank that first waits for its partner's sizes never comes: with 8 stages and more
    nothing went on. `communicator` is what the loop was called with, or None; `is_ring`: the last rank sends to the
    first, too. Collective over the pipeline. Raises ValueError for messages between several modules.
    """
    if communicator is None:
        communicator = P2PCommunicator(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
    elif not isinstance(communicator, P2PCommunicator):
        raise ValueError(
            f"--bpipe balances the stages of one module; messages go through a {type(communicator).__name__}: train "
            f"without it"
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
    mine = tuple(sorted(dist.get_process_group_ranks(parallel_state.get_model_parallel_group())))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    sorts = (*SORTS, *INPUT_SORTS) if input_shards else SORTS
    return connect_shared(ways, sorted(set(found)), _backend(device), timeout_s, device, sorts)


def _backend(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else "nccl"


def connect_pairs(
    schedule: Schedule,
    positions: Positions,
    wanted: str,
    timeout_s: float,
    device: torch.device,
    known: Container[Pair] = (),
) -> tuple[dict[int, Connection | OwnMemory], list[MeasuredLink], str]:
    """Return this rank's connections, by the place of the other; every pair's link; and the table of them.

    Collective over the world.

    Only of pairs of global ranks that are not `known`. A rank that keeps what leaves in its own node's memory is a pair
    with itself.
    """
    stages = {pair: places for pair, places in stages_of_pairs(schedule, positions).items() if pair not in known}
    if not stages:
        return {}, [], ""
    rank, here, copying = dist.get_rank(), positions.here(), copying_on(device)
    mine = next(way for way in pipelines(positions) if rank in way)
    pairs, own = sorted(pair for pair in stages if pair[0] != pair[1]), uses_host_memory(schedule.hosts)
    links: list[MeasuredLink] = []
    connections: dict[int, Connection | OwnMemory] = {}
    if pairs:
        buffers = host_buffers(schedule, here, total_bytes(device))
        found, links = connect_all(pairs, wanted, timeout_s, copying, buffers, own)
        connections |= {mine.index(other): connection for other, connection in found.items()}
    if len(pairs) < len(stages):
        buffers = own_buffers(schedule, here, total_bytes(device)) if (rank, rank) in stages else Buffers(0)
        memory, owns = connect_own(buffers, timeout_s, copying)
        links = links + owns
        connections |= {} if memory is None else {here: memory}
    return connections, links, describe(links, stages)


def host_buffers(schedule: Schedule, rank: int, device_bytes: int) -> Buffers:
    """Return the buffers that a rank would keep in host memory in place of its hosts', before anybody has measured a
    micro-batch.

    All micro-batches that it ever holds fit into its device together, so none is larger than its part of that.
    """
    others = [host for host in residencies_by_host(schedule, rank) if host != rank]
    return _buffers(schedule, rank, device_bytes, sum(num_buffers_for(schedule, host)[rank] for host in others))


def own_buffers(schedule: Schedule, rank: int, device_bytes: int) -> Buffers:
    """Return the buffers that a rank keeps in host memory by its schedule."""
    return _buffers(schedule, rank, device_bytes, num_host_memory_buffers(schedule, rank))


def _buffers(schedule: Schedule, rank: int, device_bytes: int, count: int) -> Buffers:
    return Buffers(count, int(device_bytes // peak_counts(schedule)[rank])) if count else Buffers(0)


def stages_of_pairs(schedule: Schedule, positions: Positions) -> dict[Pair, Pair]:
    """Return the global ranks of every pair that moves anything, in every pipeline of the world, and their places in
    it. Equal on every rank.

    Collective over the world.
    """
    used = links_of(schedule)
    stages: dict[Pair, Pair] = {}
    for pipeline in pipelines(positions):
        for stage, host in sorted(used):
            ranks = pipeline[stage], pipeline[host]
            low, high = sorted(ranks)
            stages[low, high] = (stage, host) if ranks == (low, high) else (host, stage)
    return stages
