"""Count what a schedule keeps in memory. In: a Schedule, and bytes a stage where bytes are asked for. Out: counts or bytes a slot, peaks.

One rule, for the checker, the simulator and the run alike: a forward and a load (and the acceptor's half of an eviction) occupy memory
from the start of their slot; a backward and an eviction (and the acceptor's half of a load) free it at the end of theirs.
Knows no tensors and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from bpipe.ir.action import Kind
from bpipe.ir.schedule import Schedule

_FORWARD, _BACKWARD, _WEIGHT, _LOAD, _HOST = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT, Kind.LOAD, Kind.HOST


class Transfers(NamedTuple):
    """How many transfers one rank takes part in: as evictor the first two, as acceptor the others."""

    evictions: int
    loads: int
    hosts: int
    returns: int


def live_counts(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Chunk micro-batches whose activations the rank holds during each slot, its own and hosted ones."""
    ones = (1,) * schedule.num_stages
    return live_bytes(schedule, rank, ones, ones)


def live_bytes(schedule: Schedule, rank: int, saved_bytes: Sequence[int], moved_bytes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of activations the rank holds during each slot.

    `saved_bytes[stage]` is what one micro-batch of a stage saves, `moved_bytes[stage]` the part of it a transfer moves: the rest stays
    on its own rank while the micro-batch is away, and the acceptor holds only the moved part.
    """
    held = 0
    curve = []
    for slot in schedule.ranks[rank]:
        freed = 0
        compute = slot.compute
        if compute is not None:
            kind = compute.kind
            if kind is _FORWARD:
                held += saved_bytes[compute.stage]
            elif kind is _BACKWARD or kind is _WEIGHT:
                freed = saved_bytes[compute.stage]
            if slot.overlapped is not None and slot.overlapped.kind is _BACKWARD:
                freed += saved_bytes[slot.overlapped.stage]
        for transfer in slot.transfers:
            if transfer.kind is _LOAD or transfer.kind is _HOST:
                held += moved_bytes[transfer.stage]
            else:
                freed += moved_bytes[transfer.stage]
        curve.append(held)
        held -= freed
    return tuple(curve)


def peak_counts(schedule: Schedule) -> tuple[int, ...]:
    """The most chunk micro-batches each rank ever holds."""
    return tuple(max(live_counts(schedule, rank)) for rank in range(schedule.num_ranks))


def peak_bytes(schedule: Schedule, saved_bytes: Sequence[int], moved_bytes: Sequence[int]) -> tuple[int, ...]:
    """The most bytes of activations each rank ever holds; arguments as in `live_bytes`."""
    for name, sizes in (("saved_bytes", saved_bytes), ("moved_bytes", moved_bytes)):
        if len(sizes) != schedule.num_stages:
            raise ValueError(f"{name} has {len(sizes)} entries, the schedule {schedule.num_stages} stages: give one for each stage")
    for stage, (saved, moved) in enumerate(zip(saved_bytes, moved_bytes, strict=True)):
        if not 0 <= moved <= saved:
            raise ValueError(f"stage {stage}: moved_bytes {moved} must lie between 0 and its saved_bytes {saved}")
    return tuple(max(live_bytes(schedule, rank, saved_bytes, moved_bytes)) for rank in range(schedule.num_ranks))


def num_transfers(schedule: Schedule, rank: int) -> Transfers:
    """How many evictions and loads the rank makes, and how many it answers."""
    kinds = Counter(transfer.kind for slot in schedule.ranks[rank] for transfer in slot.transfers)
    return Transfers(kinds[Kind.EVICT], kinds[Kind.LOAD], kinds[Kind.HOST], kinds[Kind.RETURN])
