"""Count what the ranks of a schedule hold at their fullest, whatever the sizes of its stages.

In: a Schedule, or what asks for one.

Out: one `HeldCounts` a rank. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul, sub

from bpipe.build import ScheduleConfig, orders_of, unchecked
from bpipe.ir.action import READING, Action, Kind
from bpipe.ir.host_buffers import num_buffers_for
from bpipe.ir.memory import live_bytes, memory_of
from bpipe.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class HeldCounts:
    """Counts of what one rank of a schedule holds at its fullest, for any sizes of its stages.

    `moments` are all that no other exceeds: for every one of `stages`, which are its own, how many micro-batches are
    held as saved and how many between the halves of their backward. Besides there are host buffers, of `hosted`: how
    many, and for any of which stages.
    """

    stages: tuple[int, ...]
    moments: tuple[tuple[int, ...], ...]
    hosted: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_buffers(self) -> int:
        return sum(count for count, _ in self.hosted)

    def num_bytes(self, saved: Sequence[int], after_input: Sequence[int]) -> tuple[int, int]:
        """Return bytes of own micro-batches at their most, and of host buffers, which stay allocated.

        Sizes are those of every stage.
        """
        sizes = [*(saved[stage] for stage in self.stages), *(after_input[stage] for stage in self.stages)]
        own = max(sum(map(mul, moment, sizes)) for moment in self.moments)
        return own, sum(count * max(saved[stage] for stage in stages) for count, stages in self.hosted)


def held_by(schedule: Schedule) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank."""
    stages = [schedule.layout.stages_of(rank) for rank in range(schedule.num_ranks)]
    splits = bool(schedule.split_stages)
    return tuple(
        HeldCounts(
            stages[rank],
            _moments(schedule, rank, stages[rank], splits),
            tuple((count, stages[guest]) for guest, count in num_buffers_for(schedule, rank).items()),
        )
        for rank in range(schedule.num_ranks)
    )


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
    both = live_bytes(schedule, rank, memory_of(ones))
    found = {(held, 0) for held in both}
    if splits:
        saved = live_bytes(schedule, rank, memory_of(ones, None, zeros))
        between = live_bytes(schedule, rank, memory_of(zeros, None, ones))
        found = {*zip(saved, map(sub, both, saved), strict=True), *zip(map(sub, both, between), between, strict=True)}
    return _highest((*_digits(one, base, len(stages)), *_digits(other, base, len(stages))) for one, other in found)


def _digits(number: int, base: int, count: int) -> tuple[int, ...]:
    return tuple(number // base**place % base for place in range(count))


def _highest(moments: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return all moments that no other exceeds.

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
            packed.append(number | above)
    return tuple(kept)


def held_by_orders(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a schedule without transfers, from its orders alone: bubbles change nothing
    that is held."""
    layout = config.layout
    rows = []
    for rank, order in enumerate(orders_of(config)):
        stages = layout.stages_of(rank)
        rows.append(HeldCounts(stages, _moments_of(order, stages), ()))
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


@lru_cache(maxsize=4096)
def held_within(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a configuration, building no more of the schedule than that takes."""
    return held_by_orders(config) if config.balance is None else held_by(unchecked(config))
