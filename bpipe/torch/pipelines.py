"""The pipelines of the world and the machines of their pairs, and connections of the pairs that move anything."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bpipe.runtime.links import connect_pairs
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import moves_anything
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory
from bpipe.transport.one_sided import Transport


def pipelines_of(group: Any, schedule: Schedule) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return the global ranks of every pipeline of the world, by position, and the machine of every rank of the world.

    Collective over the world. Raises ValueError on every rank if not all run this schedule. `group` is that of the
    stages, None for the whole world.
    """
    mine = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    text = hashlib.sha256(write_csv(schedule).encode()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, text, socket.gethostname()))
    others = [rank for rank, (_, other, _) in enumerate(everyone) if other != everyone[0][1]]
    if others:
        raise ValueError(
            f"ranks {', '.join(map(str, others))} made a different schedule from rank 0: give every rank of the "
            "world the same micro-batches, schedule and balance"
        )
    return sorted({ranks for ranks, *_ in everyone}), [machine for *_, machine in everyone]


def pairs_placed(schedule: Schedule, pipelines: Sequence[Sequence[int]], machines: Sequence[str]) -> str:
    """Return a line on whether the ranks between which activations move share a machine.

    `pipelines`: global ranks, by position. `machines`: names, by global rank.
    """
    links = sorted({(min(link), max(link)) for link in links_of(schedule) if link[0] != link[1]})
    if not links:
        return "evicted activations stay in the CPU memory of a rank's own node"
    apart = [
        (ranks[low], ranks[high])
        for ranks in pipelines
        for low, high in links
        if machines[ranks[low]] != machines[ranks[high]]
    ]
    if not apart:
        return f"all {len(links) * len(pipelines)} pairs of ranks are on one machine each"
    (low, high), *more = apart
    others = f" (and {len(more)} more)" if more else ""
    return (
        f"ranks {low} and {high} move activations between the machines {machines[low]} and {machines[high]}{others}: "
        "put the ranks of a pipeline on one machine, by the order of the mesh's dimensions, or evict to CPU "
        'memory with BalanceConfig(hosts="host")'
    )


@dataclass(frozen=True)
class Connected:
    """This rank's connections."""

    connections: dict[int, Connection | OwnMemory]
    """By the other's position in the pipeline."""

    links: list[MeasuredLink]
    """Of every pair of the world."""

    table: str
    """Of the links, for the log."""

    pipelines: list[tuple[int, ...]]
    """Global ranks of every pipeline, by position."""

    placed: str = ""
    """Whether pairs share a machine, for the log."""

    def transports(self, differing: bool) -> dict[int, Transport]:
        """Return transports for one schedule."""
        return {place: connection.transport(differing=differing) for place, connection in self.connections.items()}


def connected(group: Any, schedule: Schedule, transfers: TransferConfig, device: torch.device) -> Connected:
    """Connect the pairs of this schedule. Collective over the world if anything moves, without a message otherwise.

    Raises ValueError or RuntimeError if a pair has no transport.
    """
    if not moves_anything(schedule):
        return Connected({}, [], "", [])
    pipelines, machines = pipelines_of(group, schedule)
    connections, links, table = connect_pairs(schedule, pipelines, transfers, device)
    return Connected(connections, links, table, pipelines, pairs_placed(schedule, pipelines, machines))
