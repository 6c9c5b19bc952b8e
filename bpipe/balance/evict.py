"""Plan one rank's transfers.

The walk goes through the rank's slots; two computations that overlap share one, and both are held during it. When what
starts in the next slot would exceed the bound, the finished micro-batch needed furthest in the future is evicted next
to this slot, and loaded as soon as there is room for it again. Each micro-batch is needed once more, so if all have one
size, furthest-first (Belady's rule) makes the fewest evictions possible. If sizes differ, it finds a plan whenever
there is one, and no eviction of it can be omitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from bpipe.schedule.action import Action, Key, Kind
from bpipe.schedule.memory import Memory
from bpipe.schedule.schedule import Schedule, Slot

_FORWARD, _BACKWARD, _INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT

# One rank's own halves of transfers, by slot.
Plan = dict[int, list[Action]]


class OverBound(ValueError):
    """The bound cannot be kept in `slot`, which needs `needed` whatever is evicted."""

    def __init__(self, slot: int, needed: int) -> None:
        super().__init__(f"slot {slot} needs {needed}")
        self.slot, self.needed = slot, needed


def plan_evictions(schedule: Schedule, rank: int, bound: int, memory: Memory) -> Plan:
    """Return the evictions that keep what the rank itself saves within `bound`, each as late as possible, and their
    loads, each as early as the bound has room for it.

    Args:
        schedule: The schedule without transfers.
        rank: The evicting rank.
        bound: In the same parts of a unit as `memory`.
        memory: The sizes that count.

    Raises:
        OverBound: No plan keeps the bound.
    """
    walk = _EvictionWalk(schedule.ranks[rank], bound, memory)
    for slot in range(len(schedule.ranks[rank])):
        walk.step(slot)
    own = {size for stage in schedule.layout.stages_of(rank) for size in memory.sizes(stage)}
    if len({size.saved_bytes for size in own}) > 1 or len({size.moved_bytes for size in own}) > 1:
        walk.leave_out()
    plan: Plan = {}
    # The micro-batch that is needed first is loaded first, and chooses its slot first.
    for evicted, (loaded, stage, microbatch) in sorted(walk.stays, key=lambda stay: stay[1]):
        moved = memory.size(stage, microbatch).moved_bytes
        slot = earliest_load(walk.curve, bound, moved, range(evicted, loaded + 1))
        plan.setdefault(slot, []).append(Action(stage, Kind.LOAD, microbatch))
    for evicted, (_, stage, microbatch) in walk.stays:
        plan.setdefault(evicted, []).append(Action(stage, Kind.EVICT, microbatch))
    return plan


def earliest_load(curve: list[int], room: int, moved: int, away: range) -> int:
    """Return the first slot from which on a rank has room for what it loads, and count it in `curve` from there.

    Loaded directly before its backward, it would have only that slot to return in, often a bubble, and its host would
    hold it for longer.

    Args:
        curve: What the rank holds in each slot.
        room: The most that the rank may hold.
        moved: The size of what it loads, in the same unit.
        away: From the slot of its EVICT to the last one possible for its LOAD, inclusive.
    """
    slot = away[-1]
    while slot - 1 > away[0] and curve[slot - 1] + moved <= room:
        slot -= 1
        curve[slot] += moved
    return slot


class _EvictionWalk:
    """The state of the walk. A stay is (slot of the eviction, (slot of the load, stage, micro-batch))."""

    def __init__(self, row: Sequence[Slot], bound: int, memory: Memory) -> None:
        self.bound, self.changes, self.memory = bound, memory.changes, memory
        self.computes = [slot.computations for slot in row] + [(), ()]
        self.needed_at: dict[Key, int] = {}
        for slot, computes in enumerate(self.computes):
            for action in computes:
                if action.kind is _BACKWARD or action.kind is _INPUT:
                    self.needed_at[action.key] = slot
        self.loads: dict[int, int] = {}  # slot of a load -> what it brings back
        self.finished: list[tuple[int, int, int]] = []  # (-slot needed, stage, micro-batch): a heap, furthest first
        self.stays: list[tuple[int, tuple[int, int, int]]] = []
        self.held = 0
        self.starting = self._starting(0)
        self.curve: list[int] = []

    def step(self, slot: int) -> None:
        """Account for one slot, and evict next to it what the next has no room for."""
        computes = self.computes[slot]
        self.held += self.starting
        self.curve.append(self.held)
        if self.held > self.bound:
            raise OverBound(slot, self.held)
        for action in computes:
            self.held -= self.changes[action.kind][self.memory.place(action)][1]
        # No eviction from here on adds to it: what leaves now returns in the slot after the next at the earliest.
        self.starting = self._starting(slot + 1)
        while self.held + self.starting > self.bound:
            self._evict(slot)
        # A forward is finished only now: its micro-batch cannot leave in the same slot.
        for action in computes:
            if action.kind is _FORWARD and self._moved(*action.key):
                heapq.heappush(self.finished, (-self.needed_at[action.key], *action.key))

    def _starting(self, slot: int) -> int:
        """Return what a slot takes at its start."""
        computed = (self.changes[action.kind][self.memory.place(action)][0] for action in self.computes[slot])
        return self.loads.get(slot, 0) + sum(computed)

    def _moved(self, stage: int, microbatch: int) -> int:
        return self.memory.size(stage, microbatch).moved_bytes

    def _evict(self, slot: int) -> None:
        # A micro-batch needed two slots later would have to come back in the very next one.
        if not self.finished or -self.finished[0][0] <= slot + 2:
            raise OverBound(slot + 1, self.held + self.starting)
        needed, stage, microbatch = heapq.heappop(self.finished)
        self.stays.append((slot, (-needed - 1, stage, microbatch)))
        moved = self.loads[-needed - 1] = self._moved(stage, microbatch)
        self.held -= moved

    def leave_out(self) -> None:
        """Drop every eviction without which the bound still holds, the smallest first."""
        for stay in sorted(self.stays, key=lambda stay: self._moved(*stay[1][1:])):
            evicted, (loaded, stage, microbatch) = stay
            absent, moved = range(evicted + 1, loaded), self._moved(stage, microbatch)
            if max(self.curve[slot] for slot in absent) + moved <= self.bound:
                for slot in absent:
                    self.curve[slot] += moved
                self.stays.remove(stay)
