"""Share a pair's memory: add transfers until every rank keeps its bound.

Bounds are counts of chunk micro-batches; `budget` has bytes. A rank whose own activations exceed its bound evicts to
its partner (`plan_evictions` plans how); the partner's halves are in the same slots of its own row, and what it hosts counts
against its bound. On 1F1B with `mu_opt` this is Algorithm 1 of the BPipe paper (Kim et al. 2023), with its steady-phase
eviction read as "the latest finished forward". If a bound cannot be kept, the error names the smallest one found that
can: the least possible for generated orders, rarely one more for others (`tests/unit/balance/test_pairs.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from bpipe.schedule.action import Action, Key, Kind
from bpipe.schedule.host_buffers import Residency, host_buffers, stages_in_buffers
from bpipe.schedule.hosts import Pair, default_partners, halved_pairs, in_pairs, pairing
from bpipe.schedule.memory import Memory, StageMemory, counting, live_bytes, peak_counts
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

    A walk goes through the rank's slots; two computations that overlap share one, and both are held during it. When
    what starts in the next slot would exceed the bound, the finished micro-batch needed furthest in the future is
    evicted next to this slot, and loaded as soon as there is room for it again. Each micro-batch is needed once more,
    so if all have one size, furthest-first (Belady's rule) makes the fewest evictions possible. If sizes differ, it
    finds a plan whenever there is one, and no eviction of it can be omitted.

    Args:
        schedule: The schedule without transfers.
        rank: The evicting rank.
        bound: In the unit of `memory`.
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


def balance(schedule: Schedule, bounds: Sequence[int] | None = None, partners: Sequence[int] | None = None) -> Schedule:
    """Return the schedule with the fewest evictions that keep every rank within its bound of chunk micro-batches.

    Args:
        schedule: The schedule without transfers.
        bounds: By rank; by default the smallest bound found that every pair can keep, the same for all.
        partners: By rank; by default those that the ranks' peaks suggest.

    Raises:
        ValueError: A bound cannot be kept; names the smallest found that can.
    """
    if bounds is None:
        return _balance_evenly(schedule, partners)
    memory, chosen = counting(schedule.num_stages), choose_partners(schedule, partners)
    check_input(schedule, bounds, memory)
    outcomes: dict[Pair, Shared] = {}
    for pair in pairs_of(chosen):
        outcomes[pair] = outcome = share(schedule, pair, [bounds[rank] for rank in pair], memory)
        if outcome.refusal is not None:
            raise ValueError(f"{outcome.refusal}{_way_out(schedule, pair, memory)}")
    return replace(_joined(schedule, chosen, outcomes), bounds=tuple(bounds))


def keeps_bound(schedule: Schedule, bound: int, buffers_stay: bool = False) -> bool:
    """Whether balancing can keep every rank within `bound` chunk micro-batches, with the usual partners.

    Args:
        schedule: The schedule without transfers.
        bound: Micro-batches of a chunk, on every rank.
        buffers_stay: Whether host buffers count all the time, and not only while a micro-batch is in them.
    """
    memory = counting(schedule.num_stages)
    partners = choose_partners(schedule, None)
    outcomes = {}
    for pair in pairs_of(partners):
        outcomes[pair] = share(schedule, pair, (bound,) * 2, memory)
        if outcomes[pair].refusal is not None:
            return False
    return not buffers_stay or max(allocated_counts(_joined(schedule, partners, outcomes))) <= bound


def allocated_counts(schedule: Schedule) -> tuple[int, ...]:
    """Return the most chunk micro-batches for which each rank has room: its own, and its host buffers, which stay."""
    memory = counting(schedule.num_stages)
    return tuple(sum(allocated_bytes(schedule, rank, memory)) for rank in range(schedule.num_ranks))


def allocated_bytes(schedule: Schedule, rank: int, memory: Memory) -> tuple[int, int]:
    """Return the bytes that a run allocates on a rank for its own micro-batches at their most, and for host buffers."""
    host_bytes = buffer_bytes(host_buffers(schedule, rank), memory)
    return max(own_bytes(schedule, rank, memory), default=0), host_bytes


def own_bytes(schedule: Schedule, rank: int, memory: Memory) -> tuple[int, ...]:
    """Return the bytes that a rank holds of its own micro-batches in each slot."""
    own = set(schedule.layout.stages_of(rank))
    sizes = tuple(
        size if place // memory.slices in own else StageMemory(0, 0, 0) for place, size in enumerate(memory.stages)
    )
    return live_bytes(schedule, rank, replace(memory, stages=sizes))


def moved_bytes(residencies: Iterable[Residency], memory: Memory) -> int:
    """Return the bytes that the evictions of these residencies move."""
    return sum(memory.size(*residency.key).moved_bytes for residency in residencies)


def buffer_bytes(hosted: Mapping[Residency, int], memory: Memory) -> int:
    """Return the bytes of host buffers, a result of `host_buffers`."""
    return sum(map(memory.buffer_bytes, stages_in_buffers(hosted)))


def _balance_evenly(schedule: Schedule, partners: Sequence[int] | None) -> Schedule:
    """Balance to the smallest bound found that every pair keeps.

    The search starts at what no pair can go below, and rises for pairs that need more.
    """
    memory = counting(schedule.num_stages)
    if partners is not None:
        partners = pairing(schedule.num_ranks, partners)
    check_input(schedule, (1,) * schedule.num_ranks, memory)
    curves = [live_bytes(schedule, rank, memory) for rank in range(schedule.num_ranks)]
    peaks = [max(curve) for curve in curves]
    chosen = _usual(schedule, peaks) if partners is None else tuple(partners)
    bound = max(_together([curves[rank] for rank in pair]) for pair in pairs_of(chosen))
    tried: dict[Pair, tuple[int, Shared]] = {}
    for pair in pairs_of(chosen):
        outcome = share(schedule, pair, (bound,) * 2, memory, [peaks[rank] for rank in pair])
        if outcome.refusal is not None:
            bound, outcome = _smallest(schedule, pair, memory, bound + 1)
        tried[pair] = (bound, outcome)
    # A pair that kept a lower bound needs fewer evictions within that of the others.
    outcomes = {
        pair: outcome if kept == bound else share(schedule, pair, (bound,) * 2, memory)
        for pair, (kept, outcome) in tried.items()
    }
    return replace(_joined(schedule, chosen, outcomes), bounds=(bound,) * schedule.num_ranks)


def choose_partners(schedule: Schedule, partners: Sequence[int] | None) -> tuple[int, ...]:
    """Return the given partners, or the usual ones."""
    return _usual(schedule, peak_counts(schedule)) if partners is None else pairing(schedule.num_ranks, partners)


def _usual(schedule: Schedule, peaks: Sequence[int]) -> tuple[int, ...]:
    """Return the partners that the ranks' peaks suggest.

    Of two pipes mirror images hold about alike, and hosts are in the same half: partners by peaks alone level no lower.
    """
    return halved_pairs(schedule.num_ranks) if schedule.layout.num_pipes > 1 else default_partners(peaks)


def pairs_of(partners: Sequence[int]) -> list[Pair]:
    """Return every pair once, the lower rank first; a rank without a partner is a pair with itself."""
    return sorted({(min(rank, partner), max(rank, partner)) for rank, partner in enumerate(partners)})


def _joined(schedule: Schedule, partners: tuple[int, ...], outcomes: Mapping[Pair, Shared]) -> Schedule:
    rows = list(schedule.ranks)
    for pair, outcome in outcomes.items():
        for rank, row in zip(pair, outcome.rows, strict=True):
            rows[rank] = row
    return replace(schedule, ranks=tuple(rows), hosts=in_pairs(partners))


@dataclass(frozen=True, slots=True)
class Shared:
    """A pair's rows with transfers and their peaks, or why its bounds cannot be kept."""

    rows: tuple[tuple[Slot, ...], ...] = ()
    peaks: tuple[int, ...] = ()
    refusal: str | None = None


def share(
    schedule: Schedule, pair: Pair, bounds: Sequence[int], memory: Memory, own: Sequence[int] | None = None
) -> Shared:
    """Balance one pair; a rank paired with itself can only keep its bound as it is.

    Args:
        schedule: The schedule without transfers.
        pair: The two ranks, or one rank twice.
        bounds: Of the two ranks, in the unit of `memory`.
        memory: The sizes that count.
        own: The pair's peaks before, if known.

    Returns:
        The pair's rows with transfers, or why its bounds cannot be kept.
    """
    rows = [schedule.ranks[rank] for rank in pair]
    peaks = tuple(own or (max(live_bytes(schedule, rank, memory)) for rank in pair))
    over = [index for index in (0, 1) if peaks[index] > bounds[index]]
    if not over:
        return Shared(tuple(rows), peaks)
    if pair[0] == pair[1]:
        holds = f"rank {pair[0]} has no partner and holds up to {peaks[0]} {memory.unit}"
        return Shared(refusal=f"{holds}, but its bound is {bounds[0]}")
    for index in over:
        plan = plan_rank(schedule, pair[index], bounds[index], memory)
        if isinstance(plan, str):
            return Shared(refusal=plan)
        rows = [with_transfers(row, plan, own=side == index) for side, row in enumerate(rows)]
    peaks = tuple(_peak(schedule, rank, row, memory) for rank, row in zip(pair, rows, strict=True))
    for rank, guest, bound, peak in zip(pair, reversed(pair), bounds, peaks, strict=True):
        if peak > bound:
            holds = f"rank {rank}, which hosts for rank {guest}, holds up to {peak} {memory.unit}"
            return Shared(refusal=f"{holds}, but its bound is {bound}")
    return Shared(tuple(rows), peaks)


def plan_rank(schedule: Schedule, rank: int, bound: int, memory: Memory) -> Plan | str:
    """Return the rank's plan of evictions, or why no plan keeps the bound."""
    try:
        return plan_evictions(schedule, rank, bound, memory)
    except OverBound as over:
        place = f"it needs {over.needed} at once in slot {over.slot}"
        least = _least(schedule, rank, over.needed, memory)
        return f"rank {rank} cannot keep to {bound} {memory.unit}: {place}, and at least {least} over all slots"


def smallest_bound(schedule: Schedule, pair: Pair, memory: Memory) -> int:
    """Return the smallest bound found that both ranks of a pair can keep."""
    return _smallest(schedule, pair, memory, 1)[0]


def _smallest(schedule: Schedule, pair: Pair, memory: Memory, least: int) -> tuple[int, Shared]:
    """Return the smallest bound found from `least` up, and the pair within it.

    It is near half of what the pair holds together, so the search goes up from there in growing steps before it halves:
    a higher bound takes no more evictions, and requires no more of the partner.
    """
    curves = [live_bytes(schedule, rank, memory) for rank in pair]
    low, high = max(least, _together(curves)) - 1, max(map(max, curves))
    step, kept = 1, None
    while high - low > 1:
        probe = min(low + step, (low + high) // 2)
        outcome = share(schedule, pair, (probe,) * 2, memory)
        if outcome.refusal is None:
            step, high = high, max(outcome.peaks)
            kept = outcome if high == probe else None
        else:
            low, step = probe, 2 * step
    return high, kept or share(schedule, pair, (high,) * 2, memory)


def _together(curves: Sequence[Sequence[int]]) -> int:
    """Return the least bound by what a pair holds together, which no transfer lowers."""
    together: int = max(map(add, *curves))
    return -(-together // 2)


def _least(schedule: Schedule, rank: int, needed: int, memory: Memory) -> int:
    """Return the smallest bound that the rank keeps if its partner hosts whatever it sends."""
    while True:
        try:
            plan_evictions(schedule, rank, needed, memory)
            return needed
        except OverBound as over:
            needed = over.needed


def _way_out(schedule: Schedule, pair: Pair, memory: Memory) -> str:
    smallest = smallest_bound(schedule, pair, memory)
    if pair[0] == pair[1]:
        return f". Give it {smallest}, or a partner"
    return f". The smallest bound found that ranks {pair[0]} and {pair[1]} can both keep is {smallest} {memory.unit}"


def with_transfers(row: tuple[Slot, ...], plan: Plan, own: bool) -> tuple[Slot, ...]:
    """Return the row with a plan's transfers, or with their other ends. Other slots stay the same objects."""
    slots = list(row)
    for slot, actions in plan.items():
        added = actions if own else [action.other_end for action in actions]
        slots[slot] = replace(slots[slot], transfers=(*slots[slot].transfers, *added))
    return tuple(slots)


def _peak(schedule: Schedule, rank: int, row: tuple[Slot, ...], memory: Memory) -> int:
    rows = (*schedule.ranks[:rank], row, *schedule.ranks[rank + 1 :])
    return max(live_bytes(replace(schedule, ranks=rows), rank, memory))


def check_input(schedule: Schedule, bounds: Sequence[int], memory: Memory) -> None:
    if len(bounds) != schedule.num_ranks:
        raise ValueError(f"{len(bounds)} bounds for {schedule.num_ranks} ranks: give one for all or one for each")
    for rank, bound in enumerate(bounds):
        if bound < 1:
            raise ValueError(f"rank {rank}: bound {bound} is below 1, but the micro-batch being computed must be held")
    moved = next((slot.transfers[0] for row in schedule.ranks for slot in row if slot.transfers), None)
    if moved is not None:
        raise ValueError(f"the schedule already has transfers ({moved}): balance the schedule without them")
    memory.check(schedule.num_stages)
    for place, size in enumerate(memory.stages):
        if size.saved_bytes < 1:
            raise ValueError(f"stage {place // memory.slices}: saved_bytes is {size.saved_bytes}, but must be above 0")
