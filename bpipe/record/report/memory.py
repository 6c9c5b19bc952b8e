"""What a run will hold, as the run itself counts it.

Unlike `schedule.memory` this knows that host buffers are preallocated, so they are held throughout, and that Megatron's
loop keeps the last backward's input until the next forward has returned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bpipe.record.format import Sizes
from bpipe.schedule.action import Key, Kind
from bpipe.schedule.families.families import exchange_of
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory, live_bytes, memory_of, num_transfers, peak_bytes
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """Peaks of one rank. `bound_bytes` is None without balancing, bytes are None if the size of a micro-batch is unknown."""

    microbatches: int
    num_bytes: int | None
    bound_bytes: int | None


def own_peak(
    schedule: Schedule,
    rank: int,
    saved: Mapping[int, int],
    moved: Mapping[int, int],
    received: int,
    after_input: Mapping[int, int],
    shard: int = 0,
) -> int:
    """Return the peak in bytes of a rank's own micro-batches.

    Megatron's 1F1B loop keeps the output of its last backward in a variable, and so that micro-batch's input, until the
    next forward has returned. Its interleaved loop does so at times that depend on how its communication overlaps;
    there such an input is not predicted.

    Args:
        schedule: what runs.
        rank: of the schedule.
        saved: what one micro-batch saves, by stage.
        moved: what a transfer moves of it, by stage.
        received: what comes from the neighbour for one micro-batch.
        after_input: what is held between the halves of a backward, by stage; by default all that was saved.
        shard: what is held between S and T.
    """
    stages = range(schedule.num_stages)
    whole = [saved.get(stage, 0) for stage in stages]
    between = [after_input.get(stage, size) for stage, size in enumerate(whole)]
    memory = memory_of(whole, [moved.get(stage, 0) for stage in stages], between, shard)
    return peak_of_rule(schedule, rank, memory, received)


def peak_of_rule(schedule: Schedule, rank: int, memory: Memory, received: int) -> int:
    """Return the peak of a rank's own micro-batches by a rule, which may have sizes by slice; see `own_peak`."""
    keeps_input = exchange_of(schedule.name) is Exchange.MEGATRON_1F1B
    peak = 0
    after_backward = False
    for slot, level in zip(schedule.ranks[rank], live_bytes(schedule, rank, memory), strict=True):
        if slot.compute is not None:
            is_forward = slot.compute.kind is Kind.FORWARD
            level += received * (is_forward and after_backward and keeps_input)
            after_backward = not is_forward
        peak = max(peak, level)
    return peak


def rule_by_slice(
    schedule: Schedule,
    saved: Mapping[Key, int],
    moved: Mapping[Key, int],
    after_input: Mapping[Key, int],
    shard: int = 0,
) -> Memory:
    """Return the rule for sizes of slices, each by stage and number: of those at one place the largest.

    `moved` lacks what never leaves; what `after_input` lacks is held whole. `shard`: bytes of a slice between S and T.
    """
    slices = schedule.layout.slices
    places: list[tuple[int, ...]] = [(0, 0, 0)] * (schedule.num_stages * slices)
    for key, size in saved.items():
        place = key[0] * slices + key[1] % slices
        places[place] = tuple(map(max, places[place], (size, moved.get(key, 0), after_input.get(key, size))))
    return Memory(tuple(StageMemory(*sizes) for sizes in places), slices=slices, shard_bytes=shard)


def kept_peak(schedule: Schedule, rank: int, kept: Mapping[int, KeptMemory]) -> int:
    """Return the peak of the keys, values and gradients that a rank keeps. `kept`: of one micro-batch, by stage."""
    stages, nothing = range(schedule.num_stages), KeptMemory(0, 0)
    sizes = (StageMemory(0, 0, 0),) * (schedule.num_stages * schedule.layout.slices)
    memory = Memory(sizes, slices=schedule.layout.slices, kept=tuple(kept.get(stage, nothing) for stage in stages))
    return max(live_bytes(schedule, rank, memory), default=0)


def rank_peaks(schedule: Schedule, rank: int, sizes: Sizes | None) -> RankPeaks:
    """Return the rank's peak, and its peak if it filled its bound, with what cannot move of evicted micro-batches."""
    units = dict.fromkeys(schedule.layout.stages_of(rank), 1)
    # If partners use their own host memory, no host buffer was made here.
    buffers = 0 if sizes is not None and not sizes.host_bytes else num_host_buffers(schedule, rank)
    # A stage of which nothing moves evicts nothing.
    leaving = {stage: int(sizes is None or sizes.moved_bytes.get(stage) != 0) for stage in units}
    count = own_peak(schedule, rank, units, leaving, 0, {}) + buffers
    bound = None if schedule.bounds is None else schedule.bounds[rank]
    if sizes is None:
        return RankPeaks(count, None, None)
    own = sizes.saved_bytes, sizes.moved_bytes, sizes.received_bytes, sizes.after_input_bytes, sizes.shard_bytes
    peak = own_peak(schedule, rank, *own) + sizes.host_bytes
    largest = max(sizes.saved_bytes.values(), default=0)
    return RankPeaks(count, peak, None if bound is None else peak + (bound - count) * largest)


def moved_nothing(schedule: Schedule, rank: int, moved_bytes: Mapping[int, int]) -> bool:
    """Whether a rank should have evicted, and moved nothing. `moved_bytes`: of one micro-batch, by stage."""
    return bool(num_transfers(schedule, rank).evictions) and not any(moved_bytes.values())


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule without its transfers, as it runs without balancing."""
    ranks = tuple(tuple(replace(slot, transfers=()) for slot in row) for row in schedule.ranks)
    return replace(schedule, ranks=ranks, hosts=None, bounds=None)


def whole_peaks(
    schedule: Schedule, saved_bytes: Mapping[int, int], after_input_bytes: Mapping[int, int], shard_bytes: int = 0
) -> tuple[int, ...] | None:
    """Return the peaks if every transfer moves all that is saved, or None if some stage's size is not known."""
    if not all(stage in saved_bytes for stage in range(schedule.num_stages)):
        return None
    saved = [saved_bytes[stage] for stage in range(schedule.num_stages)]
    between = [after_input_bytes.get(stage, size) for stage, size in enumerate(saved)]
    return peak_bytes(schedule, memory_of(saved, None, between, shard_bytes))
