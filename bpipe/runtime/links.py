"""Connect the pairs of every pipeline of the world that move anything.

In: a schedule, the global ranks of every pipeline, and how activations travel. Out: this rank's connections, every pair's
link, and a table for the log; and at the end of the run nothing of them. Knows neither who runs the schedule nor how
its processes are arranged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from bpipe.runtime.engine import Engine
from bpipe.runtime.streams import copying_on, total_bytes
from bpipe.schedule.host_buffers import links_of, num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.schedule.hosts import Pair, device_ranks, uses_host_memory
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory, connect_all, connect_own
from bpipe.transport.host_memory import Buffers
from bpipe.transport.table import describe


def connect_pairs(
    schedule: Schedule,
    pipelines: Sequence[Sequence[int]],
    transfers: TransferConfig,
    device: torch.device,
    known: Container[Pair] = (),
) -> tuple[dict[int, Connection | OwnMemory], list[MeasuredLink], str]:
    """Return this rank's connections, by the place of the other; every pair's link; and the table of them.

    `pipelines[i][place]` are global ranks, equal on every rank. Only pairs of global ranks that are not `known` are
    connected. A rank that keeps what leaves in its own node's memory is a pair
    with itself. Collective over the world. Raises ValueError or RuntimeError where a pair has no transport.
    """
    stages = {pair: places for pair, places in stages_of_pairs(schedule, pipelines).items() if pair not in known}
    if not stages:
        return {}, [], ""
    rank, copying = dist.get_rank(), copying_on(device)
    mine = list(next(ranks for ranks in pipelines if rank in ranks))
    here = mine.index(rank)
    pairs, own = sorted(pair for pair in stages if pair[0] != pair[1]), uses_host_memory(schedule.hosts)
    links: list[MeasuredLink] = []
    connections: dict[int, Connection | OwnMemory] = {}
    if pairs:
        buffers = host_buffers(schedule, here, total_bytes(device))
        found, links = connect_all(pairs, transfers.transport, transfers.timeout_s, copying, buffers, own)
        connections |= {mine.index(other): connection for other, connection in found.items()}
    if len(pairs) < len(stages):
        buffers = own_buffers(schedule, here, total_bytes(device)) if (rank, rank) in stages else Buffers(0)
        memory, owns = connect_own(buffers, transfers.timeout_s, copying)
        links = links + owns
        connections |= {} if memory is None else {here: memory}
    return connections, links, describe(links, stages)


class Closable(Protocol):
    """Groups and threads of one run: a connection, an edge, or what ranks that share a vocabulary have."""

    def close(self) -> None:
        """End them, together with the other ranks that have them."""

    def abandon(self) -> None:
        """End what waits for nobody."""


def disconnect(engine: Engine | None, connections: Iterable[Closable | None], failed: bool = False) -> str | None:
    """Give back what a run has on this rank and on others: host buffers, mappings, groups and threads.

    After a run that ended well all ranks call it, with `connections` in the order in which they were made. CUDA needs
    that order: a mapping that its opener never closed spoils later ones of both processes, and memory must not be freed
    while another process has it open.

    Args:
        engine: The engine whose program ran last; those of earlier programs have released theirs.
        connections: What the run was connected by; None is what `connect` returns to a rank in no pair.
        failed: Whether the run failed, even if its last iteration did not.

    Returns:
        None if everything was given back. Otherwise why it was not: then it stays until the process ends, and no rank
        is waited for.
    """
    parts, reason = [connection for connection in connections if connection is not None], "the run failed"
    if not failed and (engine is None or engine.ended_well):
        try:
            if engine is not None:
                engine.release()
            for part in parts:
                part.close()
            return None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    if engine is not None:
        engine.abandon()
    for part in parts:
        part.abandon()
    return reason


def host_buffers(schedule: Schedule, rank: int, device_bytes: int) -> Buffers:
    """Return the buffers that a rank would keep in host memory in place of its hosts', before anybody has measured a
    micro-batch.

    All micro-batches that it ever holds fit into its device together, so none is larger than its part of that.
    """
    others = device_ranks(residencies_by_host(schedule, rank))
    return _buffers(schedule, rank, device_bytes, sum(num_buffers_for(schedule, host)[rank] for host in others))


def own_buffers(schedule: Schedule, rank: int, device_bytes: int) -> Buffers:
    """Return the buffers that a rank keeps in host memory by its schedule."""
    return _buffers(schedule, rank, device_bytes, num_host_memory_buffers(schedule, rank))


def _buffers(schedule: Schedule, rank: int, device_bytes: int, count: int) -> Buffers:
    return Buffers(count, int(device_bytes // peak_counts(schedule)[rank])) if count else Buffers(0)


def stages_of_pairs(schedule: Schedule, pipelines: Sequence[Sequence[int]]) -> dict[Pair, Pair]:
    """Return the global ranks of every pair that moves anything, in every pipeline, and their places in it."""
    used = links_of(schedule)
    stages: dict[Pair, Pair] = {}
    for pipeline in pipelines:
        for stage, host in sorted(used):
            ranks = pipeline[stage], pipeline[host]
            low, high = sorted(ranks)
            stages[low, high] = (stage, host) if ranks == (low, high) else (host, stage)
    return stages
