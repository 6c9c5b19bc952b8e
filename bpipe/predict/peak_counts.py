"""What the ranks of a schedule hold at their fullest, as counts for any sizes of its stages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Any

from bpipe.build import ScheduleConfig, orders_of, unchecked
from bpipe.schedule.action import SHARDS, Action, Kind
from bpipe.schedule.host_buffers import host_buffers, num_buffers_for, stages_in_buffers
from bpipe.schedule.schedule import Schedule

# Of slices there are hundreds of moments, of which few exceed most others: to compare all took a sixth of a search.
_MOST_COMPARED = 16
# What takes and gives nothing of a rank's own stages, and what does of what is kept of a micro-batch in slices.
_ELSEWHERE = frozenset((*SHARDS, Kind.HOST, Kind.RETURN))
_WITH_KEPT = frozenset((Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT))


@dataclass(frozen=True, slots=True)
class HeldCounts:
    """What one rank of a schedule holds at its fullest, for any sizes of its stages."""

    stages: tuple[int, ...]
    """Its own stages."""
    moments: tuple[tuple[int, ...], ...]
    """Moments that no other exceeds, and with slices some more: for every stage the micro-batches held as saved, then
    those between the halves of their backward, and of slices those whose keys and gradients are kept."""
    hosted: tuple[tuple[int, tuple[int, ...]], ...]
    """Host buffers: how many, and the stages that any of them is for."""

    @property
    def num_buffers(self) -> int:
        return sum(count for count, _ in self.hosted)

    @property
    def most_saved(self) -> int:
        """The most micro-batches, or slices, of all its stages that it holds as saved at a time."""
        return max(sum(moment[: len(self.stages)]) for moment in self.moments)

    def num_bytes(self, saved: Sequence[int], after_input: Sequence[int], *kept: Sequence[int]) -> tuple[int, int]:
        """Return peak bytes of own micro-batches, and of host buffers. Sizes are by stage; `kept`: keys, gradients."""
        sizes = [of_all[stage] for of_all in (saved, after_input, *kept) for stage in self.stages]
        own = max(sum(map(mul, moment, sizes)) for moment in self.moments)
        return own, sum(count * max(saved[stage] for stage in stages) for count, stages in self.hosted)


def held_by(schedule: Schedule) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank."""
    slices, stages = schedule.layout.slices, [schedule.layout.stages_of(rank) for rank in range(schedule.num_ranks)]
    return tuple(
        HeldCounts(
            stages[rank],
            _moments([(*slot.computations, *slot.transfers) for slot in slots], stages[rank], slices),
            _buffers(schedule, rank, stages),
        )
        for rank, slots in enumerate(schedule.ranks)
    )


def held_by_orders(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank without transfers, from its order alone: bubbles change nothing."""
    layout = config.layout
    return tuple(
        HeldCounts(own, _moments([(action,) for action in order], own, config.slices), ())
        for own, order in ((layout.stages_of(rank), order) for rank, order in enumerate(orders_of(config)))
    )


def _buffers(
    schedule: Schedule, rank: int, stages: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    if schedule.layout.slices == 1:
        return tuple((count, stages[guest]) for guest, count in num_buffers_for(schedule, rank).items())
    counts = Counter(stages_in_buffers(host_buffers(schedule, rank)))
    return tuple((count, tuple(sorted(stages_held))) for stages_held, count in counts.items())


def _moments(slots: Sequence[Sequence[Action]], stages: tuple[int, ...], slices: int) -> tuple[tuple[int, ...], ...]:
    """Return what is held in each slot by the memory rule (`schedule.memory`): actions take at its start and give at
    its end. An I holds the larger of what was saved and of what it leaves, so both are tried."""
    import numpy as np

    num = len(stages)
    saved = {stage: place for place, stage in enumerate(stages)}
    width = num * (2 if slices == 1 else 4)
    keys, gradients = 2 * num, 3 * num
    takes: list[int] = []
    gives: list[int] = []
    halves: list[int] = []
    for number, actions in enumerate(slots):
        for action in actions:
            kind = action.kind
            if kind in _ELSEWHERE:
                continue
            place = number * width + saved[action.stage]
            if kind is Kind.FORWARD or kind is Kind.LOAD:
                takes.append(place)
            elif kind is Kind.BACKWARD_WEIGHT:
                gives.append(place + num)
            elif kind is Kind.BACKWARD_INPUT:
                halves.append(place)
            else:
                gives.append(place)
            if slices > 1 and kind in _WITH_KEPT:
                part = action.microbatch % slices
                if kind is Kind.FORWARD:
                    takes += [place + keys] * (part == 0)
                else:
                    takes += [place + gradients] * (part == slices - 1)
                    gives += [place + keys, place + gradients] * (part == 0)
    taken, freed, halved = (
        np.bincount(places, minlength=width * len(slots)).reshape(-1, width) for places in (takes, gives, halves)
    )
    halved = np.roll(halved, num, axis=1) - halved
    totals = np.cumsum(taken - freed + halved, axis=0) + freed
    return _highest(np.concatenate((totals - halved, totals)), None if slices == 1 else _MOST_COMPARED)


def _highest(rows: Any, max_kept: int | None) -> tuple[tuple[int, ...], ...]:
    """Return all moments that no other exceeds; with `max_kept`, after that number some that others do."""
    kept: list[Any] = []
    sums = rows.sum(axis=1)
    while len(rows) and len(kept) != max_kept:
        highest = rows[sums.argmax()]
        kept.append(highest)
        left = (rows > highest).any(axis=1)
        rows, sums = rows[left], sums[left]
    return tuple(tuple(row.tolist()) for row in (*kept, *rows))


@lru_cache(maxsize=4096)
def held_within(config: ScheduleConfig) -> tuple[HeldCounts, ...]:
    """Return the counts of each rank of a configuration, building no more of the schedule than that takes."""
    return held_by_orders(config) if config.balance is None else held_by(unchecked(config))
