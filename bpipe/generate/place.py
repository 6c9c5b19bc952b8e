"""Place every rank's order of computations on the unit grid. In: one order a rank. Out: a compute-only Schedule.

Each computation takes one slot and starts as soon as the one before it on its rank and the one it needs from its neighbouring stage are
over. A forward needs the forward of the stage before, a backward the backward of the stage after, on the last stage its own forward.
Knows no schedule by name, no memory, no transfers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule, Slot

# One computation of an order: its stage, whether it is a forward (else a full backward), and its micro-batch.
Order = list[tuple[int, bool, int]]

BUBBLE = Slot()


def place(name: str, num_microbatches: int, stage_to_rank: Sequence[int], orders: Sequence[Order]) -> Schedule:
    """The schedule in which every rank keeps its order and nothing starts later than it must."""
    placed = _Placement(num_microbatches, len(stage_to_rank), len(orders))
    left = len(orders)
    while left:
        progress = False
        for rank, order in enumerate(orders):
            if placed.next[rank] < len(order) and placed.advance(rank, order):
                progress = True
                left -= placed.next[rank] == len(order)
        assert progress, f"{name}: the orders wait for each other"
    length = max(len(row) for row in placed.rows)
    for row in placed.rows:
        row.extend([BUBBLE] * (length - len(row)))
    return Schedule(name, num_microbatches, tuple(stage_to_rank), tuple(tuple(row) for row in placed.rows))


class _Placement:
    """The grid while it grows. `over[...]` is the slot after a computation's, 0 while it is not placed."""

    def __init__(self, num_microbatches: int, num_stages: int, num_ranks: int) -> None:
        self.num_microbatches = num_microbatches
        self.last_stage = num_stages - 1
        self.forward_over = [0] * (num_stages * num_microbatches)
        self.backward_over = [0] * (num_stages * num_microbatches)
        self.rows: list[list[Slot]] = [[] for _ in range(num_ranks)]
        self.next = [0] * num_ranks

    def advance(self, rank: int, order: Order) -> bool:
        """Place the rank's computations until one needs what is not placed yet. False if not even one could be placed."""
        width, row = self.num_microbatches, self.rows[rank]
        forward_over, backward_over = self.forward_over, self.backward_over
        first = position = self.next[rank]
        while position < len(order):
            stage, is_forward, microbatch = order[position]
            key = stage * width + microbatch
            if is_forward:
                ready = forward_over[key - width] if stage else 1
            else:
                ready = forward_over[key] if stage == self.last_stage else backward_over[key + width]
            if not ready:
                break
            # Slot 0 is the first: a computation that needs nothing is ready "after slot 0 - 1", so `over` counts from 1.
            while len(row) < ready - (stage == 0 and is_forward):
                row.append(BUBBLE)
            row.append(Slot(Action(stage, Kind.FORWARD if is_forward else Kind.BACKWARD, microbatch)))
            (forward_over if is_forward else backward_over)[key] = len(row)
            position += 1
        self.next[rank] = position
        return position > first
