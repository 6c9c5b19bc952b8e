"""Keep every rank within the bytes it has room for. In: a compute-only Schedule, rooms and sizes. Out: one with transfers.

What counts is what a run allocates: a rank's own micro-batches at their most, and besides its host buffers, which stay once they are there.
(`balance` counts what is hosted only while it is.) A rank that holds more than it has room for sends to its partner what must leave and no
more. Of a pair one sends at most: it sends as much as the other then has no room for, all the time. Knows no tensors, no clock, and not
what else a device holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from bpipe.ir.hosts import default_partners, in_pairs, pairing
from bpipe.ir.memory import Memory, live_bytes, peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import Pair, check_input, occupied, pairs_of, planned, with_transfers


@dataclass(frozen=True, slots=True)
class Rooms:
    """`room_bytes[rank]` is what there is for micro-batches and host buffers; `memory`: what one micro-batch of each stage holds."""

    room_bytes: tuple[int, ...]
    memory: Memory


class NoRoom(ValueError):
    """The ranks of a pair have not room enough, together or one of them."""

    def __init__(self, pair: Pair, why: str) -> None:
        super().__init__(why)
        self.pair = pair


def fit(schedule: Schedule, rooms: Rooms, partners: Sequence[int] | None = None) -> Schedule:
    """The schedule with the transfers without which some rank had no room. Its bounds are the counts it reaches.

    By default the rank that lacks most room has the one with most to spare as its partner, and so on. Raises NoRoom.
    """
    memory = rooms.memory
    if min(rooms.room_bytes, default=1) < 1:
        rank = rooms.room_bytes.index(min(rooms.room_bytes))
        raise NoRoom((rank, rank), f"rank {rank} has no room for any micro-batch, and what is computed on must be held")
    check_input(schedule, rooms.room_bytes, memory)
    chosen = chosen_partners(schedule, rooms) if partners is None else pairing(schedule.num_ranks, partners)
    fitted = replace(schedule, hosts=in_pairs(chosen))
    for pair in pairs_of(chosen):
        fitted = _pair_fitted(fitted, pair, rooms)
    return replace(fitted, bounds=tuple(map(ceil, peak_counts(fitted))))


def chosen_partners(schedule: Schedule, rooms: Rooms) -> tuple[int, ...]:
    """Who lacks most with who has most to spare."""
    return default_partners([sum(occupied(schedule, rank, rooms.memory)) - room for rank, room in enumerate(rooms.room_bytes)])


def smallest(
    schedule: Schedule, partners: Sequence[int], pair: Pair, rooms_at: Callable[[int], Rooms], most: int, elsewhere: bool = False
) -> int:
    """The smallest level in 1 to `most` with whose rooms the pair has enough; more than `most` where none is.

    `rooms_at(level)`: no rank's room is smaller at a higher level. `elsewhere`: what leaves goes where no rank has to have room for it.
    """
    plain = replace(schedule, hosts=in_pairs(partners))

    def enough(level: int) -> bool:
        try:
            _pair_fitted(plain, pair, rooms_at(level), elsewhere)
        except NoRoom:
            return False
        return True

    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _pair_fitted(schedule: Schedule, pair: Pair, rooms: Rooms, elsewhere: bool = False) -> Schedule:
    """With the transfers of this pair."""
    memory = rooms.memory
    over = [rank for rank in sorted(set(pair)) if max(live_bytes(schedule, rank, memory), default=0) > rooms.room_bytes[rank]]
    if over and pair[0] == pair[1]:
        raise NoRoom(pair, f"rank {pair[0]} has no partner, and no room for its own micro-batches")
    if len(over) == 2 and not elsewhere:
        raise NoRoom(pair, f"ranks {pair[0]} and {pair[1]} both have no room for their own micro-batches")
    for sender in over:
        plan = planned(schedule, sender, rooms.room_bytes[sender], memory)
        if isinstance(plan, str):
            raise NoRoom(pair, plan)
        rows = list(schedule.ranks)
        for rank in pair:
            rows[rank] = with_transfers(rows[rank], plan, own=rank == sender)
        schedule = replace(schedule, ranks=tuple(rows))
    for host in (rank for rank in pair if over and rank not in over and not elsewhere):
        needed = sum(occupied(schedule, host, memory))
        if needed > rooms.room_bytes[host]:
            room = memory.words(rooms.room_bytes[host])
            raise NoRoom(pair, f"rank {host}, hosting for rank {over[0]}, needs {memory.words(needed)}, and has room for {room}")
    return schedule
