"""The shortest order of a schedule's computations: as short as the best of all orders, and how far families are from
it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.generate.families import FAMILIES
from bpipe.generate.family import ALIKE, UnitCosts
from bpipe.generate.timing import iteration_time
from bpipe.ir.action import Action, Kind
from bpipe.ir.memory import peak_counts
from tests.support.shortest import shortest

PAGE = Path(__file__).parents[3] / "docs/orders.md"
LIMIT_S = 60.0


# -- beside all orders that there are
# ------------------------------------------------------------------------------------------------------


def merged(ways: list[list[Action]]) -> Iterator[list[Action]]:
    """All orders of one rank that keep each micro-batch's own."""
    if not any(ways):
        yield []
    for place, way in enumerate(ways):
        if way:
            for rest in merged([*ways[:place], way[1:], *ways[place + 1 :]]):
                yield [way[0], *rest]


def held(order: list[Action], after_input: Fraction, halves: bool) -> Fraction:
    """The most that one rank holds, one stage per rank."""
    now = most = Fraction()
    for action in order:
        takes, gives = Fraction(0), Fraction(0)
        if action.kind is Kind.FORWARD:
            takes = Fraction(1)
        elif action.kind is Kind.BACKWARD_INPUT:
            takes, gives = max(Fraction(0), after_input - 1), max(Fraction(0), 1 - after_input)
        else:
            gives = after_input if halves else Fraction(1)
        now += takes
        most = max(most, now)
        now -= gives
    return most


def takes(orders: tuple[list[Action], ...], lasts: dict[Kind, Fraction], hop: Fraction) -> Fraction | None:
    """Seconds of orders of one stage per rank, by going round until nothing is left; None where they wait for each
    other."""
    over: dict[Action, Fraction] = {}
    at, left = [0] * len(orders), sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                ready = [over[order[at[rank] - 1]]] if at[rank] else [Fraction(0)]
                is_first, is_last = rank == 0, rank == len(orders) - 1
                waits = {
                    Kind.FORWARD: [] if is_first else [(Action(rank - 1, Kind.FORWARD, action.microbatch), hop)],
                    Kind.BACKWARD_WEIGHT: [],
                }.get(action.kind, [] if is_last else [(Action(rank + 1, action.kind, action.microbatch), hop)])
                if any(other not in over for other, _ in waits):
                    break
                over[action] = max([*ready, *(over[other] + lag for other, lag in waits)]) + lasts[action.kind]
                at[rank] += 1
                left -= 1
        if left == before:
            return None
    return max(over.values())


def best(
    num_ranks: int, num_microbatches: int, kinds: list[Kind], costs: UnitCosts, after_input: Fraction, most: int
) -> Fraction | None:
    halves = [Fraction(costs.backward_input), Fraction(costs.backward_weight)]
    lasts = {Kind.FORWARD: Fraction(costs.forward), Kind.BACKWARD: sum(halves, Fraction())}
    lasts |= dict(zip((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), halves, strict=True))
    rows = []
    for rank in range(num_ranks):
        found = merged([[Action(rank, kind, microbatch) for kind in kinds] for microbatch in range(num_microbatches)])
        rows.append([order for order in found if held(order, after_input, len(kinds) == 3) <= most])
    lengths = [length for orders in product(*rows) if (length := takes(orders, lasts, Fraction(costs.hop))) is not None]
    return min(lengths, default=None)


# -- the table
# ----------------------------------------------------------------------------------------------------------------------

COSTS = (ALIKE, UnitCosts(5, 6, 4))
ROW = re.compile(r"\| `([^`]+)`(?: v=(\d+))?(?: g=\d+)? \| (\d+) \| (.+) \|$", re.MULTILINE)


def table() -> list[tuple[str, int, int, list[str]]]:
    part = PAGE.read_text().partition("## Families beside the shortest order")[2].partition("\n## ")[0]
    return [(name, int(chunks or 1), int(most), cells.split(" | ")) for name, chunks, most, cells in ROW.findall(part)]


def test_the_table_has_every_family_and_its_own_lengths() -> None:
    rows = table()
    assert [name for name, *_ in rows] == [name for name, family in FAMILIES.items() if not family.overlaps]
    for name, chunks, most, cells in rows:
        schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks))
        assert most == max(peak_counts(schedule))
        for costs, cell in zip(COSTS, cells, strict=True):
            assert Fraction(re.match(r"[\d.]+", cell)[0]) == iteration_time(schedule, costs).makespan, name  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_is_what_the_solver_finds() -> None:
    """Or, where others compute here too and its time ends first, what it does not contradict; that is seldom."""
    num_proven = 0
    for name, chunks, most, cells in table():
        schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks))
        for costs, cell in zip(COSTS, cells, strict=True):
            least = Fraction(cell.rpartition(" → ")[2])
            found = shortest(schedule, costs, most, LIMIT_S)
            assert found.proven <= least <= found.makespan, (name, cell)
            num_proven += found.is_proven
    assert num_proven >= 22
