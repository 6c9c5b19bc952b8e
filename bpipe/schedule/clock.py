"""Say when each computation of all ranks' orders starts, if nobody waits for a transfer.

In: a Layout, one order per rank, and how long computations and a message take. Out: `Work`, and when each of it starts.

A computation starts when the one before it on its rank is over and what it needs has been made (`schedule.dependencies`), on
another rank a hop ago. Knows no memory, no transfers and no bandwidth: who wants these asks `simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bpipe.schedule.action import Action
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.layout import Layout
from bpipe.schedule.schedule import Slot


@dataclass(slots=True)
class Work[Time: int | float | Fraction]:
    """Computations as numbers: of each its actions (two that overlap are one job), rank and duration, and those it
    needs, with their lag.

    `rows[rank]` is the rank's order.
    """

    actions: list[tuple[Action, ...]]
    rank: list[int]
    lasts: list[Time]
    needed: list[list[tuple[int, Time | int]]]
    rows: list[list[int]]


def jobs_of[Time: int | float | Fraction](
    layout: Layout,
    num_microbatches: int,
    orders: Sequence[Sequence[Action | Slot]],
    lasts: Callable[[tuple[Action, ...]], Time],
    hop: Time,
) -> Work[Time]:
    """Return the orders as jobs: `lasts` of the actions of each, `hop` a message takes between two ranks."""
    dependencies = Dependencies(layout, num_microbatches)
    work: Work[Time] = Work([], [], [], [], [])
    for rank, order in enumerate(orders):
        first = len(work.actions)
        work.actions += [one.computations if isinstance(one, Slot) else (one,) for one in order]
        work.rows.append(list(range(first, len(work.actions))))
        work.rank += [rank] * len(order)
    work.lasts += map(lasts, work.actions)
    makers: dict[int, list[int]] = {}
    for job, actions in enumerate(work.actions):
        for value in map(dependencies.value_of, actions):
            makers.setdefault(value, []).append(job)
    makers.pop(NOTHING, None)
    for job, actions in enumerate(work.actions):
        found: list[tuple[int, Time | int]] = []
        for action in actions:
            value = dependencies.operand_of(action)
            # What nobody else makes for it, its own stage has made: its forward, or the first half of its backward.
            value = dependencies.own_operand_of(action) if value == NOTHING else value
            found += [(maker, hop if work.rank[maker] != work.rank[job] else 0) for maker in makers.get(value, ())]
        work.needed.append(found)
    return work


def starts[Time: int | float | Fraction](work: Work[Time]) -> list[Time]:
    """Return the time at which each job starts, every rank in its order.

    Raises ValueError where the orders wait for each other.
    """
    begun: list[Any] = [-1] * len(work.actions)
    over: list[Any] = [-1] * len(work.actions)
    needed, lasts = work.needed, work.lasts
    at = [0] * len(work.rows)
    free: list[Any] = [0] * len(work.rows)
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


def length[Time: int | float | Fraction](work: Work[Time]) -> Time | int:
    """Return the time from the first start to the last end, every rank in its order."""
    begun: list[Any] = starts(work)
    return max((begun[row[-1]] + work.lasts[row[-1]] for row in work.rows if row), default=0)
