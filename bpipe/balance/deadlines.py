"""Let transfers end in time.

In: a Schedule balanced within rooms, those rooms, and what computations and transfers take. Out: a Schedule.

A transfer's window is the time from where it is issued to where the rank needs it to be over: an eviction's to the next
computation, which takes its memory, a load's to the backward of its micro-batch. An eviction that does not end within it
is issued earlier, where there is room for that, beside a computation that lasts long enough. Loads come as soon as there
is room for them anyway, and sooner where an eviction has made some. What leaves and comes back is what it was, and every
rank keeps its room. Another micro-batch in the place of one that cannot end in time would not either: the one that is
needed last has left, and any other has less time to come back in. What goes to a rank's own node's memory takes its own
link, beside all that goes to other ranks; that memory is not counted, and may be asked for another buffer.

The clock is that of a run in which nobody waits for a transfer. Whoever knows better (the simulator, which also knows
who shares a port) judges whether the result helps. Knows no tensors and no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.evict import earliest_load
from bpipe.balance.pairs import allocated_bytes, own_bytes
from bpipe.schedule.action import OTHER_END, READING, Action, Key, Kind
from bpipe.schedule.clock import jobs_of, starts
from bpipe.schedule.host_buffers import Residency, hosts_of, slots_away
from bpipe.schedule.hosts import Host, Tier, device_ranks
from bpipe.schedule.memory import Memory, peak_counts
from bpipe.schedule.schedule import Schedule, Slot

Seconds = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Windows:
    """Durations in seconds. `lasts_s`: a computation by kind and stage (a shard's by rank); `hop_s`: a message between
    stages.

    `inside_s`, `between_s`: by stage, a transfer between two ranks of a node, or of two; `nodes[rank]`, empty where all
    are on one. `own_s`: a transfer to the own node's memory. Where they are by slice, of `slices` a micro-batch, each
    has those of a stage's slices one behind the other.
    """

    lasts_s: tuple[tuple[Kind, tuple[Seconds, ...]], ...]
    hop_s: Seconds
    inside_s: tuple[Seconds, ...]
    between_s: tuple[Seconds, ...] = ()
    nodes: tuple[int, ...] = ()
    own_s: tuple[Seconds, ...] = ()
    slices: int = 1

    def transfer_s(self, stage: int, microbatch: int, rank: int, host: Host) -> Seconds:
        """Return seconds of a transfer of this stage's micro-batch, or slice, between a rank and a host."""
        place = stage * self.slices + microbatch % self.slices
        if not host.on_device:
            return self.own_s[place]
        apart = bool(self.nodes) and self.nodes[rank] != self.nodes[host.rank]
        return (self.between_s if apart else self.inside_s)[place]


@dataclass(slots=True)
class _Clock:
    """Of one rank, by slot: when what stands beside it is issued, and when the next computation behind it begins."""

    issued: list[Seconds]
    following: list[Seconds]


def balance_in_time(schedule: Schedule, activation_budget: ActivationBudget, windows: Windows) -> Schedule:
    """Return the schedule itself where every transfer ends in time. Its bounds are the counts it reaches."""
    changed = schedule
    for rank, clock in enumerate(_clocks(schedule, windows)):
        sender, moving = _Sender(changed, rank, activation_budget, windows, clock), _Moving(changed)
        for residency, before, after in sender.changed():
            moving.move(residency, rank, sender.hosts[residency], before, after)
        tried = moving.schedule()
        # Where sizes differ, other micro-batches in a host buffer can make it larger.
        if all(
            sum(allocated_bytes(tried, one, activation_budget.memory)) <= activation_budget.room_bytes[one]
            for one in (rank, *device_ranks(sender.there))
        ):
            changed = tried
    return schedule if changed is schedule else replace(changed, bounds=tuple(map(ceil, peak_counts(changed))))


def _clocks(schedule: Schedule, windows: Windows) -> list[_Clock]:
    """Return when each slot's computation runs, as early as the one before it on its rank and its operands allow; a
    slot without one is issued when the one before it is over."""
    lasts, slices = dict(windows.lasts_s), windows.slices

    def lasting(actions: Sequence[Action]) -> Seconds:
        return sum(lasts[one.kind][one.stage * slices + one.microbatch % slices] for one in actions)

    work = jobs_of(schedule.layout, schedule.num_microbatches, schedule.ranks, lasting, windows.hop_s)
    begun = starts(work)
    clocks = []
    for row, jobs in zip(schedule.ranks, work.rows, strict=True):
        issued = [begun[job] for job in jobs]
        end = issued[-1] + work.lasts[jobs[-1]] if jobs else 0
        clocks.append(_Clock(issued, _following(row, issued, end)))
    return clocks


def _following(row: Sequence[Slot], issued: Sequence[Seconds], end: Seconds) -> list[Seconds]:
    """By slot, when the next computation behind it begins; behind the last, when that is over."""
    following = []
    for cell, start in zip(reversed(row), reversed(issued), strict=True):
        following.append(end)
        end = end if cell.compute is None else start
    return following[::-1]


class _Moving:
    """A schedule while transfers of it move.

    Each end that moves stands last in its new slot, on both ranks: so transfers of a slot stay in one order everywhere.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.begun = schedule
        self.rows: dict[int, list[Slot]] = {}

    def schedule(self) -> Schedule:
        """As it is now."""
        if not self.rows:
            return self.begun
        return replace(
            self.begun, ranks=tuple(tuple(self.rows.get(rank, row)) for rank, row in enumerate(self.begun.ranks))
        )

    def move(self, residency: Residency, rank: int, host: Host, before: range, after: range) -> None:
        """Move one residency of what leaves a rank. In host memory it has no other end."""
        for kind, old, new in ((Kind.EVICT, before[0], after[0]), (Kind.LOAD, before[-1], after[-1])):
            if old == new:
                continue
            for one, of_kind in {host.rank: OTHER_END[kind], rank: kind}.items():
                row, action = (
                    self.rows.setdefault(one, list(self.begun.ranks[one])),
                    Action(residency.stage, of_kind, residency.microbatch),
                )
                row[old] = replace(row[old], transfers=tuple(other for other in row[old].transfers if other != action))
                row[new] = replace(row[new], transfers=(*row[new].transfers, action))


def _spots(row: Sequence[Slot]) -> tuple[dict[Key, int], dict[Key, int]]:
    """Return the slots in which a rank saves activations, and in which it first reads them."""
    saved: dict[Key, int] = {}
    read: dict[Key, int] = {}
    for slot, cell in enumerate(row):
        for action in cell.computations:
            if action.kind is Kind.FORWARD:
                saved[action.stage, action.microbatch] = slot
            elif action.kind in READING:
                read.setdefault(action.key, slot)
    return saved, read


class _Sender:
    """One rank's transfers, while they are planned anew."""

    def __init__(
        self, schedule: Schedule, rank: int, activation_budget: ActivationBudget, windows: Windows, clock: _Clock
    ) -> None:
        self.rank, self.windows, self.clock = rank, windows, clock
        self.memory: Memory = activation_budget.memory
        self.hosts = hosts_of(schedule, rank)
        away = slots_away((slot, cell.transfers) for slot, cell in enumerate(schedule.ranks[rank]))
        # Older records do not say what a transfer to the own node's memory takes: it stayed where it was.
        self.away = {
            residency: slots for residency, slots in away.items() if self.hosts[residency].on_device or windows.own_s
        }
        self.forward, self.need = _spots(schedule.ranks[rank])
        self.curve = list(own_bytes(schedule, rank, self.memory))
        # What is hosted here has its buffers all the time.
        self.room = activation_budget.room_bytes[rank] - allocated_bytes(schedule, rank, self.memory)[1]
        # By tier, which has a link of its own, and by slot: seconds of what leaves beside it.
        self.taken: dict[Tier, list[Seconds]] = {tier: [0] * len(self.curve) for tier in Tier}
        # By device that hosts, and by slot: how many are there; and how many there may be at once.
        self.there: dict[Host, list[int]] = {}
        for residency, slots in self.away.items():
            host = self.hosts[residency]
            self.taken[host.tier][slots[0]] += self._seconds(residency)
            if host.on_device:
                there = self.there.setdefault(host, [0] * len(self.curve))
                for slot in slots:
                    there[slot] += 1
        self.most = {
            host: max(there) + self._further(schedule, host, activation_budget) for host, there in self.there.items()
        }

    def _further(self, schedule: Schedule, host: Host, activation_budget: ActivationBudget) -> int:
        """Return how many more host buffers another rank's device has room for."""
        size = self.memory.buffer_bytes({residency.stage for residency in self.away if self.hosts[residency] == host})
        spare: int = activation_budget.room_bytes[host.rank] - sum(allocated_bytes(schedule, host.rank, self.memory))
        return max(0, spare) // size if size else len(self.away)

    def changed(self) -> Iterator[tuple[Residency, range, range]]:
        """What moves, with the slots in which it was away and is then."""
        earlier = {residency: self._evict_earlier(residency, slots) for residency, slots in self.away.items()}
        for residency in sorted(earlier, key=lambda one: self.need[one[:2]]):
            slots = earlier[residency]
            load = earliest_load(self.curve, self.room, self._moved(residency), slots)
            after = range(slots.start, load + 1)
            if after != self.away[residency]:
                yield residency, self.away[residency], after

    def _seconds(self, residency: Residency) -> Seconds:
        return self.windows.transfer_s(residency.stage, residency.microbatch, self.rank, self.hosts[residency])

    def _moved(self, residency: Residency) -> int:
        return self.memory.size(residency.stage, residency.microbatch).moved_bytes

    def _evict_earlier(self, residency: Residency, slots: range) -> range:
        """To the latest slot before in which it ends in time; where there is none it stays."""
        host, out = self.hosts[residency], slots[0]
        seconds, clock, taken = self._seconds(residency), self.clock, self.taken[host.tier]
        if seconds <= clock.following[out] - clock.issued[out]:
            return slots
        there = self.there.get(host)
        for slot in range(out - 1, self.forward[residency[:2]], -1):
            if there is not None and there[slot] >= self.most[host]:
                break
            if clock.issued[slot] + taken[slot] + seconds <= clock.following[slot]:
                taken[out] -= seconds
                taken[slot] += seconds
                for earlier in range(slot, out):
                    self.curve[earlier + 1] -= self._moved(residency)
                    if there is not None:
                        there[earlier] += 1
                return range(slot, slots.stop)
        return slots
