"""Give a schedule the grid its own order implies. In: a compute-only Schedule. Out: the same orders on the unit grid.

Listings from elsewhere may hold only the order of each rank, or count their columns differently. Knows no names, no
memory.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.schedule.action import SHARDS, Action
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.schedule import Schedule, Slot


def align(schedule: Schedule) -> Schedule:
    """Return every computation as early as its rank's order and its neighbours allow.

    Raises ValueError for a schedule with transfers, and for orders that wait for each other.
    """
    # Tables of this size follow: a file must not make them larger than itself.
    if schedule.num_stages * schedule.num_microbatches > sum(
        len(slot.computations) for row in schedule.ranks for slot in row
    ):
        raise ValueError(
            f"{schedule.num_stages} stages of {schedule.num_microbatches} micro-batches are more than its computations"
        )
    for row in schedule.ranks:
        for slot in row:
            if slot.transfers:
                raise ValueError(
                    f"{slot.transfers[0]} belongs to its slot: align a compute-only schedule, then balance it"
                )
            for action in slot.computations:
                _check_range(schedule, action)
    orders = [[_one(slot, slot.compute) for slot in row if slot.compute is not None] for row in schedule.ranks]
    placed = place(schedule.name, schedule.num_microbatches, schedule.layout, orders)
    return replace(placed, hosts=schedule.hosts, bounds=schedule.bounds, after_input=schedule.after_input)


def is_listing(schedule: Schedule) -> bool:
    """Return whether it says only in which order each rank computes, without a bubble in between, and so nothing of
    when."""
    computing = [[bool(slot.computations) for slot in row] for row in schedule.ranks]
    return not any(slot.transfers for row in schedule.ranks for slot in row) and all(
        row == sorted(row, reverse=True) for row in computing
    )


def _one(slot: Slot, compute: Action) -> Action | Slot:
    return compute if slot.overlapped is None else slot


def _check_range(schedule: Schedule, action: Action) -> None:
    """What is placed is looked up by stage and micro-batch: the grid's own check comes only after it."""
    num_stages = schedule.num_ranks if action.kind in SHARDS else schedule.num_stages
    if not 0 <= action.stage < num_stages or not 0 <= action.microbatch < schedule.num_microbatches:
        there = f"stages 0 to {num_stages - 1}, micro-batches 0 to {schedule.num_microbatches - 1}"
        raise ValueError(f"{action} cannot be placed: there are only {there}")
