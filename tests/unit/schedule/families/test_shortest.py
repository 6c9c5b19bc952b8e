"""How long the families' orders are, and how far from the shortest order of the same computations."""

from __future__ import annotations

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule
from tests.support.shortest import shortest

LIMIT_S = 60.0


COSTS = (ALIKE, UnitCosts(5, 6, 4))
# By family, for p = 4 and m = 8: chunks, the most that a rank holds, and for both costs the length of the family's order
# and of the shortest order that holds no more. docs/schedules.md sums it up.
LENGTHS = {
    "gpipe": (1, 8, (33, 33), (165, 165)),
    "1f1b": (1, 4, (33, 33), (165, 165)),
    "interleaved-1f1b": (2, 11, (28.5, 28.5), (142.5, 142.5)),
    "1f1b-split": (1, 4, (30, 27), (153, 141)),
    "zb-h1": (1, 4, (27, 27), (141, 141)),
    "zb-v": (2, 8, (25.5, 25.5), (135.5, 129)),
    "v-half": (2, 6, (26.5, 26.5), (139.5, 137.5)),
    "v-min": (2, 4, (29.5, 29.5), (172, 160.5)),
    "grouped-interleaved": (2, 6, (28, 26.5), (143.5, 137.5)),
    "chimera": (1, 4, (28, 28), (140, 140)),
    "mixpipe": (1, 6, (27, 27), (135, 135)),
    "bitpipe": (2, 8, (26, 26), (130, 130)),
    "bitpipe-early": (2, 9, (25.5, 25.5), (127.5, 127.5)),
}


def of_family(name: str) -> tuple[Schedule, int, list[tuple[UnitCosts, float, float]]]:
    chunks, most, *lengths = LENGTHS[name]
    schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks))
    return schedule, most, [(costs, *pair) for costs, pair in zip(COSTS, lengths, strict=True)]


def test_every_family_is_as_long_as_it_was() -> None:
    assert list(LENGTHS) == [name for name, family in FAMILIES.items() if not family.overlaps]
    for name in LENGTHS:
        schedule, most, lengths = of_family(name)
        assert most == max(peak_counts(schedule))
        for costs, length, _ in lengths:
            assert iteration_time(schedule, costs).makespan == length, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_order_is_shorter_than_the_shortest() -> None:
    """Or, where others compute here too and its time ends first, the solver does not contradict it; that is seldom."""
    num_proven = 0
    for name in LENGTHS:
        schedule, most, lengths = of_family(name)
        for costs, _, least in lengths:
            found = shortest(schedule, costs, most, LIMIT_S)
            assert found.proven <= least <= found.makespan, (name, costs)
            num_proven += found.is_proven
    assert num_proven >= 22
