"""Count what the ranks of a schedule hold at their fullest, whatever the sizes of its stages.

In: a Schedule, or what asks for one.

Out: one `HeldCounts` a rank. Knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from bpipe.build import ScheduleConfig, orders_of, unchecked
from bpipe.schedule.action import READING, Action, Kind
from bpipe.schedule.host_buffers import host_buffers, num_buffers_for, stages_in_buffers
from bpipe.schedule.memory import KeptMemory, Memory, StageMemory, live_bytes
from bpipe.schedule.schedule import Schedule

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
    digits = _digits_of(schedule, stages)
    return tuple(
        HeldCounts(stages[rank], _moments(schedule, rank, digits), _buffers(schedule, rank, stages))
        for rank in range(schedule.num_ranks)
    )


def _buffers(
    schedule: Schedule, rank: int, stages: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if schedule.layout.slices == 1:
        return tuple((count, stages[guest]) for guest, count in num_buffers_for(schedule, rank).items())
    each = Counter(stages_in_buffers(host_buffers(schedule, rank)))
    return tuple((count, tuple(sorted(held))) for held, count in each.items())


class _Digits(NamedTuple):
    """Sizes that are each one digit of a number, so that the digits of what is held count micro-batches.

    `width` bits each, of which the uppermost stays free; of a rank's stages, `num` at most, first those held as saved,
    from `saved` on, and those between the halves of a backward, from `between` on; behind both, of slices, their keys
    and then the gradients of these.
    """

    memory: Memory
    width: int
    num: int
    saved: int
    between: int

    def read(self, held: int, count: int) -> tuple[int, ...]:
        """Return the counts of a rank with `count` stages, in the order of `HeldCounts.moments`."""
        firsts = (self.saved, self.between, *((2 * self.num, 3 * self.num) if self.memory.kept else ()))
        ones = (1 << self.width) - 1
        rows = [[held >> self.width * (first + place) & ones for place in range(count)] for first in firsts]
        if self.between == self.saved:
            rows[1] = [0] * count
        return tuple(digit for row in rows for digit in row)


def _digits_of(schedule: Schedule, stages: Sequence[tuple[int, ...]]) -> list[_Digits]:
    """While an I runs, its micro-batch is held as the larger of both sizes: with split backwards there are two ways,
    which count it once as saved, once as between the halves."""
    num, width, slices = max(map(len, stages)), schedule.num_microbatches.bit_length() + 1, schedule.layout.slices
    place_of = {stage: place for of_rank in stages for place, stage in enumerate(of_rank)}
    found = []
    for saved, between in ((num, 0), (0, num)) if schedule.split_stages else ((0, 0),):
        ones = [
            [1 << width * (first + place_of[stage]) for first in (saved, between, 2 * num, 3 * num)]
            for stage in range(schedule.num_stages)
        ]
        sizes = tuple(StageMemory(one, one, after) for one, after, *_ in ones for _ in range(slices))
        kept = tuple(KeptMemory(keys, gradients) for *_, keys, gradients in ones) if slices > 1 else ()
        memory = Memory(sizes, slices=slices, kept=kept, counts_hosted=False)
        found.append(_Digits(memory, width, num, saved, between))
    return found


def _moments(schedule: Schedule, rank: int, digits: Sequence[_Digits]) -> tuple[tuple[int, ...], ...]:
    """Return the memory rule asked with sizes of one digit each."""
    count, most = len(schedule.layout.stages_of(rank)), _MOST_COMPARED if schedule.layout.slices > 1 else None
    moments = set()
    for one in digits:
        held = set(live_bytes(schedule, rank, one.memory))
        moments |= {one.read(number, count) for number in _unexceeded(held, one.width, 4 * one.num, most)}
    return _highest(moments, most)


def _highest(moments: Iterable[tuple[int, ...]], most: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return all moments that no other exceeds, or none of `most`."""
    rows = list(moments)
    width = max(map(max, rows)).bit_length() + 1
    packed = {sum(count << width * place for place, count in enumerate(row)): row for row in rows}
    return tuple(packed[number] for number in _unexceeded(packed, width, len(rows[0]), most))


def _unexceeded(numbers: Iterable[int], width: int, num_digits: int, most: int | None) -> list[int]:
    """Return the numbers of which no other has all digits as large, or none of `most`; the upper bit of every digit is
    free: of a difference these bits tell."""
    above = sum(1 << (place * width + width - 1) for place in range(num_digits))
    kept: list[int] = []
    compared: list[int] = []
    # What exceeds another is larger as a number, too.
    for number in sorted(numbers, reverse=True):
        for place, other in enumerate(compared):
            if (other - number) & above == above:
                # What exceeds one exceeds most of those behind it: it is asked first.
                if place:
                    compared[place], compared[0] = compared[0], other
                break
        else:
            kept.append(number)
            if most is None or len(compared) < most:
                compared.append(number | above)
    return kept


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
    end (`schedule.memory`)."""
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
