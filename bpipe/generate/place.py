"""Place every rank's order of computations on the unit grid. In: one order a rank. Out: a compute-only Schedule.

Each computation takes one slot and starts as soon as the one before it on its rank and the one it needs from its neighbouring stage are
over. A forward needs the forward of the stage before; a backward, or its input half, the same of the stage after, on the last stage its
own forward; a weight half needs nothing from elsewhere. Knows no schedule by name, no memory, no transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule, Slot

# Computations of one rank, in order; a slot is two that overlap.
Order = Sequence[Action | Slot]

_FORWARD, _WEIGHT = Kind.FORWARD, Kind.BACKWARD_WEIGHT
_BUBBLE = Slot()
_UNPLACED = -1


def forwards(stage: int, microbatches: range) -> list[Action]:
    return [Action(stage, _FORWARD, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: range) -> list[Action]:
    return [Action(stage, Kind.BACKWARD, microbatch) for microbatch in microbatches]


def alternate(first: Sequence[Action], second: Sequence[Action]) -> list[Action]:
    """One of each in turn, as long as the shorter lasts."""
    turns = min(len(first), len(second))
    both = [*first[:turns], *second[:turns]]
    both[::2], both[1::2] = first[:turns], second[:turns]
    return both


def place(name: str, num_microbatches: int, stage_to_rank: Sequence[int], orders: Sequence[Order]) -> Schedule:
    """The schedule in which every rank keeps its order and nothing starts later than it must.

    Raises ValueError where the orders wait for each other.
    """
    placed = _Placement(num_microbatches, len(stage_to_rank), len(orders))
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
    return Schedule(name, num_microbatches, tuple(stage_to_rank), tuple(tuple(row) for row in placed.rows))


class _Placement:
    """The grid while it grows: `forward_over` and `backward_over` hold the slot after each computation, _UNPLACED until it is placed."""

    def __init__(self, num_microbatches: int, num_stages: int, num_ranks: int) -> None:
        self.num_microbatches = num_microbatches
        self.last_stage = num_stages - 1
        self.forward_over = [_UNPLACED] * (num_stages * num_microbatches)
        self.backward_over = [_UNPLACED] * (num_stages * num_microbatches)
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
        key = action.stage * self.num_microbatches + action.microbatch
        if action.kind is _FORWARD:
            return self.forward_over[key - self.num_microbatches] if action.stage else 0
        if action.kind is _WEIGHT:
            return 0
        return self.forward_over[key] if action.stage == self.last_stage else self.backward_over[key + self.num_microbatches]

    def _over(self, action: Action, slot: int) -> None:
        key = action.stage * self.num_microbatches + action.microbatch
        if action.kind is _FORWARD:
            self.forward_over[key] = slot
        elif action.kind is not _WEIGHT:
            self.backward_over[key] = slot


def _name(one: Action | Slot) -> str:
    return " with ".join(map(str, one.computations)) if isinstance(one, Slot) else str(one)
