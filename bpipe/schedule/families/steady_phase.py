"""Make orders of many micro-batches from those of few: repeat the steady phase.

In: orders of few micro-batches, and how many more are wanted. Out: orders of all, where a phase repeats.

A step is what a rank computes in turn of so many micro-batches. At one moment every rank has just computed a step, and
will compute the same of the next micro-batches. There the step may stand as often as one likes, each time of the next
ones: what it needs stands in the same step or in an earlier one, so nobody waits for ever, and since a step ends with as
much held as it began with, no rank ever holds more. Knows no schedule by name and no memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from bpipe.schedule.action import Action, of_microbatch
from bpipe.schedule.clock import starts
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.timing import work_at
from bpipe.schedule.layout import Layout


def lengthened(
    layout: Layout, num_microbatches: int, orders: Sequence[Sequence[Action]], step: int, times: int, costs: UnitCosts
) -> list[list[Action]] | None:
    """Return these orders of `num_microbatches` with a step of `step` of them so many times more.

    None where at no moment what all ranks computed last comes again.
    """
    lengths = [len(order) * step // num_microbatches for order in orders]
    for cuts in _moments(layout, num_microbatches, orders, costs):
        if all(_repeats(order, cut, each, step) for order, cut, each in zip(orders, cuts, lengths, strict=True)):
            return [
                [*order[:cut], *_steps(order[cut - each : cut], step, times), *_later(order[cut:], times * step)]
                for order, cut, each in zip(orders, cuts, lengths, strict=True)
            ]
    return None


def _moments(
    layout: Layout, num_microbatches: int, orders: Sequence[Sequence[Action]], costs: UnitCosts
) -> Iterator[list[int]]:
    """Yield, from the middle on to both ends, how many computations each rank has begun at moments of the iteration."""
    work = work_at(layout, num_microbatches, orders, costs)
    begun = starts(work)
    rows = [[begun[job] for job in row] for row in work.rows]
    middle = max(row[-1] for row in rows) / 2
    for moment in sorted(rows[0], key=lambda moment: abs(moment - middle)):
        yield [bisect_left(row, moment) for row in rows]


def _repeats(order: Sequence[Action], cut: int, each: int, step: int) -> bool:
    return cut >= each and _later(order[cut - each : cut], step) == list(order[cut : cut + each])


def _steps(computed: Sequence[Action], step: int, times: int) -> list[Action]:
    return [action for number in range(1, times + 1) for action in _later(computed, number * step)]


def _later(computed: Sequence[Action], further: int) -> list[Action]:
    """Return the same computations of as many micro-batches later."""
    return [of_microbatch(one, one.microbatch + further) for one in computed]
