"""Let what must leave a rank go to any rank with room.

In: a compute-only Schedule, rooms and sizes. Out: one with transfers.

What counts is what `room` counts. A rank that holds more than it has room for sends what must leave and no more, so no
choice of hosts makes the bytes that move more or fewer; every other rank may host, for several, and a rank that sends
may have several hosts. None sends only to make room for what comes from another: where sizes differ, rooms that only
such a plan keeps are refused. Of all choices the one is taken that moves the fewest bytes between nodes, and of these
the one over the shortest distances (`packing`).

Transfers of one slot stand in one order on all ranks, so none waits for another in a ring. Knows no tensors, no clock,
and not what else a device holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall, Parts, check_rooms, less_moved
from bpipe.balance.evict import Plan
from bpipe.balance.packing import Cost, Item, pack
from bpipe.balance.pairs import allocated_bytes, choose_partners, moved_bytes, plan_rank, with_transfers
from bpipe.schedule.action import OTHER_END, Action, Kind
from bpipe.schedule.host_buffers import Residencies, Residency, host_buffers
from bpipe.schedule.hosts import Host, Hosts, Pair, in_pairs
from bpipe.schedule.memory import Memory, live_bytes, peak_counts
from bpipe.schedule.schedule import Schedule


def balance_over_pool(schedule: Schedule, activation_budget: ActivationBudget, nodes: Sequence[int] = ()) -> Schedule:
    """Return the schedule with the transfers without which some rank had no room. Its bounds are the counts it reaches.

    `nodes[rank]`: the node a rank is on; empty where all are on one. Raises NoRoom.
    """
    memory = activation_budget.memory
    plans, spare = plan_overfull_ranks(schedule, activation_budget)
    if plans and schedule.num_ranks == 1:
        raise BudgetTooSmall((0, 0), "rank 0 has no room for its own micro-batches, and no other rank to host them")
    return with_hosts(schedule, plans, _hosted(schedule, plans, spare, nodes, memory), activation_budget)


def plan_overfull_ranks(schedule: Schedule, activation_budget: ActivationBudget) -> tuple[dict[int, Plan], list[int]]:
    """Return what leaves each rank that lacks room, and what every rank has to spare, below 0 where it lacks room.

    Raises NoRoom.
    """
    check_rooms(schedule, activation_budget)
    memory = activation_budget.memory
    peaks = [max(live_bytes(schedule, rank, memory), default=0) for rank in range(schedule.num_ranks)]
    spare = [room - peak for room, peak in zip(activation_budget.room_bytes, peaks, strict=True)]
    plans: dict[int, Plan] = {}
    for rank in (rank for rank, left in enumerate(spare) if left < 0):
        plan = plan_rank(schedule, rank, activation_budget.room_bytes[rank], memory)
        if isinstance(plan, str):
            raise BudgetTooSmall((rank, rank), plan)
        plans[rank] = plan
    return plans, spare


def fewest_sent(
    schedule: Schedule, activation_budget: ActivationBudget, parts: Parts, attempt: Callable[[ActivationBudget], object]
) -> ActivationBudget:
    """Return the rooms with those parts of micro-batches with which the fewest bytes leave each rank, or all of each
    where these find no room.

    `attempt` raises NoRoom where they do not.
    """
    memory = activation_budget.memory
    for rank, room in enumerate(activation_budget.room_bytes):
        if max(live_bytes(schedule, rank, memory), default=0) > room:
            memory = _fewest_of(schedule, rank, room, memory, parts)
    found = ActivationBudget(activation_budget.room_bytes, memory)
    try:
        attempt(found)
    except BudgetTooSmall:
        return activation_budget
    return found


def _fewest_of(schedule: Schedule, rank: int, room: int, memory: Memory, parts: Parts) -> Memory:
    best: tuple[int, Memory] | None = None
    for tried in (memory, *less_moved(schedule, [rank], memory, parts)):
        plan = plan_rank(schedule, rank, room, tried)
        if isinstance(plan, str):
            continue
        evicted = (action for actions in plan.values() for action in actions if action.kind is Kind.EVICT)
        moved = sum(tried.size(action.stage, action.microbatch).moved_bytes for action in evicted)
        if best is None or moved < best[0]:
            best = moved, tried
    return memory if best is None else best[1]


def smallest_level(attempt: Callable[[int], object], most: int) -> tuple[int, Pair]:
    """Return the smallest level in 1 to `most` at which an attempt does not raise NoRoom, more than `most` where none
    is; and who had none below.

    `attempt(level)`: no rank's room is smaller at a higher level.
    """
    low, high, worst = 0, most + 1, (0, 0)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            attempt(middle)
            high = middle
        except BudgetTooSmall as error:
            low, worst = middle, error.pair
    return high, worst


def _hosted(
    schedule: Schedule, plans: Mapping[int, Plan], spare: Sequence[int], nodes: Sequence[int], memory: Memory
) -> dict[Residency, Host]:
    """Where each micro-batch goes that leaves: one host for all that pass through one host buffer. Raises NoRoom."""
    through: dict[tuple[int, int], list[Residency]] = {}
    for rank, plan in plans.items():
        for residency, buffer in _as_on_one_host(schedule, rank, plan).items():
            through.setdefault((rank, buffer), []).append(residency)
    items = [_item(rank, residencies, memory) for (rank, _), residencies in through.items()]
    hosts = pack(items, [0 if rank in plans else left for rank, left in enumerate(spare)], distances(schedule, nodes))
    if hosts is None:
        raise _no_room(items, spare, memory)
    return {
        residency: Host(taker)
        for residencies, taker in zip(through.values(), hosts, strict=True)
        for residency in residencies
        if taker is not None
    }


def _item(rank: int, residencies: Sequence[Residency], memory: Memory) -> Item:
    """Return a host buffer for all of these, one after the other."""
    return Item(
        rank,
        memory.buffer_bytes({residency.stage for residency in residencies}),
        moved_bytes(residencies, memory),
    )


def _as_on_one_host(schedule: Schedule, rank: int, plan: Plan) -> dict[Residency, int]:
    """Return the host buffers of all that leaves a rank, if one other hosted it all."""
    other = (rank + 1) % schedule.num_ranks
    rows = list(schedule.ranks)
    rows[other] = with_transfers(rows[other], plan, own=False)
    return host_buffers(replace(schedule, ranks=tuple(rows)), other)


def distances(schedule: Schedule, nodes: Sequence[int]) -> Callable[[int, int], Cost]:
    """Return the cost of a byte between ranks: first whether they are on two nodes, then how far apart.

    A usual partner is nearest.
    """
    usual = choose_partners(schedule, None)

    def cost(rank: int, host: int) -> Cost:
        apart = bool(nodes) and nodes[rank] != nodes[host]
        return int(apart), 0 if usual[rank] == host else abs(rank - host)

    return cost


def _no_room(items: Sequence[Item], spare: Sequence[int], memory: Memory) -> BudgetTooSmall:
    """Who lacks most, and what the others have."""
    ranks = sorted({item.owner for item in items})
    needs = {rank: sum(item.num_bytes for item in items if item.owner == rank) for rank in ranks}
    most = max(needs, key=lambda rank: needs[rank])
    asked = ", ".join(f"rank {rank} {memory.text(size)}" for rank, size in needs.items())
    there = (
        ", ".join(f"rank {rank} {memory.text(left)}" for rank, left in enumerate(spare) if left > 0)
        or "no rank has any"
    )
    return BudgetTooSmall(
        (most, most),
        f"evicted memory needs host buffers ({asked} {memory.unit}), more than the other ranks have room for ({there})",
    )


def with_hosts(
    schedule: Schedule,
    plans: Mapping[int, Plan],
    host_of: Mapping[Residency, Host],
    activation_budget: ActivationBudget,
) -> Schedule:
    """Return the schedule with these transfers, each to the residency's host.

    Its bounds are the counts it reaches. Raises NoRoom.

    Of one slot all transfers stand in the order of those who send, on every rank.
    """
    rows = [list(row) for row in schedule.ranks]
    used: list[set[Host]] = [set() for _ in rows]
    for rank, plan in sorted(plans.items()):
        residencies = Residencies()
        for slot, actions in sorted(plan.items()):
            for action in actions:
                host = host_of[residencies.of(action)]
                used[rank].add(host)
                ends = [(rows[rank], action)]
                if host.on_device:
                    ends.append((rows[host.rank], Action(action.stage, OTHER_END[action.kind], action.microbatch)))
                for row, one in ends:
                    row[slot] = replace(row[slot], transfers=(*row[slot].transfers, one))
    hosted = replace(schedule, ranks=tuple(map(tuple, rows)), hosts=_hosts(used))
    _check_room(hosted, activation_budget)
    return replace(hosted, bounds=tuple(map(ceil, peak_counts(hosted))))


def _check_room(schedule: Schedule, activation_budget: ActivationBudget) -> None:
    """Raises NoRoom where a rank takes more than it has room for."""
    for rank in range(schedule.num_ranks):
        needed = sum(allocated_bytes(schedule, rank, activation_budget.memory))
        if needed > activation_budget.room_bytes[rank]:
            words = (
                f"needs {activation_budget.memory.with_unit(needed)} but has room for "
                f"{activation_budget.memory.with_unit(activation_budget.room_bytes[rank])}"
            )
            raise BudgetTooSmall((rank, rank), f"rank {rank}, which hosts for others, {words}")


def _hosts(used: Sequence[set[Host]]) -> Hosts:
    """Return the pairs where each rank has to do with one other device at most, and none with host memory.

    Host memory stands behind all devices.
    """
    others = [
        {host.rank for host in hosts} | {guest for guest, of in enumerate(used) if Host(rank) in of}
        for rank, hosts in enumerate(used)
    ]
    if all(len(of_rank) < 2 for of_rank in others) and all(host.on_device for hosts in used for host in hosts):
        return in_pairs([min(of_rank, default=rank) for rank, of_rank in enumerate(others)])
    return tuple(tuple(sorted(of_rank, key=lambda host: (host.tier, host.rank))) for of_rank in used)
