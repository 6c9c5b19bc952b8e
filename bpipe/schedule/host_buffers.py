"""Host buffers: which buffer each micro-batch takes while it is away from its rank.

A buffer is taken from the start of the HOST's slot in the grid to the end of the RETURN's, so a buffer returned in a
slot is free only in the next. A rank that hosts for several ranks has separate buffers for each: no evictor then waits
for another. What a rank keeps in its own host memory has buffers there, each taken from its EVICT's slot to its LOAD's.
Both ends of a pair compute this from the same schedule.
"""

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from bpipe.schedule.action import Action, Key, Kind
from bpipe.schedule.hosts import Host, Pair, device_ranks, host_memory_of
from bpipe.schedule.schedule import Schedule, Slot


class Residency(NamedTuple):
    """One stay of a micro-batch on its host: the `nth`, from 0, of this micro-batch of this (the evictor's) stage."""

    stage: int
    microbatch: int
    nth: int

    @property
    def key(self) -> Key:
        """The stage and micro-batch whose activations stay."""
        return self.stage, self.microbatch


class Residencies:
    """Finds the residency that each of one rank's transfers begins or ends, if asked in their order."""

    def __init__(self) -> None:
        self._nth: dict[Key, int] = {}

    def of(self, action: Action) -> Residency:
        """Return the residency. A transfer that ends one before any began gets `nth` -1, which no residency has."""
        key = action.key
        nth = self._nth.get(key, -1)
        if action.kind is Kind.EVICT or action.kind is Kind.HOST:
            nth = self._nth[key] = nth + 1
        return Residency(*key, nth)


def slots_away(transfers: Iterable[tuple[int, Sequence[Action]]]) -> dict[Residency, range]:
    """Return the slots in which each residency is away, from its EVICT's to its LOAD's inclusive, in order of return.

    Args:
        transfers: Transfers of the rank by slot, ascending.
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
    """Return the host buffer of every residency on `rank`, in the order in which they begin.

    Buffers are numbered from 0 and as few as possible; each rank that it hosts for has numbers of its own.
    """
    return _numbered(schedule.ranks[rank], (Kind.HOST, Kind.RETURN), schedule.layout.rank_of)


def host_memory_buffers(schedule: Schedule, rank: int) -> dict[Residency, int]:
    """Return the host buffer of every residency in the rank's own host memory."""
    if schedule.hosts is None or host_memory_of(rank) not in schedule.hosts[rank]:
        return {}
    own = {residency for residency, host in hosts_of(schedule, rank).items() if not host.on_device}
    return _numbered(schedule.ranks[rank], (Kind.EVICT, Kind.LOAD), schedule.layout.rank_of, own)


def buffers_at(schedule: Schedule, host: Host) -> dict[Residency, int]:
    """Return the host buffers of a device, or of a rank's own host memory."""
    return (host_buffers if host.on_device else host_memory_buffers)(schedule, host.rank)


def _numbered(
    row: Sequence[Slot],
    kinds: tuple[Kind, Kind],
    guest_of: Callable[[int, int], int],
    only: Container[Residency] | None = None,
) -> dict[Residency, int]:
    """Return the buffer of every residency that begins and ends with `kinds`, or of those in `only`."""
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
            guest = guest_of(*action.key)
            if action.kind is kinds[0]:
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
        yield from repeat(hosts[0])
    devices, own = [Host(device) for device in device_ranks(hosts)], host_memory_of(rank)
    for slot, action in schedule.transfers(rank):
        if action.kind is Kind.EVICT:
            other_end = Action(action.stage, Kind.HOST, action.microbatch)
            yield next((host for host in devices if other_end in schedule.ranks[host.rank][slot].transfers), own)


def hosts_of(schedule: Schedule, evictor: int) -> dict[Residency, Host]:
    """Return the host of each residency of what a rank evicts, in order."""
    residencies, host_of_next = Residencies(), evicted_to(schedule, evictor)
    return {
        residencies.of(action): next(host_of_next)
        for _, action in schedule.transfers(evictor)
        if action.kind is Kind.EVICT
    }


def residencies_by_host(schedule: Schedule, evictor: int) -> dict[Host, list[Residency]]:
    """Return what leaves for each host of a rank, in order; hosts ascend."""
    residencies: dict[Host, list[Residency]] = {}
    for residency, host in hosts_of(schedule, evictor).items():
        residencies.setdefault(host, []).append(residency)
    return dict(sorted(residencies.items()))


def links_of(schedule: Schedule) -> set[Pair]:
    """Return the (evictor, host) links of all evictions."""
    return {(rank, host.rank) for rank in range(schedule.num_ranks) for host in hosts_of(schedule, rank).values()}


def guests_of(schedule: Schedule, host: int) -> tuple[int, ...]:
    """Return the ranks whose activations a rank hosts, ascending."""
    hosted = (action for _, action in schedule.transfers(host) if action.kind is Kind.HOST)
    return tuple(sorted({schedule.layout.rank_of(*action.key) for action in hosted}))


def num_buffers_for(schedule: Schedule, host: int) -> dict[int, int]:
    """Return how many host buffers a rank has for each rank whose activations it hosts; ranks ascend."""
    taken: dict[int, set[int]] = {}
    for residency, buffer in host_buffers(schedule, host).items():
        taken.setdefault(schedule.layout.rank_of(*residency.key), set()).add(buffer)
    return {guest: len(buffers) for guest, buffers in sorted(taken.items())}


def num_measured(schedule: Schedule, evictor: int, host: Host) -> dict[Residency, int]:
    """Return, for each residency of a rank's on a host, how many of the rank's evicted stages have run a forward by
    then.

    A stage is measured by its first forward, so the host can know that many sizes by then.
    """
    of_host = {residency for residency, where in hosts_of(schedule, evictor).items() if where == host}
    unmeasured = {residency.stage for residency in of_host}
    count = 0
    measured: dict[Residency, int] = {}
    residencies = Residencies()
    for slot in schedule.ranks[evictor] if of_host else ():
        for action in slot.transfers:
            if action.kind is Kind.EVICT and (residency := residencies.of(action)) in of_host:
                measured[residency] = count
        for action in slot.computations:
            if action.kind is Kind.FORWARD and action.stage in unmeasured:
                unmeasured.remove(action.stage)
                count += 1
    return measured


def num_host_buffers(schedule: Schedule, rank: int) -> int:
    """Return how many host buffers the rank has to preallocate on its device."""
    return len(set(host_buffers(schedule, rank).values()))


def num_host_memory_buffers(schedule: Schedule, rank: int) -> int:
    """Return how many host buffers the rank has to preallocate in its own host memory."""
    return max(host_memory_buffers(schedule, rank).values(), default=-1) + 1


def stages_in_buffers(hosted: Mapping[Residency, int]) -> tuple[frozenset[int], ...]:
    """Return the stages whose micro-batches each host buffer of a rank ever holds, from the result of
    `host_buffers`."""
    stages: list[set[int]] = [set() for _ in range(max(hosted.values(), default=-1) + 1)]
    for residency, buffer in hosted.items():
        stages[buffer].add(residency.stage)
    return tuple(map(frozenset, stages))
