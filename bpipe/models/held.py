"""Count what the ranks of a schedule hold at their fullest, whatever the sizes of its stages.

In: a Schedule, or what asks for one.

Out: one `HeldCounts` a rank. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul, sub

from bpipe.build import ScheduleConfig, orders_of, unchecked
from bpipe.ir.action import READING, Action, Kind
from bpipe.ir.host_buffers import host_buffers, num_buffers_for, stages_in_buffers
from bpipe.ir.memory import KeptMemory, Memory, StageMemory, live_bytes, memory_of
from bpipe.ir.schedule import Schedule

# Of slices there are hundreds of moments, of which few exceed most others: to compare all took a sixth of a search.
_MOST_COMPARED = 16


@dataclass(frozen=True, slots=True)
class HeldCounts:
    """Counts of what one rank of a schedule holds at its fullest, for any sizes of its stages.

    `moments` are all that no other exceeds, and of slices some more: for every one of `stages`, which are its own, how
    many micro-batches are held as saved and how many between the halves of their backward. Besides there are host
    buffers, of `hosted`: how many, and for any of which stages. Where micro-batches are cut, slices are counted, and
    then for every stage how many micro-batches' keys and values are kept, and how many of their gradients.
    """

    stages: tuple[int, ...]
    moments: tuple[tuple[int, ...], ...]
    hosted: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_buffers(self) -> int:
        return sum(count for count, _ in self.hosted)

    def num_bytes(self, saved: Sequence[int], after_input: Sequence[int], *kept: Sequence[int]) -> tuple[int, int]:
        """Return bytes of own micro-batches at their most, and of host buffers, which stay allocated.

        Sizes are those of every stage; `kept`: of keys and values, and of their gradients, where sequences are cut.
        """
        sizes = [of_all[stage] for of_all in (saved, after_input, *kept) for stage in self.stages]
        own = max(sum(map(mul, moment, sizes)) for moment in self.moments)
        return own, sum(count * max(saved[stage] for stage in stages) for count, stages in self.hosted)


def held_by(schedule: Schedule) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank."""
    stages = [schedule.layout.stages_of(rank) for rank in range(schedule.num_ranks)]
    splits = bool(schedule.split_stages)
    return tuple(
        HeldCounts(stages[rank], _moments(schedule, rank, stages[rank], splits), _buffers(schedule, rank, stages))
        for rank in range(schedule.num_ranks)
    )


def _buffers(
    schedule: Schedule, rank: int, stages: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if schedule.layout.slices == 1:
        return tuple((count, stages[guest]) for guest, count in num_buffers_for(schedule, rank).items())
    each = Counter(stages_in_buffers(host_buffers(schedule, rank)))
    return tuple((count, tuple(sorted(held))) for held, count in each.items())


def _moments(schedule: Schedule, rank: int, stages: tuple[int, ...], splits: bool) -> tuple[tuple[int, ...], ...]:
    """Return the memory rule asked with sizes that are powers of one base, so that the digits of what is held count
    micro-batches by stage.

    While an I runs, its micro-batch is held as the larger of both sizes: it is counted once as saved, once as between
    the halves.
    """
    base = schedule.num_microbatches + 1
    zeros, ones = [0] * schedule.num_stages, [0] * schedule.num_stages
    for place, stage in enumerate(stages):
        ones[stage] = base**place
    both, kept = live_bytes(schedule, rank, memory_of(ones)), _kept(schedule, rank, ones)
    if splits:
        saved = live_bytes(schedule, rank, memory_of(ones, None, zeros))
        between = live_bytes(schedule, rank, memory_of(zeros, None, ones))
        found = {
            *zip(saved, map(sub, both, saved), *kept, strict=True),
            *zip(map(sub, both, between), between, *kept, strict=True),
        }
    else:
        found = set(zip(both, (0,) * len(both), *kept, strict=True))
    moments = (tuple(digit for one in moment for digit in _digits(one, base, len(stages))) for moment in found)
    return _highest(moments, _MOST_COMPARED if kept else None)


def _kept(schedule: Schedule, rank: int, ones: Sequence[int]) -> list[tuple[int, ...]]:
    """Return in each slot of how many micro-batches, by stage, keys are kept, and of how many gradients."""
    slices = schedule.layout.slices
    if slices == 1:
        return []
    nothing = (StageMemory(0, 0, 0),) * (schedule.num_stages * slices)
    sizes = (tuple(KeptMemory(*one) for one in of_all) for of_all in (((n, 0) for n in ones), ((0, n) for n in ones)))
    return [live_bytes(schedule, rank, Memory(nothing, slices=slices, kept=kept)) for kept in sizes]


def _digits(number: int, base: int, count: int) -> tuple[int, ...]:
    return tuple(number // base**place % base for place in range(count))


def _highest(moments: Iterable[tuple[int, ...]], most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return all moments that no other exceeds, or none of `most`.

    Each is packed into one number, with a bit above every count: of a difference these bits tell.
    """
    rows = sorted(moments, key=sum, reverse=True)
    width = max(map(max, rows)).bit_length() + 1
    above = sum(1 << (place * width + width - 1) for place in range(len(rows[0])))
    kept: list[tuple[int, ...]] = []
    packed: list[int] = []
    for moment in rows:
        number = 0
        for count in reversed(moment):
            number = number << width | count
        for place, other in enumerate(packed):
            if (other - number) & above == above:
                # What exceeds one exceeds most of those behind it: it is asked first.
                if place:
                    packed[place], packed[0] = packed[0], other
                break
        else:
            kept.append(moment)
            if most is None or len(packed) < most:
                packed.append(number | above)
    return tuple(kept)


def held_by_orders(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a schedule without transfers, from its orders alone: bubbles change nothing
    that is held."""
    layout = config.layout
    rows = []
    for rank, order in enumerate(orders_of(config)):
        stages = layout.stages_of(rank)
        moments = _moments_of(order, stages) if config.slices == 1 else _sliced_moments(order, stages, config.slices)
        rows.append(HeldCounts(stages, moments, ()))
    return tuple(rows)


def _moments_of(order: Sequence[Action], stages: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """What is held when something is about to be given back: in between it only grows. Of an I also when it is over."""
    place_of, counts = {stage: place for place, stage in enumerate(stages)}, [0] * (2 * len(stages))
    found, has_grown = {tuple(counts)}, False
    for action in order:
        kind = action.kind
        if kind is Kind.FORWARD:
            counts[place_of[action.stage]] += 1
            has_grown = True
        elif kind in READING:
            if has_grown:
                found.add(tuple(counts))
            place = place_of[action.stage]
            if kind is Kind.BACKWARD_WEIGHT:
                counts[len(stages) + place] -= 1
            else:
                counts[place] -= 1
                counts[len(stages) + place] += kind is Kind.BACKWARD_INPUT
            has_grown = kind is Kind.BACKWARD_INPUT
    return _highest(found)


def _sliced_moments(order: Sequence[Action], stages: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], ...]:
    """Return the same of slices and of what is kept for them, which a backward takes at its start and gives at its
    end (`ir.memory`)."""
    num = len(stages)
    place_of, counts = {stage: place for place, stage in enumerate(stages)}, [0] * (4 * num)
    found, has_grown = {tuple(counts)}, False
    for action in order:
        kind, place, part = action.kind, place_of[action.stage], action.microbatch % slices
        if kind is Kind.FORWARD:
            counts[place] += 1
            counts[2 * num + place] += part == 0
            has_grown = True
            continue
        if kind is not Kind.BACKWARD_WEIGHT and part == slices - 1:
            counts[3 * num + place] += 1
            has_grown = True
        if has_grown:
            found.add(tuple(counts))
        has_grown = False
        if kind is Kind.BACKWARD_WEIGHT:
            counts[num + place] -= 1
            continue
        counts[place] -= 1
        if kind is Kind.BACKWARD_INPUT:
            # What it leaves may be more than was saved, and stands beside what is kept until it is over.
            counts[num + place] += 1
            found.add(tuple(counts))
        if part == 0:
            counts[2 * num + place] -= 1
            counts[3 * num + place] -= 1
    return _highest(found, _MOST_COMPARED)


@lru_cache(maxsize=4096)
def held_within(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a configuration, building no more of the schedule than that takes."""
    return held_by_orders(config) if config.balance is None else held_by(unchecked(config))
