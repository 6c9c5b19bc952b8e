"""Connect the pairs of every pipeline of the world that move anything, describe their links, and disconnect them after
the run."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from bpipe.runtime.engine import Engine
from bpipe.schedule.host_buffers import links_of, num_buffers_for, num_host_memory_buffers, residencies_by_host
from bpipe.schedule.hosts import Pair, device_ranks, uses_host_memory
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.transport.collectives import SharedGroups
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import Connection, MeasuredLink, OwnMemory, connect_all, connect_own
from bpipe.transport.edges import Edge
from bpipe.transport.host_memory import Buffers
from bpipe.transport.streams import Device, total_bytes


def connect_pairs(
    schedule: Schedule,
    pipelines: Sequence[Sequence[int]],
    transfers: TransferConfig,
    device: torch.device,
    known: Container[Pair] = (),
) -> tuple[dict[int, Connection | OwnMemory], list[MeasuredLink], str]:
    """Connect the pairs that a schedule uses. Collective over the world.

    Args:
        schedule: The schedule.
        pipelines: The global ranks of every pipeline by position, equal on every rank.
        transfers: How activations travel.
        device: This rank's.
        known: Pairs of global ranks that are connected already.

    Returns:
        This rank's connections by the other's position; every pair's link; and a table of the links. A rank that evicts
        into its own node's memory is a pair with itself.

    Raises:
        ValueError: For a transport that cannot be used on this device.
        RuntimeError: If a pair has no transport.
    """
    stages = {pair: places for pair, places in stages_of_pairs(schedule, pipelines).items() if pair not in known}
    if not stages:
        return {}, [], ""
    rank, copying = dist.get_rank(), Device(device)
    pipeline = list(next(ranks for ranks in pipelines if rank in ranks))
    here = pipeline.index(rank)
    pairs, own = sorted(pair for pair in stages if pair[0] != pair[1]), uses_host_memory(schedule.hosts)
    links: list[MeasuredLink] = []
    connections: dict[int, Connection | OwnMemory] = {}
    if pairs:
        buffers = host_buffers(schedule, here, total_bytes(device))
        others, links = connect_all(pairs, transfers.transport, transfers.timeout_s, copying, buffers, own)
        connections |= {pipeline.index(other): connection for other, connection in others.items()}
    if len(pairs) < len(stages):
        count = num_host_memory_buffers(schedule, here) if (rank, rank) in stages else 0
        buffers = _buffers(schedule, here, total_bytes(device), count)
        memory, owns = connect_own(buffers, transfers.timeout_s, copying)
        links = links + owns
        connections |= {} if memory is None else {here: memory}
    return connections, links, describe(links, stages)


# Groups and threads of one run, which are closed together with the other ranks that have them.
Closable = Connection | OwnMemory | Edge | SharedGroups


def disconnect(engine: Engine | None, connections: Iterable[Closable | None], failed: bool = False) -> str | None:
    """Give back what a run has on this rank and on others: host buffers, mappings, groups and threads.

    After a run that ended well all ranks call it, with `connections` in the order in which they were made. CUDA needs
    that order: a mapping that its opener never closed breaks later ones of both processes, and memory must not be freed
    while another process has it open.

    Args:
        engine: The engine whose program ran last; those of earlier programs have released theirs.
        connections: The run's connections; None is what `connect` returns to a rank in no pair.
        failed: Whether the run failed, even if its last iteration did not.

    Returns:
        None if everything was given back. Otherwise why not: then it stays until the process ends, and no rank is
        waited for.
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
    """Return the buffers that a rank would keep in host memory instead of its hosts', before micro-batches are measured.

    All micro-batches that it holds at its peak fit into its device, so none is larger than its part of that.
    """
    others = device_ranks(residencies_by_host(schedule, rank))
    return _buffers(schedule, rank, device_bytes, sum(num_buffers_for(schedule, host)[rank] for host in others))


def _buffers(schedule: Schedule, rank: int, device_bytes: int, count: int) -> Buffers:
    return Buffers(count, int(device_bytes // peak_counts(schedule)[rank])) if count else Buffers(0)


def stages_of_pairs(schedule: Schedule, pipelines: Sequence[Sequence[int]]) -> dict[Pair, Pair]:
    """Return, by the global ranks of every pair that moves anything, their positions in the pipeline."""
    used = links_of(schedule)
    stages: dict[Pair, Pair] = {}
    for pipeline in pipelines:
        for stage, host in sorted(used):
            ranks = pipeline[stage], pipeline[host]
            low, high = sorted(ranks)
            stages[low, high] = (stage, host) if ranks == (low, high) else (host, stage)
    return stages


def describe(links: Iterable[MeasuredLink], stages: Mapping[Pair, Pair]) -> str:
    """Describe each pair of stages in one line: the transport, what its links measured, and what else was tried."""
    of_stages: dict[Pair, list[MeasuredLink]] = defaultdict(list)
    for link in links:
        low, high = sorted(stages[link.ranks])
        of_stages[low, high].append(link)
    lines = ["links, measured in both directions:"]
    for pair, same in sorted(of_stages.items()):
        who = f"stages {pair[0]} and {pair[1]}" if pair[0] != pair[1] else f"stage {pair[0]} and its node's CPU memory"
        for name in sorted({link.transport for link in same}):
            lines.append(f"  {who}{_chosen(name, [link for link in same if link.transport == name])}")
    return "\nbpipe: ".join(lines)


def _chosen(name: str, links: Sequence[MeasuredLink]) -> str:
    """Describe links of the same stages: their transport, their speed, and what else was tried on the first of them."""
    of = "ranks" if links[0].ranks[0] == links[0].ranks[1] else "pairs of ranks"
    count = "" if len(links) == 1 else f", {len(links)} {of}"
    tried = [
        f"{other} {_range(link.bytes_per_s[other] for link in links if other in link.bytes_per_s)}"
        for other in links[0].bytes_per_s
        if other != name
    ]
    tried += [f"{other} not usable: {why}" for other, why in links[0].refused.items()]
    also = f" ({'; '.join(tried)})" if tried else ""
    return f"{count}: {name} {_range(link.bytes_per_s[name] for link in links)}{also}"


def _range(bytes_per_s: Iterable[float]) -> str:
    speeds = sorted(speed / 1e9 for speed in bytes_per_s)
    low, high = f"{speeds[0]:.3g}", f"{speeds[-1]:.3g}"
    return f"{low} GB/s" if low == high else f"{low} to {high} GB/s"
