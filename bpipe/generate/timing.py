"""Time the orders of all ranks at given costs.

In: a Layout, one order a rank, UnitCosts. Out: `Work`, when it starts, a `IterationTime`.

A computation starts when the one before it on its rank is over and what it needs has been made (`ir.dependencies`), on
another rank a hop ago. Two that overlap take as long as both. Times are whole numbers of ticks, as many to a unit of
the costs as make every duration whole. Knows no memory, no transfers and no bandwidth: who wants these asks `simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from bpipe.generate.family import UnitCosts
from bpipe.generate.place import Order
from bpipe.ir.action import Action, Kind
from bpipe.ir.dependencies import NOTHING, Dependencies
from bpipe.ir.layout import Layout
from bpipe.ir.schedule import Schedule, Slot

# Beyond any time: ticks are as fine as all costs together ask for, and a float may have 1074 binary places.
NEVER = 1 << 4096


class StageTicks(NamedTuple):
    """Durations in ticks: of each kind of computation of one stage, and of a message; `per_unit` ticks are one unit
    of the costs."""

    lasts: Mapping[Kind, int]
    hop: int
    per_unit: int


class IterationTime(NamedTuple):
    """Duration of an iteration, in units of the costs, and the bubble of the busiest rank in percent."""

    makespan: Fraction
    bubble_percent: Fraction


@dataclass(slots=True)
class Work:
    """Computations as numbers: of each its actions (two that overlap are one job), rank and ticks, and those it needs,
    with their lag.

    `rows[rank]` is the rank's order.
    """

    actions: list[tuple[Action, ...]]
    rank: list[int]
    lasts: list[int]
    needed: list[list[tuple[int, int]]]
    rows: list[list[int]]


def stage_ticks(costs: UnitCosts, num_chunks: int) -> StageTicks:
    """Return the durations of one stage where a rank has `num_chunks`; costs are of all its chunks together.

    With slices a stage computes so many parts of a rank's work.
    """
    halves = (Fraction(costs.backward_input), Fraction(costs.backward_weight))
    of_a_rank = (Fraction(costs.forward), *halves, sum(halves, Fraction()))
    of_a_stage = [one / num_chunks for one in of_a_rank]
    per_unit = lcm(*(one.denominator for one in (*of_a_stage, Fraction(costs.hop))))
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)
    return StageTicks(
        {kind: int(one * per_unit) for kind, one in zip(kinds, of_a_stage, strict=True)},
        int(costs.hop * per_unit),
        per_unit,
    )


def work_of(layout: Layout, num_microbatches: int, orders: Sequence[Order], at: StageTicks) -> Work:
    """Return the orders as numbers. Raises ValueError for a computation whose cost is not known."""
    dependencies = Dependencies(layout, num_microbatches)
    work = Work([], [], [], [], [])
    for rank, order in enumerate(orders):
        first = len(work.actions)
        work.actions += [one.computations if isinstance(one, Slot) else (one,) for one in order]
        work.rows.append(list(range(first, len(work.actions))))
        work.rank += [rank] * len(order)
    work.lasts += [_ticks(actions, at) for actions in work.actions]
    makers: dict[int, list[int]] = {}
    for job, actions in enumerate(work.actions):
        for value in map(dependencies.value_of, actions):
            makers.setdefault(value, []).append(job)
    makers.pop(NOTHING, None)
    for job, actions in enumerate(work.actions):
        found = []
        for action in actions:
            value = dependencies.operand_of(action)
            # What nobody else makes for it, its own stage has made: its forward, or the first half of its backward.
            value = dependencies.own_operand_of(action) if value == NOTHING else value
            found += [(maker, at.hop if work.rank[maker] != work.rank[job] else 0) for maker in makers.get(value, ())]
        work.needed.append(found)
    return work


def _ticks(actions: Sequence[Action], at: StageTicks) -> int:
    for action in actions:
        if action.kind not in at.lasts:
            raise ValueError(
                f"{action} has no cost: the costs of a forward and of a backward are all that is known here"
            )
    return sum(at.lasts[action.kind] for action in actions)


def starts(work: Work) -> list[int]:
    """Return the tick at which each job starts, every rank in its order.

    Raises ValueError where the orders wait for each other.
    """
    begun = [-1] * len(work.actions)
    over = [-1] * len(work.actions)
    needed, lasts = work.needed, work.lasts
    at = [0] * len(work.rows)
    free = [0] * len(work.rows)
    left = [rank for rank, row in enumerate(work.rows) if row]
    while left:
        moved = False
        for rank in left:
            row = work.rows[rank]
            now, position = free[rank], at[rank]
            while position < len(row):
                job = row[position]
                ready = now
                for maker, lag in needed[job]:
                    if over[maker] < 0:
                        break
                    if over[maker] + lag > ready:
                        ready = over[maker] + lag
                else:
                    begun[job] = ready
                    over[job] = now = ready + lasts[job]
                    position += 1
                    continue
                break
            moved = moved or position > at[rank]
            free[rank], at[rank] = now, position
        if not moved:
            stuck = ", ".join(
                f"rank {rank} at {' with '.join(map(str, work.actions[work.rows[rank][at[rank]]]))}" for rank in left
            )
            raise ValueError(f"the orders of the ranks wait for each other: {stuck}")
        left = [rank for rank in left if at[rank] < len(work.rows[rank])]
    return begun


def length(work: Work) -> int:
    """Return the ticks from the first start to the last end, every rank in its order."""
    begun = starts(work)
    return max((begun[row[-1]] + work.lasts[row[-1]] for row in work.rows if row), default=0)


def iteration_time(schedule: Schedule, costs: UnitCosts) -> IterationTime:
    """Return how long the computations of a schedule take at these costs; its transfers take no time."""
    at = stage_ticks(costs, schedule.num_chunks * schedule.layout.slices)
    orders = [[slot for slot in row if slot.compute is not None] for row in schedule.ranks]
    work = work_of(schedule.layout, schedule.num_microbatches, orders, at)
    ticks = length(work)
    busiest = max(sum(work.lasts[job] for job in row) for row in work.rows)
    return IterationTime(Fraction(ticks, at.per_unit), 100 * (1 - Fraction(busiest, ticks)))
