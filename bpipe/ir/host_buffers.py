"""Give every hosted micro-batch one of its acceptor's host buffers. In: a Schedule and a rank. Out: which buffer each hosting takes.

A buffer is taken from the start of the HOST's slot in the grid to the end of the RETURN's, so a buffer returned in a slot is free only in
the next. Both ends of a pair compute this, each on its own: same schedule, same answer. Knows no tensors, no bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from bpipe.ir.action import Kind
from bpipe.ir.schedule import Schedule


class Hosting(NamedTuple):
    """One stay of a micro-batch on its acceptor: `nth` counts the stays of this micro-batch of this (the evictor's) stage from 0."""

    stage: int
    microbatch: int
    nth: int


def host_buffers(schedule: Schedule, rank: int) -> dict[Hosting, int]:
    """The host buffer of every hosting on `rank`, in the order in which they begin. Uses the fewest there can be, numbered from 0."""
    assigned: dict[Hosting, int] = {}
    stays: dict[tuple[int, int], Hosting] = {}
    free: list[int] = []
    num_buffers = 0
    for slot in schedule.ranks[rank]:
        returned = []
        for action in slot.transfers:
            key = (action.stage, action.microbatch)
            if action.kind is Kind.HOST:
                stays[key] = Hosting(*key, stays[key].nth + 1 if key in stays else 0)
                if free:
                    assigned[stays[key]] = heapq.heappop(free)
                else:
                    assigned[stays[key]] = num_buffers
                    num_buffers += 1
            elif action.kind is Kind.RETURN:
                returned.append(assigned[stays[key]])
        for index in returned:
            heapq.heappush(free, index)
    return assigned


def num_measured(schedule: Schedule, evictor: int) -> dict[Hosting, int]:
    """By what leaves a rank, in that order: how many of its stages that ever leave have run a forward before it leaves.

    By its first forward a stage is measured: so many sizes its acceptors can know by then, and must.
    """
    row = schedule.ranks[evictor]
    unmeasured = {action.stage for slot in row if slot.transfers for action in slot.transfers if action.kind is Kind.EVICT}
    count = 0
    measured: dict[Hosting, int] = {}
    stays: dict[tuple[int, int], int] = {}
    for slot in row if unmeasured else ():
        for action in slot.transfers:
            if action.kind is Kind.EVICT:
                key = (action.stage, action.microbatch)
                stays[key] = stays.get(key, -1) + 1
                measured[Hosting(*key, stays[key])] = count
        for one in slot.computations if unmeasured else ():
            if one.kind is Kind.FORWARD and one.stage in unmeasured:
                unmeasured.remove(one.stage)
                count += 1
    return measured


def num_host_buffers(schedule: Schedule, rank: int) -> int:
    """How many host buffers the rank has to preallocate."""
    return max(host_buffers(schedule, rank).values(), default=-1) + 1


def stages_in_buffers(hosted: Mapping[Hosting, int]) -> tuple[frozenset[int], ...]:
    """For each host buffer of a rank, by what `host_buffers` says of it, the stages whose micro-batches it ever holds."""
    held: list[set[int]] = [set() for _ in range(max(hosted.values(), default=-1) + 1)]
    for stay, buffer in hosted.items():
        held[buffer].add(stay.stage)
    return tuple(map(frozenset, held))
