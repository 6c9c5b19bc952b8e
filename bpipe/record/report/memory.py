"""Say what a run will hold, as the run itself counts it.

In: a Schedule, measured sizes of a micro-batch. Out: peaks and bounds in bytes.

Beside `schedule.memory` this knows two things of the run: host buffers are preallocated, so they are held throughout; and
Megatron's loop keeps the last backward's input until the next forward has returned. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bpipe.schedule.action import Key, Kind
from bpipe.schedule.families.families import exchange_of
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory, live_bytes, memory_of, peak_bytes
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class RankSizes:
    """Measured sizes of one rank: of one micro-batch by stage, of what it receives for one, and of its host buffers.

    `after_input_bytes`: held between dgrad and wgrad, by stage. `shard_bytes`: held by a shard of the vocabulary
    between its passes. `own_bytes`: host buffers in its own node's memory.
    """

    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    received_bytes: int
    host_bytes: int
    after_input_bytes: Mapping[int, int] = field(default_factory=dict)
    shard_bytes: int = 0
    own_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankPeaks:
    """Peaks of one rank. `bound_*` is None without balancing; bytes are None where the size of a micro-batch is
    unknown."""

    microbatches: int
    num_bytes: int | None
    bound_microbatches: int | None
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
    """Return the most a rank's own micro-batches occupy, when one of each stage saves `saved[stage]` and a transfer
    moves `moved[stage]` of it.

    `after_input[stage]` is held between the halves of its backward; as much as was saved where nothing says so. `shard`
    is held between S and T.

    Megatron's 1F1B loop keeps the output of its last backward in a variable, and so that micro-batch's input,
    `received` bytes, until the next forward has returned: a forward right after a backward finds it still there. Its
    interleaved loop does so at times that depend on how its communication overlaps; there an input more or less is not
    predicted.
    """
    stages = range(schedule.num_stages)
    whole = [saved.get(stage, 0) for stage in stages]
    between = [after_input.get(stage, size) for stage, size in enumerate(whole)]
    return peak_of_rule(
        schedule, rank, memory_of(whole, [moved.get(stage, 0) for stage in stages], between, shard), received
    )


def peak_of_rule(schedule: Schedule, rank: int, memory: Memory, received: int) -> int:
    """Return the most a rank's own micro-batches occupy by a rule, which may have sizes by slice; see `own_peak`."""
    keeps_input = exchange_of(schedule.name) is Exchange.MEGATRON_1F1B
    peak = 0
    after_backward = False
    for slot, held in zip(schedule.ranks[rank], live_bytes(schedule, rank, memory), strict=True):
        if slot.compute is not None:
            forward = slot.compute.kind is Kind.FORWARD
            held += received * (forward and after_backward and keeps_input)
            after_backward = not forward
        peak = max(peak, held)
    return peak


def rule_by_slice(
    schedule: Schedule,
    saved: Mapping[Key, int],
    moved: Mapping[Key, int],
    after_input: Mapping[Key, int],
    shard: int = 0,
) -> Memory:
    """Return the rule for sizes of slices, each by stage and number: of those of one place the largest.

    `moved` has nothing of what never leaves; where `after_input` has none, all that was saved is held.

    A `shard` holds so many bytes of a slice between S and T.
    """
    slices = schedule.layout.slices
    places = [[0, 0, 0] for _ in range(schedule.num_stages * slices)]
    for (stage, number), size in saved.items():
        place, key = places[stage * slices + number % slices], (stage, number)
        for at, one in enumerate((size, moved.get(key, 0), after_input.get(key, size))):
            place[at] = max(place[at], one)
    return Memory(tuple(StageMemory(*place) for place in places), slices=slices, shard_bytes=shard)


def kept_peak(schedule: Schedule, rank: int, kept: Mapping[int, KeptMemory]) -> int:
    """Return the most that a rank keeps of keys, values and their gradients at once, when `kept[stage]` is that of
    one micro-batch."""
    stages, nothing = range(schedule.num_stages), KeptMemory(0, 0)
    sizes = (StageMemory(0, 0, 0),) * (schedule.num_stages * schedule.layout.slices)
    memory = Memory(sizes, slices=schedule.layout.slices, kept=tuple(kept.get(stage, nothing) for stage in stages))
    return max(live_bytes(schedule, rank, memory), default=0)


def rank_peaks(schedule: Schedule, rank: int, sizes: RankSizes | None) -> RankPeaks:
    """Return the rank's peak, and its peak if it filled its bound.

    Both include what cannot move of a micro-batch that is away.
    """
    ones = dict.fromkeys(schedule.layout.stages_of(rank), 1)
    # Where partners use their own host memory, no host buffer was made here.
    buffers = 0 if sizes is not None and not sizes.host_bytes else num_host_buffers(schedule, rank)
    # What moves nothing of itself does not leave.
    leave = {stage: int(sizes is None or sizes.moved_bytes.get(stage) != 0) for stage in ones}
    count = own_peak(schedule, rank, ones, leave, 0, {}) + buffers
    bound = None if schedule.bounds is None else schedule.bounds[rank]
    if sizes is None:
        return RankPeaks(count, None, bound, None)
    own = sizes.saved_bytes, sizes.moved_bytes, sizes.received_bytes, sizes.after_input_bytes, sizes.shard_bytes
    peak = own_peak(schedule, rank, *own) + sizes.host_bytes
    largest = max(sizes.saved_bytes.values(), default=0)
    return RankPeaks(count, peak, bound, None if bound is None else peak + (bound - count) * largest)


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule without its transfers, as it would run unbalanced."""
    ranks = tuple(tuple(replace(slot, transfers=()) for slot in row) for row in schedule.ranks)
    return replace(schedule, ranks=ranks, hosts=None, bounds=None)


def whole_peaks(
    schedule: Schedule, saved_bytes: Mapping[int, int], after_input_bytes: Mapping[int, int], shard_bytes: int = 0
) -> tuple[int, ...] | None:
    """Return the peaks of a run that has not been made, every transfer moving all that is saved; None unless every
    stage's size is known."""
    if not all(stage in saved_bytes for stage in range(schedule.num_stages)):
        return None
    saved = [saved_bytes[stage] for stage in range(schedule.num_stages)]
    between = [after_input_bytes.get(stage, size) for stage, size in enumerate(saved)]
    return peak_bytes(schedule, memory_of(saved, None, between, shard_bytes))
