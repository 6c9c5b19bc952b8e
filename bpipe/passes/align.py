"""Give a schedule the grid its own order implies. In: a compute-only Schedule. Out: the same orders on the unit grid.

Listings from elsewhere may hold only the order of each rank, or count their columns differently. Knows no names, no memory.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.generate.place import place
from bpipe.ir.schedule import Schedule


def align(schedule: Schedule) -> Schedule:
    """Every computation as early as its rank's order and its neighbours allow.

    Raises ValueError for a schedule with transfers, and for orders that wait for each other.
    """
    for row in schedule.ranks:
        for slot in row:
            if slot.transfers:
                raise ValueError(f"{slot.transfers[0]} belongs to its slot: align a compute-only schedule, then balance it")
    orders = [[slot.compute for slot in row if slot.compute is not None] for row in schedule.ranks]
    placed = place(schedule.name, schedule.num_microbatches, schedule.stage_to_rank, orders)
    return replace(placed, partners=schedule.partners, bounds=schedule.bounds)
