"""Evict to any rank with room, to the own node's memory, or to both.

What counts is what `budget` counts. A rank that holds more than it has room for sends only what must leave, so no
choice of hosts changes the bytes that move; every other rank may host, for several, and a rank that sends may have
several hosts. No rank sends only to make room for what comes from another: if sizes differ, rooms that need such a plan
are refused. Among all choices, the one is taken that moves the fewest bytes between nodes, and then over the shortest
distances (`pack`).

If other devices come first and the own node's memory second, as few bytes as possible go to the latter: the
micro-batches that stay away longest do, while more of them are away than a rank has host buffers on devices. That is
exact if all micro-batches of a rank have one size. Transfers of one slot are in one order on all ranks, so none waits
for another in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall, Parts, check_rooms, less_moved, smallest_level
from bpipe.balance.pairs import (
    Plan,
    allocated_bytes,
    check_input,
    choose_partners,
    moved_bytes,
    plan_rank,
    with_transfers,
)
from bpipe.schedule.action import Kind
from bpipe.schedule.host_buffers import Residencies, Residency, host_buffers, slots_away
from bpipe.schedule.hosts import ALL, HOST, POOL, Host, Hosts, host_memory_of, in_pairs
from bpipe.schedule.memory import Memory, counting, live_bytes, peak_counts
from bpipe.schedule.schedule import Schedule

# Most steps to find a packing, and to find a cheaper one.
_MOST_STEPS = 50_000
_STEPS_TO_IMPROVE = 5_000

# Cost of a byte between nodes. Less than it: the sum of bytes times distances.
APART = 1 << 96


def plan_overfull_ranks(schedule: Schedule, budget: ActivationBudget) -> tuple[dict[int, Plan], list[int]]:
    """Return the plan of each rank that lacks room, and what every rank has to spare, below 0 if it lacks room.

    Raises BudgetTooSmall if no plan keeps a rank within its room.
    """
    check_rooms(schedule, budget)
    memory = budget.memory
    peaks = [max(live_bytes(schedule, rank, memory), default=0) for rank in range(schedule.num_ranks)]
    spare = [room - peak for room, peak in zip(budget.room_bytes, peaks, strict=True)]
    plans: dict[int, Plan] = {}
    for rank in (rank for rank, left in enumerate(spare) if left < 0):
        plan = plan_rank(schedule, rank, budget.room_bytes[rank], memory)
        if isinstance(plan, str):
            raise BudgetTooSmall((rank, rank), plan)
        plans[rank] = plan
    return plans, spare


def fewest_sent(
    schedule: Schedule, budget: ActivationBudget, parts: Parts, attempt: Callable[[ActivationBudget], object]
) -> ActivationBudget:
    """Return the budget with parts of micro-batches of which the fewest bytes leave each rank, if `attempt`
    succeeds."""
    memory = budget.memory
    for rank, room in enumerate(budget.room_bytes):
        if max(live_bytes(schedule, rank, memory), default=0) > room:
            memory = _fewest_of(schedule, rank, room, memory, parts)
    less = replace(budget, memory=memory)
    try:
        attempt(less)
    except BudgetTooSmall:
        return budget
    return less


def _fewest_of(schedule: Schedule, rank: int, room: int, memory: Memory, parts: Parts) -> Memory:
    best: tuple[int, Memory] | None = None
    for tried in (memory, *less_moved(schedule, [rank], memory, parts)):
        plan = plan_rank(schedule, rank, room, tried)
        if isinstance(plan, str):
            continue
        evicted = (action for actions in plan.values() for action in actions if action.kind is Kind.EVICT)
        moved = sum(tried.size(*action.key).moved_bytes for action in evicted)
        if best is None or moved < best[0]:
            best = moved, tried
    return memory if best is None else best[1]


def _hosted(
    schedule: Schedule, plans: Mapping[int, Plan], spare: Sequence[int], nodes: Sequence[int], memory: Memory
) -> dict[Residency, Host]:
    """Return the host of each micro-batch that leaves: one for all that pass through one host buffer."""
    through: dict[tuple[int, int], list[Residency]] = {}
    for rank, plan in plans.items():
        for residency, buffer in _as_on_one_host(schedule, rank, plan).items():
            through.setdefault((rank, buffer), []).append(residency)
    items = [
        Item(rank, memory.buffer_bytes({stay.stage for stay in residencies}), moved_bytes(residencies, memory))
        for (rank, _), residencies in through.items()
    ]
    hosts = pack(items, [0 if rank in plans else left for rank, left in enumerate(spare)], distances(schedule, nodes))
    if hosts is None:
        raise _no_room(items, spare, memory)
    hosted = zip(through.values(), hosts, strict=True)
    return {stay: Host(host) for residencies, host in hosted if host is not None for stay in residencies}


def _as_on_one_host(schedule: Schedule, rank: int, plan: Plan) -> dict[Residency, int]:
    """Return the host buffers of everything that leaves a rank, if one other rank hosted it all."""
    host = (rank + 1) % schedule.num_ranks
    rows = list(schedule.ranks)
    rows[host] = with_transfers(rows[host], plan, own=False)
    return host_buffers(replace(schedule, ranks=tuple(rows)), host)


def distances(schedule: Schedule, nodes: Sequence[int]) -> Callable[[int, int], int]:
    """Return the cost of a byte between ranks: `APART` between nodes, and the distance, 0 for a usual partner."""
    usual = choose_partners(schedule, None)

    def cost(rank: int, host: int) -> int:
        apart = bool(nodes) and nodes[rank] != nodes[host]
        return APART * apart + (0 if usual[rank] == host else abs(rank - host))

    return cost


def _no_room(items: Sequence[Item], spare: Sequence[int], memory: Memory) -> BudgetTooSmall:
    """Return the error, which names the rank that lacks most and the others' rooms."""
    ranks = sorted({item.owner for item in items})
    needs = {rank: sum(item.num_bytes for item in items if item.owner == rank) for rank in ranks}
    worst = max(needs, key=lambda rank: needs[rank])
    needed = ", ".join(f"rank {rank} {size}" for rank, size in needs.items())
    rooms = ", ".join(f"rank {rank} {left}" for rank, left in enumerate(spare) if left > 0)
    host_buffers = f"evicted memory needs host buffers ({needed} {memory.unit})"
    reason = f"{host_buffers}, more than the other ranks have room for ({rooms or 'no rank has any'})"
    return BudgetTooSmall((worst, worst), reason)


def with_hosts(
    schedule: Schedule, plans: Mapping[int, Plan], host_of: Mapping[Residency, Host], budget: ActivationBudget
) -> Schedule:
    """Return the schedule with these transfers, each to its residency's host. Bounds are the counts that result.

    On every rank the transfers of one slot are in the order of their senders.

    Args:
        schedule: The schedule without transfers.
        plans: The evictions and loads, by evicting rank.
        host_of: The host of each residency.
        budget: The bytes that every rank has room for.

    Raises:
        BudgetTooSmall: A rank has too little room.
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
                    ends.append((rows[host.rank], action.other_end))
                for row, end in ends:
                    row[slot] = replace(row[slot], transfers=(*row[slot].transfers, end))
    hosted, memory = replace(schedule, ranks=tuple(map(tuple, rows)), hosts=_hosts(used)), budget.memory
    for rank, room in enumerate(budget.room_bytes):
        needed = sum(allocated_bytes(hosted, rank, memory))
        if needed > room:
            sizes = f"needs {needed} {memory.unit} but has room for {room} {memory.unit}"
            raise BudgetTooSmall((rank, rank), f"rank {rank}, which hosts for others, {sizes}")
    return replace(hosted, bounds=peak_counts(hosted))


def _hosts(used: Sequence[set[Host]]) -> Hosts:
    """Return pairs if each rank deals with at most one other device and none with host memory, else all hosts, devices
    first."""
    others = [
        {host.rank for host in hosts} | {guest for guest, of in enumerate(used) if Host(rank) in of}
        for rank, hosts in enumerate(used)
    ]
    if all(len(of_rank) < 2 for of_rank in others) and all(host.on_device for hosts in used for host in hosts):
        return in_pairs([min(of_rank, default=rank) for rank, of_rank in enumerate(others)])
    return tuple(tuple(sorted(of_rank, key=lambda host: (host.tier, host.rank))) for of_rank in used)


def balance_over_hosts(schedule: Schedule, hosts: str, budget: ActivationBudget, nodes: Sequence[int] = ()) -> Schedule:
    """Balance over hosts other than pairs, with only those transfers without which some rank lacks room.

    Args:
        schedule: The schedule without transfers.
        hosts: `pool`, any rank with room; `host`, the rank's own node's memory, which is taken to have room; `all`,
            ranks with room, as in a pool, and the rest to that memory.
        budget: The bytes that every rank has room for.
        nodes: By rank, its node; empty if all are on one.

    Returns:
        The schedule with its transfers. Bounds are the counts that result.

    Raises:
        BudgetTooSmall: The ranks have too little room.
    """
    plans, spare = plan_overfull_ranks(schedule, budget)
    if hosts == HOST:
        host_of = {residency: host_memory_of(rank) for rank, plan in plans.items() for residency in _away(plan)}
    elif hosts == ALL:
        host_of = _in_tiers(schedule, plans, spare, nodes, budget.memory)
    elif plans and schedule.num_ranks == 1:
        raise BudgetTooSmall((0, 0), "rank 0 has no room for its own micro-batches, and no other rank to host them")
    else:
        host_of = _hosted(schedule, plans, spare, nodes, budget.memory)
    return with_hosts(schedule, plans, host_of, budget)


def balance_over_hosts_within(
    schedule: Schedule, hosts: str, bounds: Sequence[int] | None, nodes: Sequence[int] = ()
) -> Schedule:
    """Balance over hosts within counts of chunk micro-batches, with host buffers counted all the time.

    Args:
        schedule: The schedule without transfers.
        hosts: `pool`, `host` or `all`, as of `--hosts`.
        bounds: By rank; by default the smallest bound that all ranks can keep.
        nodes: By rank, its node; empty if all are on one.

    Returns:
        The schedule with its transfers.

    Raises:
        ValueError: Bounds cannot be kept; names the smallest that can.
    """
    memory = counting(schedule.num_stages)

    def within(limits: Sequence[int]) -> Schedule:
        budget = ActivationBudget(tuple(limits), memory)
        return replace(balance_over_hosts(schedule, hosts, budget, nodes), bounds=tuple(limits))

    def smallest() -> int:
        limit = max(peak_counts(schedule)) - 1
        return smallest_level(lambda bound: within((bound,) * schedule.num_ranks), limit)[0]

    if bounds is None:
        return within((smallest(),) * schedule.num_ranks)
    try:
        check_input(schedule, bounds, memory)
        return within(bounds)
    except BudgetTooSmall as error:
        least = f"The smallest bound found that {_NAMES[hosts]} keeps for all ranks is {smallest()} {memory.unit}"
        raise ValueError(f"{error}. {least}") from None


def _in_tiers(
    schedule: Schedule, plans: Mapping[int, Plan], spare: Sequence[int], nodes: Sequence[int], memory: Memory
) -> dict[Residency, Host]:
    """Return the host of each micro-batch that leaves: any rank with room, else its own node's memory."""
    room = [0 if rank in plans else left for rank, left in enumerate(spare)]
    buffers = [item for rank, plan in plans.items() for item in _buffers(rank, plan, room, memory)]
    cost = distances(schedule, nodes)
    hosts = pack(buffers, room, cost, own_memory=True)
    assert hosts is not None, "own memory has room for all"
    host_of: dict[Residency, Host] = {}
    for rank, plan in plans.items():
        own = [host for item, host in zip(buffers, hosts, strict=True) if item.owner == rank and host is not None]
        # The buffer through which most passes is the nearest.
        nearest = sorted(own, key=lambda host: (cost(rank, host), host))
        away = _away(plan)
        through = sorted(_through(away, len(nearest)), key=lambda stays: -moved_bytes(stays, memory))
        host_of |= dict.fromkeys(away, host_memory_of(rank))
        for host, stays in zip(nearest, through, strict=True):
            host_of |= dict.fromkeys(stays, Host(host))
    return host_of


_NAMES = {POOL: "a pool", HOST: "CPU memory", ALL: "a pool backed by CPU memory"}


def _away(plan: Plan) -> dict[Residency, range]:
    """Return the slots in which each residency is away, in the order in which they leave."""
    away = slots_away(sorted(plan.items()))
    return dict(sorted(away.items(), key=lambda item: (item[1].start, item[1].stop, item[0])))


def _buffers(rank: int, plan: Plan, room: Sequence[int], memory: Memory) -> list[Item]:
    """Return the host buffers that a rank can use and others have room for, each with the bytes that it adds."""
    away = _away(plan)
    size = memory.buffer_bytes({residency.stage for residency in away})
    buffers: list[Item] = []
    passing, limit = 0, sum(left // size for left in room)
    while len(buffers) < limit:
        more = sum(moved_bytes(stays, memory) for stays in _through(away, len(buffers) + 1)) - passing
        if more <= 0:
            break
        buffers.append(Item(rank, size, more))
        passing += more
    return buffers


def _through(away: Mapping[Residency, range], num_buffers: int) -> list[list[Residency]]:
    """Return the residencies of each buffer, as many as possible; a buffer is free in the slot after a load's."""
    full: list[tuple[Residency, list[Residency]]] = []
    buffers: list[list[Residency]] = [[] for _ in range(num_buffers)]
    for residency, slots in away.items():
        full = [(stay, buffer) for stay, buffer in full if away[stay].stop > slots.start]
        empty = [buffer for buffer in buffers if not any(buffer is other for _, other in full)]
        if empty:
            full.append((residency, empty[0]))
            empty[0].append(residency)
        elif full:
            # Too many at once: without the one that is away longest there is a buffer for each of the others.
            last, buffer = max(full, key=lambda entry: away[entry[0]].stop)
            if away[last].stop > slots.stop:
                full = [entry for entry in full if entry[0] is not last]
                buffer.remove(last)
                full.append((residency, buffer))
                buffer.append(residency)
    return buffers


class Item(NamedTuple):
    """A host buffer of `num_bytes` for rank `owner`, through which `moved_bytes` pass in an iteration."""

    owner: int
    num_bytes: int
    moved_bytes: int


def pack(
    items: Sequence[Item], spare_bytes: Sequence[int], cost: Callable[[int, int], int], own_memory: bool = False
) -> list[int | None] | None:
    """Return the rank with room that takes each item, or None if no packing was found.

    The search is exact if it ends within its limits, as it does at small sizes and whenever all items have one size: it
    then finds a packing if there is one, and the cheapest. Beyond the limits it keeps the first one found, nearest
    hosts first. If items may stay with their owners, it minimises the bytes that pass through host memory.

    Args:
        items: What is to be hosted, with its owner and bytes.
        spare_bytes: By rank, the bytes that it has room for.
        cost: Cost of one byte, by owner and host.
        own_memory: Whether an item for which no rank has room goes to its owner's host memory, given as None. That
            holds any, and a byte there costs more than all others elsewhere.
    """
    order = sorted(
        range(len(items)), key=lambda index: (-items[index].num_bytes, items[index].owner, -items[index].moved_bytes)
    )
    spare, num_ranks = list(spare_bytes), len(spare_bytes)
    if own_memory:
        # The item through which most passes is placed first, and the host after all ranks has room for all.
        order.sort(key=lambda index: -items[index].moved_bytes)
        spare.append(sum(item.num_bytes for item in items))
    above_all = APART * (1 + sum(item.moved_bytes for item in items))
    search = _Search(
        [items[index] for index in order],
        spare,
        lambda owner, host: above_all if host == num_ranks else cost(owner, host),
    )
    search.place(0, 0, 0)
    if search.best is None:
        return None
    hosts: list[int | None] = [None] * len(items)
    for index, host in zip(order, search.best, strict=True):
        hosts[index] = None if host == num_ranks else host
    return hosts


class _Search:
    """Depth-first search, largest items and nearest hosts first, without branches that cannot become cheaper."""

    def __init__(self, items: Sequence[Item], free: list[int], cost: Callable[[int, int], int]) -> None:
        self.items, self.free = items, free
        self.chosen: list[int] = []
        self.best: list[int] | None = None
        self.best_cost: int | None = None
        self.steps = 0
        self.seen: dict[tuple[int, int, tuple[int, ...]], int] = {}
        # By item: (cost of a byte, host), cheapest first.
        self.options = [
            sorted((cost(item.owner, host), host) for host in range(len(free)) if host != item.owner) for item in items
        ]
        # Least cost of all items from each on.
        least = [
            item.moved_bytes * next((price for price, host in options if free[host] >= item.num_bytes), 0)
            for item, options in zip(items, self.options, strict=True)
        ]
        self.least = list(accumulate(reversed(least), initial=0))[::-1]
        # Number of items from each on that have its size.
        self.alike = [
            sum(other.num_bytes == item.num_bytes for other in items[place:]) for place, item in enumerate(items)
        ]

    def place(self, index: int, spent: int, first: int) -> None:
        """Place the items from `index` on, the first no nearer than its owner's option `first`."""
        if self.best_cost is not None and (
            self.steps > _STEPS_TO_IMPROVE or spent + self.least[index] >= self.best_cost
        ):
            return
        if index == len(self.items):
            self.best, self.best_cost = list(self.chosen), spent
            return
        self.steps += 1
        item, options = self.items[index], self.options[index]
        if self._leads_nowhere(index, spent, first):
            return
        following = self.items[index + 1] if index + 1 < len(self.items) else None
        again = following is not None and following[:2] == item[:2]
        for number in range(first, len(options)):
            price, host = options[number]
            if self.free[host] < item.num_bytes:
                continue
            self.free[host] -= item.num_bytes
            self.chosen.append(host)
            # Of equal items, the one through which more passes comes first, and is nearer.
            self.place(index + 1, spent + price * item.moved_bytes, number if again else 0)
            self.chosen.pop()
            self.free[host] += item.num_bytes

    def _leads_nowhere(self, index: int, spent: int, first: int) -> bool:
        """Note the cost, and tell whether the search is over, was here at no higher cost, or has no room for all of
        this size."""
        state = (index, first, tuple(self.free))
        before = self.seen.get(state)
        if self.steps > _MOST_STEPS or (before is not None and before <= spent):
            return True
        self.seen[state] = spent
        size = self.items[index].num_bytes
        return bool(size) and sum(room // size for room in self.free if room > 0) < self.alike[index]
