"""The shortest order of a schedule's computations: as short as the best of all orders, and how far families are from
it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.generate.families import FAMILIES
from bpipe.generate.family import ALIKE, UnitCosts
from bpipe.generate.timing import iteration_time
from bpipe.ir.memory import peak_counts
from tests.support.shortest import shortest

PAGE = Path(__file__).parents[3] / "docs/orders.md"
LIMIT_S = 60.0


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
