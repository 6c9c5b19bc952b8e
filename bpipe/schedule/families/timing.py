"""Start times of all ranks' computations, and their durations at given costs.

A computation starts when the one before it on its rank is over and its operands (`schedule.dependencies`) have been
made, one hop earlier if on another rank. Two that overlap take as long as both. Durations of costs are whole numbers of
ticks, with as many to a unit of the costs as make every duration whole. Memory, transfers and bandwidth are left to
`simulate`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any, NamedTuple

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule

# Beyond any time: ticks are as fine as all costs together require, and a float may have 1074 binary places.
NEVER = 1 << 4096


@dataclass(slots=True)
class Work[Time: int | float | Fraction]:
    """Computations as numbered jobs; two computations that overlap are one job.

    Attributes:
        actions: Computations of each job.
        rank: Rank of each job.
        lasts: Duration of each job.
        needed: Jobs that each job needs, with the lag of the message.
        rows: Jobs of each rank, in order.
    """

    actions: list[tuple[Action, ...]]
    rank: list[int]
    lasts: list[Time]
    needed: list[list[tuple[int, Time | int]]]
    rows: list[list[int]]


def jobs_of[Time: int | float | Fraction](
    layout: Layout,
    num_microbatches: int,
    orders: Sequence[Order],
    lasts: Callable[[tuple[Action, ...]], Time],
    hop: Time,
) -> Work[Time]:
    """Return the orders as jobs.

    Args:
        layout: Which rank computes which stage.
        num_microbatches: Micro-batches of an iteration.
        orders: One per rank.
        lasts: Returns the duration of a job's actions.
        hop: Duration of a message between two ranks.
    """
    dependencies = Dependencies(layout, num_microbatches)
    work: Work[Time] = Work([], [], [], [], [])
    for rank, order in enumerate(orders):
        first = len(work.actions)
        work.actions += [cell.computations for cell in order]
        work.rows.append(list(range(first, len(work.actions))))
        work.rank += [rank] * len(order)
    work.lasts += map(lasts, work.actions)
    makers: dict[int, list[int]] = {}
    for job, actions in enumerate(work.actions):
        for value in map(dependencies.value_of, actions):
            makers.setdefault(value, []).append(job)
    makers.pop(NOTHING, None)
    for job, actions in enumerate(work.actions):
        operands: list[tuple[int, Time | int]] = []
        for action in actions:
            value = dependencies.operand_of(action)
            # An operand that no other stage makes comes from its own: the forward, or the first half of the backward.
            value = dependencies.own_operand_of(action) if value == NOTHING else value
            operands += [(maker, hop if work.rank[maker] != work.rank[job] else 0) for maker in makers.get(value, ())]
        work.needed.append(operands)
    return work


def starts[Time: int | float | Fraction](work: Work[Time]) -> list[Time]:
    """Return the start time of each job, with every rank in its order.

    Raises ValueError if the orders wait for each other.
    """
    begins: list[Any] = [-1] * len(work.actions)
    ends: list[Any] = [-1] * len(work.actions)
    needed, lasts = work.needed, work.lasts
    positions = [0] * len(work.rows)
    free: list[Any] = [0] * len(work.rows)
    left = [rank for rank, row in enumerate(work.rows) if row]
    while left:
        moved = False
        for rank in left:
            row = work.rows[rank]
            now, position = free[rank], positions[rank]
            while position < len(row):
                job = row[position]
                ready = now
                for maker, lag in needed[job]:
                    if ends[maker] < 0:
                        break
                    if ends[maker] + lag > ready:
                        ready = ends[maker] + lag
                else:
                    begins[job] = ready
                    ends[job] = now = ready + lasts[job]
                    position += 1
                    continue
                break
            moved = moved or position > positions[rank]
            free[rank], positions[rank] = now, position
        if not moved:
            stuck = ", ".join(
                f"rank {rank} at {' with '.join(map(str, work.actions[work.rows[rank][positions[rank]]]))}"
                for rank in left
            )
            raise ValueError(f"the orders of the ranks wait for each other: {stuck}")
        left = [rank for rank in left if positions[rank] < len(work.rows[rank])]
    return begins


def length[Time: int | float | Fraction](work: Work[Time]) -> Time | int:
    """Return the time from the first start to the last end."""
    begins: list[Any] = starts(work)
    return max((begins[row[-1]] + work.lasts[row[-1]] for row in work.rows if row), default=0)


class StageTicks(NamedTuple):
    """Durations in ticks of one stage's computations and of a message; `per_unit` ticks are one unit of the costs."""

    lasts: Mapping[Kind, int]
    hop: int
    per_unit: int


class IterationTime(NamedTuple):
    """Duration of an iteration, in units of the costs, and the bubble of the busiest rank in percent."""

    makespan: Fraction
    bubble_percent: Fraction


def stage_ticks(costs: UnitCosts, num_chunks: int) -> StageTicks:
    """Return the durations of one stage if a rank has `num_chunks`; with slices, each is a chunk of its own."""
    halves = (Fraction(costs.backward_input), Fraction(costs.backward_weight))
    of_a_rank = (Fraction(costs.forward), *halves, sum(halves, Fraction()))
    of_a_stage = [duration / num_chunks for duration in of_a_rank]
    per_unit = lcm(*(duration.denominator for duration in (*of_a_stage, Fraction(costs.hop))))
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD)
    return StageTicks(
        {kind: int(duration * per_unit) for kind, duration in zip(kinds, of_a_stage, strict=True)},
        int(costs.hop * per_unit),
        per_unit,
    )


def work_of(layout: Layout, num_microbatches: int, orders: Sequence[Order], ticks: StageTicks) -> Work[int]:
    """Return the orders as jobs; ValueError for a computation whose cost is not known."""
    return jobs_of(layout, num_microbatches, orders, lambda actions: _ticks(actions, ticks), ticks.hop)


def work_at(layout: Layout, num_microbatches: int, orders: Sequence[Order], costs: UnitCosts) -> Work[int]:
    """Return the orders as jobs at the costs of a rank."""
    ticks = stage_ticks(costs, layout.num_stages // len(orders) * layout.slices)
    return work_of(layout, num_microbatches, orders, ticks)


def _ticks(actions: Sequence[Action], ticks: StageTicks) -> int:
    for action in actions:
        if action.kind not in ticks.lasts:
            raise ValueError(f"{action} has no cost: only forwards and backwards have costs here")
    return sum(ticks.lasts[action.kind] for action in actions)


def iteration_time(schedule: Schedule, costs: UnitCosts) -> IterationTime:
    """Return how long the computations of a schedule take at these costs; its transfers take no time."""
    stage = stage_ticks(costs, schedule.num_chunks * schedule.layout.slices)
    orders = [[slot for slot in row if slot.compute is not None] for row in schedule.ranks]
    work = work_of(schedule.layout, schedule.num_microbatches, orders, stage)
    ticks = length(work)
    busiest = max(sum(work.lasts[job] for job in row) for row in work.rows)
    return IterationTime(Fraction(ticks, stage.per_unit), 100 * (1 - Fraction(busiest, ticks)))
