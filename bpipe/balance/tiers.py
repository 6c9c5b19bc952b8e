"""Let what must leave a rank go to its own node's memory: all of it, or only what no device has room for.

In: a compute-only Schedule, rooms and sizes. Out: one with transfers, each to a device or to host memory.

What leaves is what `pool` sends, so it is as little as can be wherever it goes. With other devices first, as few bytes
of it as can be stay behind: of a rank that has so many host buffers on devices, those micro-batches are kept out that
stay away longest where they are too many at once. That is exact where all of a rank are of one size. Knows no tensors,
no clock, and not how much memory a node has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall
from bpipe.balance.evict import Plan
from bpipe.balance.packing import Item, pack
from bpipe.balance.pairs import check_input, moved_bytes
from bpipe.balance.pool import balance_over_pool, distances, plan_overfull_ranks, smallest_level, with_hosts
from bpipe.schedule.host_buffers import Residency, slots_away
from bpipe.schedule.hosts import ALL, HOST, POOL, Host, host_memory_of
from bpipe.schedule.memory import Memory, counts_of, peak_counts
from bpipe.schedule.schedule import Schedule


def balance_over_hosts(
    schedule: Schedule, hosts: str, activation_budget: ActivationBudget, nodes: Sequence[int] = ()
) -> Schedule:
    """Balance over hosts other than pairs, with only those transfers without which some rank lacks room.

    Raises NoRoom.
    """
    return _ARRANGED[hosts](schedule, activation_budget, nodes)


def balance_over_hosts_within(
    schedule: Schedule, hosts: str, bounds: Sequence[int] | None, nodes: Sequence[int] = ()
) -> Schedule:
    """Arrange hosts within counts of chunk micro-batches, host buffers counted all the time; by default the smallest
    that is kept for all.

    Raises ValueError where bounds cannot be kept, naming the smallest that can.
    """
    memory = counts_of(schedule)
    parts = memory.parts

    def kept(limits: Sequence[int]) -> Schedule:
        activation_budget = ActivationBudget(tuple(limit * parts for limit in limits), memory)
        return replace(balance_over_hosts(schedule, hosts, activation_budget, nodes), bounds=tuple(limits))

    if bounds is not None:
        try:
            check_input(schedule, bounds, memory)
            return kept(bounds)
        except BudgetTooSmall as error:
            least = _smallest(kept, schedule)
            raise ValueError(
                f"{error}. The smallest bound found that {_NAMES[hosts]} keeps for all ranks is {least} {memory.unit}"
            ) from None
    return kept((_smallest(kept, schedule),) * schedule.num_ranks)


def _smallest(kept: Callable[[Sequence[int]], Schedule], schedule: Schedule) -> int:
    return smallest_level(lambda bound: kept((bound,) * schedule.num_ranks), ceil(max(peak_counts(schedule))) - 1)[0]


def balance_over_host_memory(
    schedule: Schedule, activation_budget: ActivationBudget, nodes: Sequence[int] = ()
) -> Schedule:
    """Send all that leaves a rank to its own node's memory; no device needs room for it. Raises NoRoom."""
    plans, _ = plan_overfull_ranks(schedule, activation_budget)
    host_of = {residency: host_memory_of(rank) for rank, plan in plans.items() for residency in _away(plan)}
    return with_hosts(schedule, plans, host_of, activation_budget)


def balance_over_tiers(schedule: Schedule, activation_budget: ActivationBudget, nodes: Sequence[int] = ()) -> Schedule:
    """Send what leaves to any rank with room, as in a pool, and what none has room for to its own node's memory.

    Raises NoRoom.
    """
    plans, spare = plan_overfull_ranks(schedule, activation_budget)
    room = [0 if rank in plans else left for rank, left in enumerate(spare)]
    buffers = [item for rank, plan in plans.items() for item in _buffers(rank, plan, room, activation_budget.memory)]
    cost = distances(schedule, nodes)
    takers = pack(buffers, room, cost, own_memory=True)
    assert takers is not None, "own memory has room for all"
    host_of: dict[Residency, Host] = {}
    for rank, plan in plans.items():
        mine = [taker for item, taker in zip(buffers, takers, strict=True) if item.owner == rank and taker is not None]
        # Through the nearest passes most.
        nearest = sorted(mine, key=lambda taker: (cost(rank, taker), taker))
        away = _away(plan)
        through = _through(away, len(nearest))
        through.sort(key=lambda some: -moved_bytes(some, activation_budget.memory))
        host_of |= dict.fromkeys(away, host_memory_of(rank))
        for taker, some in zip(nearest, through, strict=True):
            host_of |= dict.fromkeys(some, Host(taker))
    return with_hosts(schedule, plans, host_of, activation_budget)


_ARRANGED: Mapping[str, Callable[[Schedule, ActivationBudget, Sequence[int]], Schedule]] = {
    POOL: balance_over_pool,
    HOST: balance_over_host_memory,
    ALL: balance_over_tiers,
}
_NAMES = {
    POOL: "a pool",
    HOST: "CPU memory",
    ALL: "a pool backed by CPU memory",
}


def _away(plan: Plan) -> dict[Residency, range]:
    """In the order in which they leave."""
    away = slots_away(sorted(plan.items()))
    return dict(sorted(away.items(), key=lambda one: (one[1].start, one[1].stop, one[0])))


def _buffers(rank: int, plan: Plan, room: Sequence[int], memory: Memory) -> list[Item]:
    """As many host buffers as a rank can use and others have room for, each with what it lets pass beside those
    before it."""
    away = _away(plan)
    size = memory.buffer_bytes({residency.stage for residency in away})
    found: list[Item] = []
    passing, most = 0, sum(left // size for left in room)
    while len(found) < most:
        more = sum(moved_bytes(some, memory) for some in _through(away, len(found) + 1)) - passing
        if more <= 0:
            break
        found.append(Item(rank, size, more))
        passing += more
    return found


def _through(away: Mapping[Residency, range], num_buffers: int) -> list[list[Residency]]:
    """What passes through so many host buffers, by buffer: as many as can be.

    A buffer is free in the slot after a load's.
    """
    full: list[tuple[Residency, list[Residency]]] = []
    buffers: list[list[Residency]] = [[] for _ in range(num_buffers)]
    for residency, slots in away.items():
        full = [one for one in full if away[one[0]].stop > slots.start]
        empty = [buffer for buffer in buffers if not any(buffer is other for _, other in full)]
        if empty:
            full.append((residency, empty[0]))
            empty[0].append(residency)
        elif full:
            # Too many at once: without the one that is away longest the others come through.
            last, buffer = max(full, key=lambda one: away[one[0]].stop)
            if away[last].stop > slots.stop:
                full = [one for one in full if one[0] is not last]
                buffer.remove(last)
                full.append((residency, buffer))
                buffer.append(residency)
    return buffers
