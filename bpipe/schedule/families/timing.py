"""Times of all ranks' orders at given costs.

Two computations that overlap take as long as both. Times are whole numbers of ticks, with as many to a unit of the
costs as make every duration whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.clock import Work, jobs_of, length
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Schedule

# Beyond any time: ticks are as fine as all costs together require, and a float may have 1074 binary places.
NEVER = 1 << 4096


class StageTicks(NamedTuple):
    """Durations in ticks of one stage's computations, by kind, and of a message; `per_unit` ticks are one unit of the
    costs."""

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
    """Return the orders as jobs.

    Raises:
        ValueError: The cost of a computation is not known.
    """
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
