"""Turn orders of micro-batches into orders of slices.

In: orders whose backwards stand in turn. Out: the same with each slice's own number.

A micro-batch is cut into k slices, numbered one behind the other (`schedule.layout`). Slice j attends to the keys and values
of all before it, so a stage computes a micro-batch's forwards from the first slice on and its backwards from the last.
A family's order of micro-batches holds for slices as it is, with two changes: a rank runs k - 1 more forwards ahead, so
that the last slice of a micro-batch is through before its first backward, and groups are of whole micro-batches. Then
the n-th backward of a stage is that of number `schedule.layout.reversed_slice(n, k)`. Source of the order: Sun et al.,
"Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", 2024. Knows no schedule by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.schedule.action import Action, Kind, of_microbatch
from bpipe.schedule.layout import reversed_slice


def in_slices(orders: Sequence[Sequence[Action]], slices: int) -> list[list[Action]]:
    """Give the backwards of these orders, which stand in turn, the numbers of their slices; forwards have theirs."""
    if slices == 1:
        return [list(order) for order in orders]
    return [
        [action if action.kind is Kind.FORWARD else _reversed(action, slices) for action in order] for order in orders
    ]


def _reversed(action: Action, slices: int) -> Action:
    return of_microbatch(action, reversed_slice(action.microbatch, slices))
