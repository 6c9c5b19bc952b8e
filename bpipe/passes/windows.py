"""Let transfers end in time. In: a Schedule balanced within rooms, those rooms, and what computations and transfers take. Out: a Schedule.

A transfer's window is the time from where it is issued to where the rank needs it to be over: an eviction's to the next computation, which
takes its memory, a load's to the backward of its micro-batch. What does not end within it is issued earlier, where there is room for that:
an eviction beside an earlier computation that lasts long enough, a load as much earlier as the transfers behind it on its way leave time
for. What leaves and comes back is what it was, and every rank keeps its room. Another micro-batch in the place of one that cannot end in
time would not either: the one that is needed last has left, and any other has less time to come back in.

The clock is that of a run in which nobody waits for a transfer. Whoever knows better (the simulator, which also knows who shares a port)
judges whether the result helps. Knows no tensors and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from bpipe.ir.action import OTHER_END, READING, Action, Kind
from bpipe.ir.host_buffers import hosts_of
from bpipe.ir.memory import Memory, peak_counts
from bpipe.ir.needs import NOTHING, Needs
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import occupied, own_bytes
from bpipe.passes.room import Rooms

Seconds = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Windows:
    """What things take, in seconds. `lasts_s`: a computation by kind and stage (a shard's by rank); `hop_s`: a message between stages.

    `inside_s`, `between_s`: by stage, a transfer between two ranks of a node, or of two; `nodes[rank]`, empty where all are on one.
    """

    lasts_s: tuple[tuple[Kind, tuple[Seconds, ...]], ...]
    hop_s: Seconds
    inside_s: tuple[Seconds, ...]
    between_s: tuple[Seconds, ...] = ()
    nodes: tuple[int, ...] = ()

    def transfer_s(self, stage: int, rank: int, host: int) -> Seconds:
        """A micro-batch of this stage from one to the other."""
        apart = bool(self.nodes) and self.nodes[rank] != self.nodes[host]
        return (self.between_s if apart else self.inside_s)[stage]


class _Stay(NamedTuple):
    """A micro-batch leaves beside slot `out` for `host` and comes back beside slot `back`."""

    stage: int
    microbatch: int
    host: int
    out: int
    back: int


@dataclass(slots=True)
class _Clock:
    """Of one rank, by slot: when what stands beside it is issued, and when the next computation behind it begins."""

    issued: list[Seconds] = field(default_factory=list)
    following: list[Seconds] = field(default_factory=list)


def in_time(schedule: Schedule, rooms: Rooms, windows: Windows) -> Schedule:
    """The schedule itself where every transfer ends in time. Its bounds are the counts it reaches."""
    changed = schedule
    for rank, clock in enumerate(_clocks(schedule, windows)):
        if any(host != rank for host in hosts_of(changed, rank).values()):
            changed = _Sender(changed, rank, rooms, windows, clock).changed()
    return schedule if changed is schedule else replace(changed, bounds=tuple(map(ceil, peak_counts(changed))))


def _clocks(schedule: Schedule, windows: Windows) -> list[_Clock]:
    """Each computation as early as the one before it on its rank and what it needs from others allow."""
    needs, lasts = Needs(schedule.layout, schedule.num_microbatches), dict(windows.lasts_s)
    free: list[Seconds] = [0] * schedule.num_ranks
    made: dict[int, tuple[Seconds, int]] = {}
    clocks = [_Clock() for _ in schedule.ranks]
    begun: list[list[Seconds | None]] = [[] for _ in schedule.ranks]
    for cells in zip(*schedule.ranks, strict=True):
        # What a slot needs was made in an earlier one.
        ended: list[tuple[int, Seconds, int]] = []
        for rank, cell in enumerate(cells):
            if cell.compute is None:
                clocks[rank].issued.append(free[rank])
                begun[rank].append(None)
                continue
            start = free[rank]
            for action in cell.computations:
                value = needs.needed(action)
                if value != NOTHING and value in made:
                    at, maker = made[value]
                    start = max(start, at if maker == rank else at + windows.hop_s)
            clocks[rank].issued.append(start)
            begun[rank].append(start)
            free[rank] = start + sum(lasts[action.kind][action.stage] for action in cell.computations)
            ended += [(needs.made(action), free[rank], rank) for action in cell.computations]
        for value, at, rank in ended:
            if value != NOTHING and (value not in made or made[value][0] < at):
                made[value] = at, rank
    for rank, clock in enumerate(clocks):
        latest = free[rank]
        for begin in reversed(begun[rank]):
            clock.following.append(latest)
            latest = latest if begin is None else begin
        clock.following.reverse()
    return clocks


class _Sender:
    """One rank's transfers, while they are planned anew."""

    def __init__(self, schedule: Schedule, rank: int, rooms: Rooms, windows: Windows, clock: _Clock) -> None:
        self.schedule, self.rank, self.rooms, self.windows, self.clock = schedule, rank, rooms, windows, clock
        self.memory: Memory = rooms.memory
        self.forward: dict[tuple[int, int], int] = {}
        self.need: dict[tuple[int, int], int] = {}
        for slot, cell in enumerate(schedule.ranks[rank]):
            for action in cell.computations:
                if action.kind is Kind.FORWARD:
                    self.forward[action.stage, action.microbatch] = slot
                elif action.kind in READING:
                    self.need.setdefault((action.stage, action.microbatch), slot)
        self.curve = list(own_bytes(schedule, rank, self.memory))
        # What is hosted here has its buffers all the time.
        self.room = rooms.room_bytes[rank] - occupied(schedule, rank, self.memory)[1]

    def changed(self) -> Schedule:
        for stay in self._stays():
            self._evict_earlier(stay)
        # From the last that is needed on: the way back is free until the one behind it has to begin.
        free: Seconds | None = None
        for stay in sorted(self._stays(), key=lambda one: -self.need[one[:2]]):
            free = self._load_earlier(stay, free)
        return self.schedule

    def _stays(self) -> list[_Stay]:
        out: dict[tuple[int, int], int] = {}
        hosts = {stay[:2]: host for stay, host in hosts_of(self.schedule, self.rank).items()}
        found = []
        for slot, cell in enumerate(self.schedule.ranks[self.rank]):
            for action in cell.transfers:
                key = action.stage, action.microbatch
                if action.kind is Kind.EVICT:
                    out[key] = slot
                elif action.kind is Kind.LOAD and hosts[key] != self.rank:
                    found.append(_Stay(*key, hosts[key], out.pop(key), slot))
        return found

    def _seconds(self, stay: _Stay) -> Seconds:
        return self.windows.transfer_s(stay.stage, self.rank, stay.host)

    def _moved(self, stay: _Stay) -> int:
        return self.memory.stages[stay.stage].moved_bytes

    # -- evictions ----------------------------------------------------------------------------------------------------------------------

    def _evict_earlier(self, stay: _Stay) -> None:
        """To the latest slot before in which it ends in time; where there is none it stays."""
        seconds, clock = self._seconds(stay), self.clock
        if seconds <= clock.following[stay.out] - clock.issued[stay.out]:
            return
        taken = [0] * (stay.out + 1)
        for other in self._stays():
            if other.out < stay.out:
                taken[other.out] += self._seconds(other)  # type: ignore[assignment]
        for slot in range(stay.out - 1, self.forward[stay[:2]], -1):
            if clock.issued[slot] + taken[slot] + seconds <= clock.following[slot] and self._try(stay, stay._replace(out=slot)):
                return

    # -- loads --------------------------------------------------------------------------------------------------------------------------

    def _load_earlier(self, stay: _Stay, free: Seconds | None) -> Seconds:
        """Bring it back early enough to be over by `free`, if anything, or as early as there is room. When it begins at the latest."""
        need = self.clock.issued[self.need[stay[:2]]]
        begin = (need if free is None else min(need, free)) - self._seconds(stay)
        slot = stay.back
        while self.clock.issued[slot] > begin and slot - 1 > stay.out and self.curve[slot - 1] + self._moved(stay) <= self.room:
            slot -= 1
        if slot != stay.back and not self._try(stay, stay._replace(back=slot)):
            slot = stay.back
        return max(begin, self.clock.issued[slot])

    # -- a change -----------------------------------------------------------------------------------------------------------------------

    def _try(self, before: _Stay, after: _Stay) -> bool:
        """Take a stay in place of another, if the rank and its host keep their rooms with it."""
        curve = list(self.curve)
        for stay, sign in ((before, 1), (after, -1)):
            for slot in range(stay.out + 1, stay.back):
                curve[slot] += sign * self._moved(stay)
        tried = _with(self.schedule, self.rank, before, after)
        if max(curve) > self.room or sum(occupied(tried, after.host, self.memory)) > self.rooms.room_bytes[after.host]:
            return False
        self.schedule, self.curve = tried, curve
        return True


def _with(schedule: Schedule, rank: int, before: _Stay, after: _Stay) -> Schedule:
    """Each end that moves stands last in its new slot, on both ranks: so transfers of a slot stay in one order everywhere."""
    rows = {one: list(schedule.ranks[one]) for one in (rank, after.host)}
    for kind, old, new in ((Kind.EVICT, before.out, after.out), (Kind.LOAD, before.back, after.back)):
        if old == new:
            continue
        for one, of_kind in ((rank, kind), (after.host, OTHER_END[kind])):
            row, action = rows[one], Action(after.stage, of_kind, after.microbatch)
            row[old] = replace(row[old], transfers=tuple(other for other in row[old].transfers if other != action))
            row[new] = replace(row[new], transfers=(*row[new].transfers, action))
    return replace(schedule, ranks=tuple(tuple(rows.get(one, row)) for one, row in enumerate(schedule.ranks)))
