"""Give every micro-batch that is away a host buffer. In: a Schedule and a rank. Out: which buffer each hosting takes.

A buffer is taken from the start of the HOST's slot in the grid to the end of the RETURN's, so a buffer returned in a
slot is free only in the next. A rank that hosts for several has buffers of its own for each: whoever fills one never
has to wait for somebody it does not know. What a rank keeps in its own host memory has buffers there, each taken from
its EVICT's slot to its LOAD's. Both ends of a pair compute this, each on its own: same schedule, same answer. Knows no
tensors, no bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from bpipe.schedule.action import Action, Key, Kind
from bpipe.schedule.hosts import Host, Pair, device_ranks, host_memory_of
from bpipe.schedule.schedule import Schedule, Slot


class Residency(NamedTuple):
    """One stay of a micro-batch on its acceptor: `nth` counts the stays of this micro-batch of this (the evictor's)
    stage from 0."""

    stage: int
    microbatch: int
    nth: int

    @property
    def key(self) -> Key:
        """Return what names the activations that stay."""
        return self.stage, self.microbatch


class Residencies:
    """Say of each of one rank's transfers, asked in their order, which residency it begins or ends."""

    def __init__(self) -> None:
        self._nth: dict[Key, int] = {}

    def of(self, action: Action) -> Residency:
        """Return the residency. What ends before it began has `nth` -1, which no residency has."""
        key = action.key
        nth = self._nth.get(key, -1)
        if action.kind is Kind.EVICT or action.kind is Kind.HOST:
            nth = self._nth[key] = nth + 1
        return Residency(*key, nth)


def slots_away(transfers: Iterable[tuple[int, Sequence[Action]]]) -> dict[Residency, range]:
    """Return the slots in which all that leaves a rank is away, from its EVICT's to its LOAD's, both among them.

    In the order in which it comes back. `transfers`: those of the rank by slot, ascending.
    """
    residencies = Residencies()
    left: dict[Residency, int] = {}
    away: dict[Residency, range] = {}
    for slot, actions in transfers:
        for action in actions:
            if action.kind is Kind.EVICT:
                left[residencies.of(action)] = slot
            elif action.kind is Kind.LOAD:
                residency = residencies.of(action)
                away[residency] = range(left[residency], slot + 1)
    return away


def host_buffers(schedule: Schedule, rank: int) -> dict[Residency, int]:
    """Return the host buffer of every residency on `rank`, in the order in which they begin: the fewest there can be,
    numbered from 0.

    Each of several ranks that it hosts for has numbers of its own.
    """
    return _numbered(schedule.ranks[rank], (Kind.HOST, Kind.RETURN), schedule.layout.rank_of)


def host_memory_buffers(schedule: Schedule, rank: int) -> dict[Residency, int]:
    """Return the own host buffer of everything that a rank keeps in its own host memory."""
    if schedule.hosts is None or host_memory_of(rank) not in schedule.hosts[rank]:
        return {}
    mine = {residency for residency, host in hosts_of(schedule, rank).items() if not host.on_device}
    return _numbered(schedule.ranks[rank], (Kind.EVICT, Kind.LOAD), schedule.layout.rank_of, mine)


def buffers_at(schedule: Schedule, host: Host) -> dict[Residency, int]:
    """Return the host buffers on a device to which others send, or in a rank's own host memory."""
    return (host_buffers if host.on_device else host_memory_buffers)(schedule, host.rank)


def all_buffers(schedule: Schedule, rank: int) -> dict[Residency, int]:
    """Return the host buffer, wherever it is, of everything that leaves a rank or comes to it."""
    hosts = hosts_of(schedule, rank)
    there = {host: buffers_at(schedule, host) for host in set(hosts.values())}
    return host_buffers(schedule, rank) | {residency: there[host][residency] for residency, host in hosts.items()}


def _numbered(
    row: Sequence[Slot],
    kinds: tuple[Kind, Kind],
    guest_of: Callable[[int, int], int],
    only: Container[Residency] | None = None,
) -> dict[Residency, int]:
    """Return the buffer of every residency that begins and ends with these kinds, or of some of them with `only`."""
    begins, _ = kinds
    assigned: dict[Residency, int] = {}
    residencies = Residencies()
    # By the rank it hosts for.
    free: dict[int, list[int]] = {}
    num_buffers = 0
    for slot in row:
        returned = []
        for action in slot.transfers:
            if action.kind not in kinds:
                continue
            residency = residencies.of(action)
            if only is not None and residency not in only:
                continue
            guest = guest_of(action.stage, action.microbatch)
            if action.kind is begins:
                empty = free.setdefault(guest, [])
                if empty:
                    assigned[residency] = heapq.heappop(empty)
                else:
                    assigned[residency] = num_buffers
                    num_buffers += 1
            else:
                returned.append((guest, assigned[residency]))
        for evictor, index in returned:
            heapq.heappush(free[evictor], index)
    return assigned


def evicted_to(schedule: Schedule, rank: int) -> Iterator[Host]:
    """Yield the host of each eviction of a rank, in order."""
    hosts = () if schedule.hosts is None else schedule.hosts[rank]
    if len(hosts) == 1:
        return repeat(hosts[0])
    return _evicted_to_one_of(device_ranks(hosts), schedule, rank)


def _evicted_to_one_of(devices: Sequence[int], schedule: Schedule, rank: int) -> Iterator[Host]:
    hosts, own = [Host(one) for one in devices], host_memory_of(rank)
    for slot, cell in enumerate(schedule.ranks[rank]):
        for action in cell.transfers:
            if action.kind is Kind.EVICT:
                other = Action(action.stage, Kind.HOST, action.microbatch)
                yield next((host for host in hosts if other in schedule.ranks[host.rank][slot].transfers), own)


def hosts_of(schedule: Schedule, evictor: int) -> dict[Residency, Host]:
    """Return the host of everything that leaves a rank, in that order."""
    residencies, host_of_next = Residencies(), evicted_to(schedule, evictor)
    return {
        residencies.of(action): next(host_of_next)
        for slot in schedule.ranks[evictor]
        for action in slot.transfers
        if action.kind is Kind.EVICT
    }


def residencies_by_host(schedule: Schedule, evictor: int) -> dict[Host, list[Residency]]:
    """Return what leaves for each host of a rank, in order; hosts ascend."""
    found: dict[Host, list[Residency]] = {}
    for residency, host in hosts_of(schedule, evictor).items():
        found.setdefault(host, []).append(residency)
    return dict(sorted(found.items()))


def links_of(schedule: Schedule) -> set[Pair]:
    """Return the links of all that is evicted."""
    return {(rank, host.rank) for rank in range(schedule.num_ranks) for host in hosts_of(schedule, rank).values()}


def guests_of(schedule: Schedule, host: int) -> tuple[int, ...]:
    """Return the ranks whose activations a rank hosts, ascending."""
    hosted = (one for slot in schedule.ranks[host] for one in slot.transfers if one.kind is Kind.HOST)
    return tuple(sorted({schedule.layout.rank_of(one.stage, one.microbatch) for one in hosted}))


def num_buffers_for(schedule: Schedule, host: int) -> dict[int, int]:
    """Return how many host buffers a rank has for each rank whose activations it hosts; ranks ascend."""
    rank_of = schedule.layout.rank_of
    taken: dict[int, set[int]] = {}
    for residency, buffer in host_buffers(schedule, host).items():
        taken.setdefault(rank_of(residency.stage, residency.microbatch), set()).add(buffer)
    return {guest: len(buffers) for guest, buffers in sorted(taken.items())}


def num_measured(schedule: Schedule, evictor: int, host: Host) -> dict[Residency, int]:
    """Return, for everything that leaves a rank for a host, how many of its evicted stages have run a forward before.

    A stage is measured by its first forward: the host can and must know so many sizes by then.
    """
    row = schedule.ranks[evictor]
    of_host = {residency for residency, where in hosts_of(schedule, evictor).items() if where == host}
    unmeasured = {residency.stage for residency in of_host}
    count = 0
    measured: dict[Residency, int] = {}
    residencies = Residencies()
    for slot in row if unmeasured else ():
        for action in slot.transfers:
            if action.kind is Kind.EVICT:
                residency = residencies.of(action)
                if residency in of_host:
                    measured[residency] = count
        for one in slot.computations if unmeasured else ():
            if one.kind is Kind.FORWARD and one.stage in unmeasured:
                unmeasured.remove(one.stage)
                count += 1
    return measured


def num_host_buffers(schedule: Schedule, rank: int) -> int:
    """Return how many host buffers the rank has to preallocate on its device."""
    return len(set(host_buffers(schedule, rank).values()))


def num_host_memory_buffers(schedule: Schedule, rank: int) -> int:
    """Return how many host buffers the rank has to preallocate in its own host memory."""
    return max(host_memory_buffers(schedule, rank).values(), default=-1) + 1


def stages_in_buffers(hosted: Mapping[Residency, int]) -> tuple[frozenset[int], ...]:
    """Return the stages whose micro-batches each host buffer of a rank ever holds.

    `hosted`: result of `host_buffers`.
    """
    held: list[set[int]] = [set() for _ in range(max(hosted.values(), default=-1) + 1)]
    for residency, buffer in hosted.items():
        held[buffer].add(residency.stage)
    return tuple(map(frozenset, held))
