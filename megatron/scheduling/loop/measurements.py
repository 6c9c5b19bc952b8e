"""What a rank measures of its memory in the first iteration.

Bytes by place are those of `bpipe.schedule.memory.Memory`: slice j of a stage of k slices is at place stage * k + j.
Without slices a place is a stage.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bpipe.balance.pairs import own_bytes
from bpipe.runtime.meter import largest_by
from bpipe.schedule.action import Action, Key
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory
from bpipe.schedule.schedule import Schedule

# By stage and number, which is a micro-batch's or a slice's.
ByNumber = Mapping[Key, int]
# The storages that whoever computes keeps from the first half of a backward to the second.
Waiting = Callable[[Action], Sequence[torch.UntypedStorage]]


@dataclass(frozen=True)
class FirstMeasured:
    """Measured memory of one rank in its first iteration.

    Attributes:
        saved_bytes: Saved by the forward of one micro-batch, by stage, or by place if micro-batches are cut into
            slices.
        moved_bytes: Moved of one micro-batch, likewise, of the stages that evicted.
        after_input_bytes: Held of one micro-batch between the halves of its backward, by stage.
        shard_bytes: Held of one micro-batch between S and T.
        received_bytes: Received for one micro-batch.
        peak_bytes: Held at most, host buffers included.
        allocated_bytes: Peak of the device's allocator until the loop's end, before weights were updated; 0 on a CPU.
        reserved_bytes: Peak of what the allocator reserved until then, likewise.
        lent_bytes: Host buffers outside of that allocator.
        parts: Parts that could move in place of all, by stage: `Sizing.parts`.
        kept: What each stage keeps of a micro-batch that is cut into slices.
    """

    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    after_input_bytes: Mapping[int, int]
    shard_bytes: int
    received_bytes: int
    peak_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    lent_bytes: int = 0
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[int, KeptMemory] = field(default_factory=dict)


def latest_by_place(sizes: ByNumber, slices: int) -> dict[int, int]:
    """Return the bytes of the last of each place: the first may include storages that all share."""
    return {stage * slices + number % slices: nbytes for (stage, number), nbytes in sizes.items()}


def most_by_place(sizes: ByNumber, slices: int) -> dict[int, int]:
    """Return the most bytes of each place."""
    return largest_by((stage * slices + number % slices, nbytes) for (stage, number), nbytes in sizes.items())


def moved_by_place(
    by_stage: Mapping[int, int], sizes: ByNumber, saved: Mapping[int, int], slices: int, differing: bool
) -> dict[int, int]:
    """Return the moved bytes of each place of the stages that evicted.

    If slices differ, one that was not evicted is assumed to move the smallest share that another one of its stage did.
    """
    if not differing:
        return {stage * slices + part: nbytes for stage, nbytes in by_stage.items() for part in range(slices)}
    moved = most_by_place({key: nbytes for key, nbytes in sizes.items() if nbytes}, slices)
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
        max(own_bytes(schedule, rank, Memory(sizes, slices=slices, kept=keys)), default=0) for keys in ((), of_stages)
    )
    return together - alone
