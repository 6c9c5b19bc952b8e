"""Alignment: give a compute-only schedule the unit grid that its orders imply.

Listings from elsewhere may hold only the order of each rank, or count their columns differently.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.schedule.action import SHARDS, Action
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.schedule import Schedule, Slot


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
    return replace(placed, hosts=schedule.hosts, bounds=schedule.bounds, after_input=schedule.after_input)


def is_listing(schedule: Schedule) -> bool:
    """Whether a schedule gives only the order of each rank, without bubbles in between, and so no times."""
    computing = [[bool(slot.computations) for slot in row] for row in schedule.ranks]
    has_transfers = any(slot.transfers for row in schedule.ranks for slot in row)
    return not has_transfers and all(row == sorted(row, reverse=True) for row in computing)
