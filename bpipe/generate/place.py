"""Place every rank's order of computations on the unit grid. In: one order a rank. Out: a compute-only Schedule.

Each computation takes one slot and starts as soon as the one before it on its rank is over, and whatever makes what it needs (`ir.needs`).
Knows no schedule by name, no memory, no transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.ir.action import Action, Kind
from bpipe.ir.layout import Layout
from bpipe.ir.needs import NOTHING, Needs
from bpipe.ir.schedule import Schedule, Slot

# Computations of one rank, in order; a slot is two that overlap.
Order = Sequence[Action | Slot]

_WEIGHT = Kind.BACKWARD_WEIGHT
_BUBBLE = Slot()
_UNPLACED = -1


def forwards(stage: int, microbatches: range) -> list[Action]:
    return [Action(stage, Kind.FORWARD, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: range) -> list[Action]:
    return [Action(stage, Kind.BACKWARD, microbatch) for microbatch in microbatches]


def alternate(first: Sequence[Action], second: Sequence[Action]) -> list[Action]:
    """One of each in turn, as long as the shorter lasts."""
    turns = min(len(first), len(second))
    both = [*first[:turns], *second[:turns]]
    both[::2], both[1::2] = first[:turns], second[:turns]
    return both


def place(name: str, num_microbatches: int, layout: Layout, orders: Sequence[Order]) -> Schedule:
    """The schedule in which every rank keeps its order and nothing starts later than it must.

    Raises ValueError where the orders wait for each other.
    """
    placed = _Placement(Needs(layout, num_microbatches), len(orders))
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
    """The grid while it grows: `over[value]` is the slot after all that make a value, _UNPLACED until they are placed."""

    def __init__(self, needs: Needs, num_ranks: int) -> None:
        self.needs = needs
        self.over = [_UNPLACED] * needs.num_values
        # Of values that shards make together: how many parts are missing, and the slot after the others.
        self.parts: dict[int, tuple[int, int]] = {}
        self.rows: list[list[Slot]] = [[] for _ in range(num_ranks)]
        self.next = [0] * num_ranks

    def advance(self, rank: int, order: Order) -> bool:
        """Place the rank's computations until one needs what is not placed yet. False if not even one could be placed."""
        row = self.rows[rank]
        first = position = self.next[rank]
        length = len(row)
        while position < len(order):
            one = order[position]
            parts = one.computations if isinstance(one, Slot) else (one,)
            needed = self._ready(parts[0])
            for action in parts[1:]:
                other = self._ready(action)
                needed = _UNPLACED if _UNPLACED in (needed, other) else max(needed, other)
            if needed == _UNPLACED:
                break
            if needed > length:
                row.extend([_BUBBLE] * (needed - length))
                length = needed
            row.append(one if isinstance(one, Slot) else Slot(one))
            length += 1
            position += 1
            for action in parts:
                self._over(action, length)
        self.next[rank] = position
        return position > first

    def _ready(self, action: Action) -> int:
        """The first slot in which what the computation needs is over; _UNPLACED where that is not known yet."""
        value = self.needs.needed(action)
        if value != NOTHING:
            return self.over[value]
        # A last stage's backward waits for its own forward alone. What else of its own stage comes too early for it, the rules say.
        own = self.needs.own(action) if action.kind is not _WEIGHT else NOTHING
        return 0 if own == NOTHING else self.over[own]

    def _over(self, action: Action, slot: int) -> None:
        value = self.needs.made(action)
        if value >= self.needs.first_shared:
            missing, latest = self.parts.get(value, (len(self.needs.route(value).makers), 0))
            self.parts[value] = missing - 1, max(latest, slot)
            if missing == 1:
                self.over[value] = max(latest, slot)
        elif value != NOTHING:
            self.over[value] = slot


def _name(one: Action | Slot) -> str:
    return " with ".join(map(str, one.computations)) if isinstance(one, Slot) else str(one)
