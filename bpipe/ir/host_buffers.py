"""Give every micro-batch that is away a host buffer. In: a Schedule and a rank. Out: which buffer each hosting takes.

A buffer is taken from the start of the HOST's slot in the grid to the end of the RETURN's, so a buffer returned in a slot is free only in
the next. A rank that hosts for several has buffers of its own for each: whoever fills one never has to wait for somebody it does not know.
What a rank keeps in its own host memory has buffers there, each taken from its EVICT's slot to its LOAD's.
Both ends of a pair compute this, each on its own: same schedule, same answer. Knows no tensors, no bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from bpipe.ir.action import Action, Kind
from bpipe.ir.hosts import OWN_MEMORY, other_ranks
from bpipe.ir.schedule import Schedule, Slot


class Hosting(NamedTuple):
    """One stay of a micro-batch on its acceptor: `nth` counts the stays of this micro-batch of this (the evictor's) stage from 0."""

    stage: int
    microbatch: int
    nth: int


def host_buffers(schedule: Schedule, rank: int) -> dict[Hosting, int]:
    """The host buffer of every hosting on `rank`, in the order in which they begin. Uses the fewest there can be, numbered from 0.

    Of several ranks that it hosts for each has its own numbers.
    """
    return _numbered(schedule.ranks[rank], (Kind.HOST, Kind.RETURN), schedule.layout.rank_of)


def own_buffers(schedule: Schedule, rank: int) -> dict[Hosting, int]:
    """The same of all that a rank keeps in its own host memory."""
    if schedule.hosts is None or OWN_MEMORY not in schedule.hosts[rank]:
        return {}
    mine = {stay for stay, host in hosts_of(schedule, rank).items() if host == rank}
    return _numbered(schedule.ranks[rank], (Kind.EVICT, Kind.LOAD), schedule.layout.rank_of, mine)


def buffers_at(schedule: Schedule, host: int, evictor: int) -> dict[Hosting, int]:
    """The host buffers on the rank to which another sends, or in own host memory where it is the same one."""
    return own_buffers(schedule, host) if host == evictor else host_buffers(schedule, host)


def buffers_met(schedule: Schedule, rank: int) -> dict[Hosting, int]:
    """By all that leaves a rank or comes to it from others: its host buffer, wherever that is."""
    hosts = hosts_of(schedule, rank)
    there = {host: buffers_at(schedule, host, rank) for host in set(hosts.values())}
    return host_buffers(schedule, rank) | {stay: there[host][stay] for stay, host in hosts.items()}


def _numbered(
    row: Sequence[Slot], kinds: tuple[Kind, Kind], guest_of: Callable[[int, int], int], only: Container[Hosting] | None = None
) -> dict[Hosting, int]:
    """The buffer of every stay that begins and ends with these kinds; `only` some of them."""
    begins, ends = kinds
    assigned: dict[Hosting, int] = {}
    stays: dict[tuple[int, int], Hosting] = {}
    # By the rank it hosts for.
    free: dict[int, list[int]] = {}
    num_buffers = 0
    for slot in row:
        returned = []
        for action in slot.transfers:
            key = (action.stage, action.microbatch)
            if action.kind is begins:
                stay = stays[key] = Hosting(*key, stays[key].nth + 1 if key in stays else 0)
                if only is not None and stay not in only:
                    continue
                empty = free.setdefault(guest_of(*key), [])
                if empty:
                    assigned[stay] = heapq.heappop(empty)
                else:
                    assigned[stay] = num_buffers
                    num_buffers += 1
            elif action.kind is ends and stays[key] in assigned:
                returned.append((guest_of(*key), assigned[stays[key]]))
        for evictor, index in returned:
            heapq.heappush(free[evictor], index)
    return assigned


def evicted_to(schedule: Schedule, rank: int) -> Iterator[int]:
    """For each eviction of a rank, in order, the rank that hosts it: the rank itself for its own host memory."""
    hosts = () if schedule.hosts is None else schedule.hosts[rank]
    others = other_ranks(hosts)
    if len(hosts) == len(others) == 1:
        return repeat(others[0])
    return _evicted_to_one_of(others, schedule, rank)


def _evicted_to_one_of(hosts: Sequence[int], schedule: Schedule, rank: int) -> Iterator[int]:
    for slot, cell in enumerate(schedule.ranks[rank]):
        for action in cell.transfers:
            if action.kind is Kind.EVICT:
                other = Action(action.stage, Kind.HOST, action.microbatch)
                yield next((host for host in hosts if other in schedule.ranks[host][slot].transfers), rank)


def hosts_of(schedule: Schedule, evictor: int) -> dict[Hosting, int]:
    """By what leaves a rank, in that order: the rank that hosts it, the rank itself for its own host memory."""
    nth: dict[tuple[int, int], int] = {}
    found: dict[Hosting, int] = {}
    host_of_next = evicted_to(schedule, evictor)
    for slot in schedule.ranks[evictor]:
        for action in slot.transfers:
            if action.kind is Kind.EVICT:
                key = (action.stage, action.microbatch)
                nth[key] = nth.get(key, -1) + 1
                found[Hosting(*key, nth[key])] = next(host_of_next)
    return found


def stays_by_host(schedule: Schedule, evictor: int) -> dict[int, list[Hosting]]:
    """By host of a rank, ascending: what leaves for it, in order."""
    found: dict[int, list[Hosting]] = {}
    for stay, host in hosts_of(schedule, evictor).items():
        found.setdefault(host, []).append(stay)
    return dict(sorted(found.items()))


def links_of(schedule: Schedule) -> set[tuple[int, int]]:
    """Who sends, and to whom."""
    return {(rank, host) for rank in range(schedule.num_ranks) for host in hosts_of(schedule, rank).values()}


def guests_of(schedule: Schedule, host: int) -> tuple[int, ...]:
    """The ranks whose activations a rank hosts, ascending."""
    hosted = (one for slot in schedule.ranks[host] for one in slot.transfers if one.kind is Kind.HOST)
    return tuple(sorted({schedule.layout.rank_of(one.stage, one.microbatch) for one in hosted}))


def num_buffers_for(schedule: Schedule, host: int) -> dict[int, int]:
    """By rank whose activations a rank hosts, ascending: how many host buffers it has for it."""
    rank_of = schedule.layout.rank_of
    taken: dict[int, set[int]] = {}
    for stay, buffer in host_buffers(schedule, host).items():
        taken.setdefault(rank_of(stay.stage, stay.microbatch), set()).add(buffer)
    return {guest: len(buffers) for guest, buffers in sorted(taken.items())}


def num_measured(schedule: Schedule, evictor: int, host: int) -> dict[Hosting, int]:
    """By what leaves a rank for a host, in that order: how many of its stages that ever do have run a forward before it leaves.

    By its first forward a stage is measured: so many sizes the host can know by then, and must.
    """
    row = schedule.ranks[evictor]
    of_host = {stay for stay, where in hosts_of(schedule, evictor).items() if where == host}
    unmeasured = {stay.stage for stay in of_host}
    count = 0
    measured: dict[Hosting, int] = {}
    stays: dict[tuple[int, int], int] = {}
    for slot in row if unmeasured else ():
        for action in slot.transfers:
            if action.kind is Kind.EVICT:
                key = (action.stage, action.microbatch)
                stays[key] = stays.get(key, -1) + 1
                if Hosting(*key, stays[key]) in of_host:
                    measured[Hosting(*key, stays[key])] = count
        for one in slot.computations if unmeasured else ():
            if one.kind is Kind.FORWARD and one.stage in unmeasured:
                unmeasured.remove(one.stage)
                count += 1
    return measured


def num_host_buffers(schedule: Schedule, rank: int) -> int:
    """How many host buffers the rank has to preallocate on its device."""
    return len(set(host_buffers(schedule, rank).values()))


def num_own_buffers(schedule: Schedule, rank: int) -> int:
    """How many it has to preallocate in its own host memory."""
    return max(own_buffers(schedule, rank).values(), default=-1) + 1


def stages_in_buffers(hosted: Mapping[Hosting, int]) -> tuple[frozenset[int], ...]:
    """For each host buffer of a rank, by what `host_buffers` says of it, the stages whose micro-batches it ever holds."""
    held: list[set[int]] = [set() for _ in range(max(hosted.values(), default=-1) + 1)]
    for stay, buffer in hosted.items():
        held[buffer].add(stay.stage)
    return tuple(map(frozenset, held))
