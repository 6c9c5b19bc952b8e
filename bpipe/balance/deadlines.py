"""Make transfers end in time.

A transfer's window is the time from its issue to where the rank needs it to be over: the next computation, which takes
its memory, for an eviction; the backward of its micro-batch for a load. An eviction that does not end within it is
issued earlier, if there is room for that, next to a computation that lasts long enough. Loads come as soon as there is
room for them anyway, and earlier if an eviction made some. The same micro-batches leave and return, and every rank
keeps its room. Another micro-batch would not end in time either: the one needed last has left, and any other has less
time to return. Transfers to the own node's memory take their own link; that memory is not limited, and may need another
buffer.

The clock is that of a run in which nobody waits for a transfer. The caller decides with the simulator, which also knows
who shares a port, whether the result helps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.pairs import allocated_bytes, earliest_load, own_bytes
from bpipe.schedule.action import OTHER_END, READING, Action, Key, Kind
from bpipe.schedule.families.timing import jobs_of, starts
from bpipe.schedule.host_buffers import Residency, hosts_of, slots_away
from bpipe.schedule.hosts import Host, Tier, device_ranks
from bpipe.schedule.memory import Memory, peak_counts
from bpipe.schedule.schedule import Schedule, Slot

Seconds = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Windows:
    """Durations in seconds; with slices, a stage has one entry per slice, in order.

    Attributes:
        lasts_s: Computations by kind and stage, those of shards by rank.
        hop_s: A message between stages.
        inside_s: By stage, a transfer between two ranks of a node.
        between_s: By stage, a transfer between two nodes.
        nodes: By rank, its node; empty if all are on one.
        own_s: By stage, a transfer to the own node's memory.
        slices: Slices of a micro-batch.
    """

    lasts_s: tuple[tuple[Kind, tuple[Seconds, ...]], ...]
    hop_s: Seconds
    inside_s: tuple[Seconds, ...]
    between_s: tuple[Seconds, ...] = ()
    nodes: tuple[int, ...] = ()
    own_s: tuple[Seconds, ...] = ()
    slices: int = 1

    def transfer_s(self, stage: int, microbatch: int, rank: int, host: Host) -> Seconds:
        """Return the seconds of a transfer of this stage's micro-batch, or slice, between a rank and a host."""
        place = stage * self.slices + microbatch % self.slices
        if not host.on_device:
            return self.own_s[place]
        apart = bool(self.nodes) and self.nodes[rank] != self.nodes[host.rank]
        return (self.between_s if apart else self.inside_s)[place]


@dataclass(slots=True)
class _Clock:
    """Of one rank, by slot: when its transfers are issued, and when the next computation begins."""

    issued: list[Seconds]
    following: list[Seconds]


def balance_in_time(schedule: Schedule, budget: ActivationBudget, windows: Windows) -> Schedule:
    """Return the schedule with evictions moved so that they end in time. Bounds are the counts that result."""
    changed = schedule
    for rank, clock in enumerate(_clocks(schedule, windows)):
        sender, moving = _Sender(changed, rank, budget, windows, clock), _Moving(changed)
        for residency, before, after in sender.changed():
            moving.move(residency, rank, sender.hosts[residency], before, after)
        tried = moving.schedule()
        # If sizes differ, other micro-batches in a host buffer can make it larger.
        ranks = (rank, *device_ranks(sender.present))
        if all(sum(allocated_bytes(tried, other, budget.memory)) <= budget.room_bytes[other] for other in ranks):
            changed = tried
    return schedule if changed is schedule else replace(changed, bounds=peak_counts(changed))


def _clocks(schedule: Schedule, windows: Windows) -> list[_Clock]:
    """Return when each slot's computation runs, as early as the one before it on its rank and its operands allow.

    A slot without one is issued when the one before it is over.
    """
    lasts, slices = dict(windows.lasts_s), windows.slices

    def duration(actions: Sequence[Action]) -> Seconds:
        return sum(lasts[action.kind][action.stage * slices + action.microbatch % slices] for action in actions)

    work = jobs_of(schedule.layout, schedule.num_microbatches, schedule.ranks, duration, windows.hop_s)
    begins = starts(work)
    clocks = []
    for row, jobs in zip(schedule.ranks, work.rows, strict=True):
        issued = [begins[job] for job in jobs]
        following: list[Seconds] = []
        # After the last computation, when that is over.
        next_start = issued[-1] + work.lasts[jobs[-1]] if jobs else 0
        for cell, start in zip(reversed(row), reversed(issued), strict=True):
            following.append(next_start)
            next_start = next_start if cell.compute is None else start
        clocks.append(_Clock(issued, following[::-1]))
    return clocks


class _Moving:
    """A schedule while transfers of it move.

    Each end that moves becomes the last of its new slot, on both ranks: so transfers of a slot keep one order
    everywhere.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.original = schedule
        self.rows: dict[int, list[Slot]] = {}

    def schedule(self) -> Schedule:
        if not self.rows:
            return self.original
        rows = (tuple(self.rows.get(rank, row)) for rank, row in enumerate(self.original.ranks))
        return replace(self.original, ranks=tuple(rows))

    def move(self, residency: Residency, rank: int, host: Host, before: range, after: range) -> None:
        """Move one residency of a rank. In host memory it has no other end."""
        for kind, old, new in ((Kind.EVICT, before[0], after[0]), (Kind.LOAD, before[-1], after[-1])):
            if old == new:
                continue
            for end, of_kind in {host.rank: OTHER_END[kind], rank: kind}.items():
                row = self.rows.setdefault(end, list(self.original.ranks[end]))
                action = Action(residency.stage, of_kind, residency.microbatch)
                row[old] = replace(row[old], transfers=tuple(other for other in row[old].transfers if other != action))
                row[new] = replace(row[new], transfers=(*row[new].transfers, action))


class _Sender:
    """One rank's transfers while they are planned anew."""

    def __init__(
        self, schedule: Schedule, rank: int, budget: ActivationBudget, windows: Windows, clock: _Clock
    ) -> None:
        self.rank, self.windows, self.clock = rank, windows, clock
        self.memory: Memory = budget.memory
        self.hosts = hosts_of(schedule, rank)
        away = slots_away((slot, cell.transfers) for slot, cell in enumerate(schedule.ranks[rank]))
        # Older records do not say how long a transfer to the own node's memory takes: it stays where it was.
        self.away = {stay: slots for stay, slots in away.items() if self.hosts[stay].on_device or windows.own_s}
        # Slots in which the rank saves activations, and in which it first reads them.
        self.forward: dict[Key, int] = {}
        self.need: dict[Key, int] = {}
        for slot, action in schedule.computations(rank):
            if action.kind is Kind.FORWARD:
                self.forward[action.key] = slot
            elif action.kind in READING:
                self.need.setdefault(action.key, slot)
        self.curve = list(own_bytes(schedule, rank, self.memory))
        # Buffers of what is hosted here count all the time.
        self.room = budget.room_bytes[rank] - allocated_bytes(schedule, rank, self.memory)[1]
        # By tier, each of which has its own link, and slot: seconds of evictions next to it.
        self.taken: dict[Tier, list[Seconds]] = {tier: [0] * len(self.curve) for tier in Tier}
        # By device that hosts, and slot: the number of residencies; and by device, their greatest possible number.
        self.present: dict[Host, list[int]] = {}
        for residency, slots in self.away.items():
            host = self.hosts[residency]
            self.taken[host.tier][slots[0]] += self._seconds(residency)
            if host.on_device:
                present = self.present.setdefault(host, [0] * len(self.curve))
                for slot in slots:
                    present[slot] += 1
        self.limits = {host: max(count) + self._further(schedule, host, budget) for host, count in self.present.items()}

    def _further(self, schedule: Schedule, host: Host, budget: ActivationBudget) -> int:
        """Return how many more host buffers another rank's device has room for."""
        size = self.memory.buffer_bytes({residency.stage for residency in self.away if self.hosts[residency] == host})
        spare: int = budget.room_bytes[host.rank] - sum(allocated_bytes(schedule, host.rank, self.memory))
        return max(0, spare) // size if size else len(self.away)

    def changed(self) -> Iterator[tuple[Residency, range, range]]:
        """Yield the residencies that move, with the slots in which they were away and will be."""
        earlier = {residency: self._evict_earlier(residency, slots) for residency, slots in self.away.items()}
        for residency in sorted(earlier, key=lambda stay: self.need[stay.key]):
            slots = earlier[residency]
            load = earliest_load(self.curve, self.room, self._moved(residency), slots)
            after = range(slots.start, load + 1)
            if after != self.away[residency]:
                yield residency, self.away[residency], after

    def _seconds(self, residency: Residency) -> Seconds:
        return self.windows.transfer_s(residency.stage, residency.microbatch, self.rank, self.hosts[residency])

    def _moved(self, residency: Residency) -> int:
        return self.memory.size(*residency.key).moved_bytes

    def _evict_earlier(self, residency: Residency, slots: range) -> range:
        """Return the slots with the eviction in the latest earlier slot in which it ends in time, if there is one."""
        host, out = self.hosts[residency], slots[0]
        seconds, clock, taken = self._seconds(residency), self.clock, self.taken[host.tier]
        if seconds <= clock.following[out] - clock.issued[out]:
            return slots
        present = self.present.get(host)
        for slot in range(out - 1, self.forward[residency.key], -1):
            if present is not None and present[slot] >= self.limits[host]:
                break
            if clock.issued[slot] + taken[slot] + seconds <= clock.following[slot]:
                taken[out] -= seconds
                taken[slot] += seconds
                for earlier in range(slot, out):
                    self.curve[earlier + 1] -= self._moved(residency)
                    if present is not None:
                        present[earlier] += 1
                return range(slot, slots.stop)
        return slots
