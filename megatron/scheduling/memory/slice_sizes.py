"""Read off a first iteration what each slice of a stage's micro-batches holds.

In: bytes by stage and number, what a stage keeps. Out: bytes by place, where `bpipe.schedule.memory.Memory` has them: slice j
of a stage of k slices is at place stage * k + j. Without slices a place is a stage. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from bpipe.balance.pairs import own_bytes
from bpipe.schedule.action import Key
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory
from bpipe.schedule.schedule import Schedule

# By stage and number, which is a micro-batch's or a slice's.
ByNumber = Mapping[Key, int]


def latest_by_place(each: ByNumber, slices: int) -> dict[int, int]:
    """Return the bytes of the last of each place: of the first, what all share may have been taken for its own."""
    return {stage * slices + number % slices: nbytes for (stage, number), nbytes in each.items()}


def most_by_place(each: ByNumber, slices: int) -> dict[int, int]:
    """Return the most bytes of each place."""
    most: dict[int, int] = {}
    for (stage, number), nbytes in each.items():
        place = stage * slices + number % slices
        most[place] = max(nbytes, most.get(place, 0))
    return most


def moved_by_place(
    by_stage: Mapping[int, int], each: ByNumber, saved: Mapping[int, int], slices: int, differing: bool
) -> dict[int, int]:
    """Return the bytes that move of each place of stages that left.

    Where slices differ, one that did not leave is taken to move the smallest share that another one of its stage did.
    """
    if not differing:
        return {stage * slices + part: nbytes for stage, nbytes in by_stage.items() for part in range(slices)}
    moved = most_by_place({key: nbytes for key, nbytes in each.items() if nbytes}, slices)
    for stage in by_stage:
        places = range(stage * slices, (stage + 1) * slices)
        shares = [moved[place] / saved[place] for place in places if place in moved and saved.get(place)]
        if shares:
            moved |= {
                place: int(min(shares) * saved[place]) for place in places if place in saved.keys() - moved.keys()
            }
    return moved


def kept_at_peak(schedule: Schedule, rank: int, saved: Mapping[int, int], kept: Mapping[int, KeptMemory]) -> int:
    """Return how many bytes of keys, values and gradients a rank holds when it holds most."""
    slices, nothing = schedule.layout.slices, KeptMemory(0, 0)
    places = range(schedule.num_stages * slices)
    sizes = tuple(StageMemory(saved.get(place, 0), saved.get(place, 0), saved.get(place, 0)) for place in places)
    of_stages = tuple(kept.get(stage, nothing) for stage in range(schedule.num_stages))
    alone, together = (
        max(own_bytes(schedule, rank, Memory(sizes, slices=slices, kept=one)), default=0) for one in ((), of_stages)
    )
    return together - alone
