"""Let what must leave a rank go to its own node's memory: all of it, or only what no device has room for.

In: a compute-only Schedule, rooms and sizes. Out: one with transfers, each to a rank or OWN_MEMORY.

What leaves is what `pool` sends, so it is as little as can be wherever it goes. With other devices first, as few bytes of it as can be stay
behind: of a rank that has so many host buffers on devices, those micro-batches are kept out that stay away longest where they are too many
at once. That is exact where all of a rank are of one size. Knows no tensors, no clock, and not how much memory a node has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from bpipe.ir.action import Kind
from bpipe.ir.hosts import ALL, HOST, OWN_MEMORY, POOL
from bpipe.ir.memory import Memory, counts_of, peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import check_input
from bpipe.passes.evict import Plan
from bpipe.passes.packing import Item, pack
from bpipe.passes.pool import Stay, distances, leaving, pool, smallest_level, with_hosts
from bpipe.passes.room import NoRoom, Rooms


def arranged(schedule: Schedule, hosts: str, rooms: Rooms, nodes: Sequence[int] = ()) -> Schedule:
    """The schedule with the transfers without which some rank had no room, with these hosts: any but pairs. Raises NoRoom."""
    return _ARRANGED[hosts](schedule, rooms, nodes)


def arranged_within(schedule: Schedule, hosts: str, bounds: Sequence[int] | None, nodes: Sequence[int] = ()) -> Schedule:
    """The same within counts of chunk micro-batches, host buffers counted all the time; by default the smallest that is kept for all.

    Raises ValueError where bounds cannot be kept, naming the smallest that can.
    """
    memory = counts_of(schedule)
    parts = memory.parts

    def kept(limits: Sequence[int]) -> Schedule:
        rooms = Rooms(tuple(limit * parts for limit in limits), memory)
        return replace(arranged(schedule, hosts, rooms, nodes), bounds=tuple(limits))

    if bounds is not None:
        try:
            check_input(schedule, bounds, memory)
            return kept(bounds)
        except NoRoom as error:
            least = _smallest(kept, schedule)
            raise ValueError(
                f"{error}. The smallest bound found that {_NAMES[hosts]} keeps for all ranks is {least} {memory.unit}"
            ) from None
    return kept((_smallest(kept, schedule),) * schedule.num_ranks)


def _smallest(kept: Callable[[Sequence[int]], Schedule], schedule: Schedule) -> int:
    return smallest_level(lambda bound: kept((bound,) * schedule.num_ranks), ceil(max(peak_counts(schedule))) - 1)[0]


def in_own_memory(schedule: Schedule, rooms: Rooms, nodes: Sequence[int] = ()) -> Schedule:
    """All that leaves a rank goes to its own node's memory, and no device needs room for it. Raises NoRoom."""
    plans, _ = leaving(schedule, rooms)
    stays = (stay for plan in plans.values() for stay in _away(plan))
    return with_hosts(schedule, plans, {(stay.stage, stay.microbatch): OWN_MEMORY for stay in stays}, rooms)


def in_tiers(schedule: Schedule, rooms: Rooms, nodes: Sequence[int] = ()) -> Schedule:
    """What leaves goes to any rank with room, as in a pool; what none has room for, to its own node's memory. Raises NoRoom."""
    plans, spare = leaving(schedule, rooms)
    room = [0 if rank in plans else left for rank, left in enumerate(spare)]
    buffers = [item for rank, plan in plans.items() for item in _buffers(rank, plan, room, rooms.memory)]
    cost = distances(schedule, nodes)
    hosts = pack(buffers, room, cost, own_memory=True)
    assert hosts is not None, "own memory has room for all"
    host_of: dict[Stay, int] = {}
    for rank, plan in plans.items():
        mine = [host for item, host in zip(buffers, hosts, strict=True) if item.owner == rank and host != OWN_MEMORY]
        # Through the nearest passes most.
        nearest = sorted(mine, key=lambda host: (cost(rank, host), host))
        stays = _away(plan)
        through = _through(stays, len(nearest))
        through.sort(key=lambda some: -sum(rooms.memory.stages[stay.stage].moved_bytes for stay in some))
        host_of |= {(stay.stage, stay.microbatch): OWN_MEMORY for stay in stays}
        for host, some in zip(nearest, through, strict=True):
            host_of |= {(stay.stage, stay.microbatch): host for stay in some}
    return with_hosts(schedule, plans, host_of, rooms)


_ARRANGED: Mapping[str, Callable[[Schedule, Rooms, Sequence[int]], Schedule]] = {
    POOL: pool,
    HOST: in_own_memory,
    ALL: in_tiers,
}
_NAMES = {
    POOL: "a pool",
    HOST: "a node's own memory",
    ALL: "a pool with a node's own memory behind it",
}


class _Away(NamedTuple):
    """A micro-batch that leaves beside slot `out` and comes back beside `back`."""

    out: int
    back: int
    stage: int
    microbatch: int


def _away(plan: Plan) -> list[_Away]:
    """In the order in which they leave."""
    left: dict[Stay, int] = {}
    found = []
    for slot, actions in sorted(plan.items()):
        for action in actions:
            key = (action.stage, action.microbatch)
            if action.kind is Kind.EVICT:
                left[key] = slot
            else:
                found.append(_Away(left[key], slot, *key))
    return sorted(found)


def _buffers(rank: int, plan: Plan, room: Sequence[int], memory: Memory) -> list[Item]:
    """As many host buffers as a rank can use and others have room for, each with what it lets pass beside those before it."""
    stays = _away(plan)
    size = memory.buffer_bytes({stay.stage for stay in stays})
    found: list[Item] = []
    passing, most = 0, sum(left // size for left in room)
    while len(found) < most:
        through = _through(stays, len(found) + 1)
        more = sum(memory.stages[stay.stage].moved_bytes for some in through for stay in some) - passing
        if more <= 0:
            break
        found.append(Item(rank, size, more))
        passing += more
    return found


def _through(stays: Sequence[_Away], num_buffers: int) -> list[list[_Away]]:
    """What passes through so many host buffers, by buffer: as many stays as can be. A buffer is free in the slot after a load's."""
    full: list[tuple[_Away, list[_Away]]] = []
    buffers: list[list[_Away]] = [[] for _ in range(num_buffers)]
    for stay in stays:
        full = [one for one in full if one[0].back >= stay.out]
        empty = [buffer for buffer in buffers if not any(buffer is other for _, other in full)]
        if empty:
            full.append((stay, empty[0]))
            empty[0].append(stay)
        elif full:
            # Too many at once: without the one that is away longest the others come through.
            last, buffer = max(full, key=lambda one: one[0].back)
            if last.back > stay.back:
                full = [one for one in full if one[0] is not last]
                buffer.remove(last)
                full.append((stay, buffer))
                buffer.append(stay)
    return buffers
