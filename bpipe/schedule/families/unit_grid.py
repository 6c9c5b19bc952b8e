"""The unit grid: every rank's order of computations, placed as a compute-only schedule.

Each computation takes one slot and starts as soon as the one before it on its rank and the makers of its operands
(`schedule.dependencies`) are over.
"""

from collections.abc import Sequence
from dataclasses import replace

from bpipe.schedule.action import SHARDS, Action, Kind, by_microbatch
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule, Slot, single_slots

# Cells of one rank, in order: a slot is two computations that overlap.
Order = Sequence[Action | Slot]

_WEIGHT = Kind.BACKWARD_WEIGHT
_BUBBLE = Slot()
_UNPLACED = -1


def forwards(stage: int, microbatches: range) -> list[Action]:
    return list(by_microbatch(stage, Kind.FORWARD, microbatches.stop)[microbatches.start : microbatches.stop])


def backwards(stage: int, microbatches: range) -> list[Action]:
    return list(by_microbatch(stage, Kind.BACKWARD, microbatches.stop)[microbatches.start : microbatches.stop])


def alternate(first: Sequence[Action], second: Sequence[Action]) -> list[Action]:
    """Alternate one of each, as long as the shorter lasts."""
    turns = min(len(first), len(second))
    both = [*first[:turns], *second[:turns]]
    both[::2], both[1::2] = first[:turns], second[:turns]
    return both


def place(name: str, num_microbatches: int, layout: Layout, orders: Sequence[Order]) -> Schedule:
    """Return the schedule in which every rank keeps its order and nothing starts later than it must.

    Args:
        name: Name of the schedule.
        num_microbatches: Micro-batches of an iteration.
        layout: Which rank computes which stage.
        orders: One per rank.

    Raises:
        ValueError: The orders wait for each other.
    """
    placed = _Placement(Dependencies(layout, num_microbatches), len(orders))
    unfinished = [rank for rank, order in enumerate(orders) if order]
    while unfinished:
        advanced = [placed.advance(rank, orders[rank]) for rank in unfinished]
        if not any(advanced):
            stuck = ", ".join(f"rank {rank} at {_name(orders[rank][placed.next[rank]])}" for rank in unfinished)
            raise ValueError(f"schedule {name}: the orders of the ranks wait for each other: {stuck}")
        unfinished = [rank for rank in unfinished if placed.next[rank] < len(orders[rank])]
    length = max(len(row) for row in placed.rows)
    for row in placed.rows:
        row.extend([_BUBBLE] * (length - len(row)))
    return Schedule(name, num_microbatches, layout, tuple(tuple(row) for row in placed.rows))


class _Placement:
    """The grid while it grows: `over[value]` is the slot after all makers of a value, or _UNPLACED."""

    def __init__(self, dependencies: Dependencies, num_ranks: int) -> None:
        self.dependencies = dependencies
        self.over = [_UNPLACED] * dependencies.num_values
        # Of values that shards make together: the number of missing parts, and the slot after the others.
        self.parts: dict[int, tuple[int, int]] = {}
        # By kind and stage: what micro-batch 0 waits for and makes, and the slots of all micro-batches.
        self.values: dict[tuple[Kind, int], tuple[int, int, Sequence[Slot]]] = {}
        self.rows: list[list[Slot]] = [[] for _ in range(num_ranks)]
        self.next = [0] * num_ranks

    def advance(self, rank: int, order: Order) -> bool:
        """Place the rank's computations until one needs what is not placed yet; return whether any was placed."""
        row, over, first_shared = self.rows[rank], self.over, self.dependencies.first_shared
        first = position = self.next[rank]
        length = len(row)
        while position < len(order):
            cell = order[position]
            if isinstance(cell, Slot):
                needed = self._all_ready(cell.computations)
            else:
                waits, makes, slots = self.values.get((cell.kind, cell.stage)) or self._find_values(cell)
                needed = 0 if waits == NOTHING else over[waits + cell.microbatch]
            if needed == _UNPLACED:
                break
            if needed > length:
                row.extend([_BUBBLE] * (needed - length))
                length = needed
            length += 1
            position += 1
            if isinstance(cell, Slot):
                row.append(cell)
                for action in cell.computations:
                    self._over(self.dependencies.value_of(action), length)
            else:
                row.append(slots[cell.microbatch])
                if makes >= first_shared:
                    self._over(makes + cell.microbatch, length)
                elif makes != NOTHING:
                    over[makes + cell.microbatch] = length
        self.next[rank] = position
        return position > first

    def _find_values(self, action: Action) -> tuple[int, int, Sequence[Slot]]:
        """Return the entry of a stage's computations of a kind in `values`."""
        first = replace(action, microbatch=0)
        slots = single_slots(action.stage, action.kind, self.dependencies.num_microbatches)
        entry = self.values[action.kind, action.stage] = self._waits(first), self.dependencies.value_of(first), slots
        return entry

    def _waits(self, action: Action) -> int:
        """Return the value that has to be there, or NOTHING."""
        value = self.dependencies.operand_of(action)
        # A last stage's backward waits for its own forward. Other orders within a stage are left to the rules.
        return self.dependencies.own_operand_of(action) if value == NOTHING and action.kind is not _WEIGHT else value

    def _all_ready(self, actions: Sequence[Action]) -> int:
        """Return the first slot in which all operands are there; _UNPLACED if that is not known yet."""
        values = [value for value in map(self._waits, actions) if value != NOTHING]
        ready = [self.over[value] for value in values]
        return _UNPLACED if _UNPLACED in ready else max(ready, default=0)

    def _over(self, value: int, slot: int) -> None:
        """Note that a computation that makes this value, or a part of it, is over."""
        if value >= self.dependencies.first_shared:
            missing, latest = self.parts.get(value, (len(self.dependencies.route(value).makers), 0))
            self.parts[value] = missing - 1, max(latest, slot)
            if missing == 1:
                self.over[value] = max(latest, slot)
        elif value != NOTHING:
            self.over[value] = slot


def _name(cell: Action | Slot) -> str:
    return " with ".join(map(str, cell.computations))


def align(schedule: Schedule) -> Schedule:
    """Return every computation as early as its rank's order and its neighbours allow.

    Raises ValueError if the schedule has transfers, or its orders wait for each other.
    """
    # Tables of this size follow: a file must not make them larger than itself.
    stages, width = schedule.num_stages, schedule.num_microbatches
    if stages * width > sum(len(slot.computations) for row in schedule.ranks for slot in row):
        raise ValueError(f"{stages} stages of {width} micro-batches are more than its computations")
    orders: list[list[Action | Slot]] = []
    for row in schedule.ranks:
        for slot in row:
            if slot.transfers:
                raise ValueError(
                    f"{slot.transfers[0]} belongs to its slot: align a compute-only schedule, then balance it"
                )
            for action in slot.computations:
                # Placing looks computations up by stage and micro-batch, before any rule has checked these.
                limit = schedule.num_ranks if action.kind in SHARDS else stages
                if not 0 <= action.stage < limit or not 0 <= action.microbatch < width:
                    ranges = f"stages 0 to {limit - 1}, micro-batches 0 to {width - 1}"
                    raise ValueError(f"{action} cannot be placed: there are only {ranges}")
        orders.append([slot if slot.overlapped else slot.compute for slot in row if slot.compute is not None])
    placed = place(schedule.name, schedule.num_microbatches, schedule.layout, orders)
    return replace(placed, hosts=schedule.hosts, bounds=schedule.bounds)


def is_listing(schedule: Schedule) -> bool:
    """Whether a schedule gives only the order of each rank, without bubbles in between, and so no times."""
    computing = [[bool(slot.computations) for slot in row] for row in schedule.ranks]
    has_transfers = any(slot.transfers for row in schedule.ranks for slot in row)
    return not has_transfers and all(row == sorted(row, reverse=True) for row in computing)
