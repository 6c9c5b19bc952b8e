"""Durations of orders: at given costs, against the shortest order of the same computations, and in docs/schedules.md."""

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.timing import iteration_time, stage_ticks, starts, work_of
from bpipe.schedule.families.unit_grid import align, backwards, forwards
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.memory import num_transfers, peak_counts, plain
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, StageCost
from bpipe.simulate.engine import simulate
from tests.support.shortest import shortest

COSTS = st.builds(UnitCosts, *[st.fractions(Fraction(1, 4), 4, max_denominator=12)] * 3)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (4, 8), (3, 2), (8, 5)])
def test_a_pipeline_is_as_long_as_its_formula(name: str, p: int, m: int) -> None:
    timing = iteration_time(build(ScheduleConfig(name, p, m)), UnitCosts(Fraction(3, 2), 1, Fraction(1, 3)))
    total = Fraction(3, 2) + 1 + Fraction(1, 3)
    assert timing.makespan == (m + p - 1) * total
    assert timing.bubble_percent == 100 * Fraction(p - 1, m + p - 1)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 5), st.integers(1, 9), COSTS)
def test_it_takes_as_long_as_the_simulator_says(name: str, p: int, m: int, costs: UnitCosts) -> None:
    """The simulator runs the programs; `iteration_time` only follows dependencies."""
    family = FAMILIES[name]
    p, v = p * family.num_pipes, family.min_chunks
    schedule = family.generate(p, m, v)
    backward = costs.backward_input + costs.backward_weight
    cost = StageCost(Fraction(costs.forward) / v, Fraction(backward) / v, weight_s=Fraction(costs.backward_weight) / v)
    simulation = simulate(schedule, Costs((cost,) * schedule.num_stages))
    timing = iteration_time(schedule, costs)
    assert timing.makespan == simulation.pipeline_s
    busiest = max(sum(timed.end_s - timed.start_s for timed in row) for row in simulation.computations)
    assert timing.bubble_percent == 100 * (1 - Fraction(busiest) / timing.makespan)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8)])
def test_a_message_takes_its_hop(p: int, m: int) -> None:
    """The bubble is the first forward's way to the last rank and the last backward's way back."""
    hop = Fraction(1, 3)
    assert (
        iteration_time(build(ScheduleConfig("gpipe", p, m)), UnitCosts(1, 1, 1, hop)).makespan
        == 3 * (m + p - 1) + 2 * (p - 1) * hop
    )


def test_two_that_overlap_take_as_long_as_both_and_begin_with_the_later_input() -> None:
    text = "# bpipe schedule=a microbatches=2 stage_to_rank=0,1\n0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"
    schedule = align(read_csv(text))
    # 1F1 and with it 1B0 wait for 0F1; 0B0 waits for both of them.
    assert iteration_time(schedule, UnitCosts(2, 1, 2)).makespan == 2 + 2 + (2 + 3) + 3 + 3


def test_orders_that_wait_for_each_other_are_named() -> None:
    everything = range(2)
    orders = [forwards(0, everything) + backwards(0, everything), backwards(1, everything) + forwards(1, everything)]
    with pytest.raises(ValueError, match=r"wait for each other: rank 0 at 0B0, rank 1 at 1B0"):
        starts(work_of(one_pipe((0, 1)), 2, orders, stage_ticks(ALIKE, 1)))


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, 0, 1), (1, 1, -1), (-1, 2, 2), (1, 1, 1, -1)])
def test_costs_below_nothing_are_refused(costs: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"costs .*: a forward and a backward must cost more than 0"):
        UnitCosts(*costs)


LIMIT_S = 60.0


BOTH_COSTS = (ALIKE, UnitCosts(5, 6, 4))
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
    chunks, peak, *lengths = LENGTHS[name]
    schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks))
    return schedule, peak, [(costs, *pair) for costs, pair in zip(BOTH_COSTS, lengths, strict=True)]


def test_every_family_is_as_long_as_it_was() -> None:
    assert list(LENGTHS) == [name for name, family in FAMILIES.items() if not family.overlaps]
    for name in LENGTHS:
        schedule, peak, lengths = of_family(name)
        assert peak == max(peak_counts(schedule))
        for costs, length, _ in lengths:
            assert iteration_time(schedule, costs).makespan == length, name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_order_is_shorter_than_the_shortest() -> None:
    """If other processes slow the solver down so that its time runs out (rare), it must not contradict the table."""
    num_proven = 0
    for name in LENGTHS:
        schedule, peak, lengths = of_family(name)
        for costs, _, least in lengths:
            result = shortest(schedule, costs, peak, LIMIT_S)
            assert result.proven <= least <= result.makespan, (name, costs)
            num_proven += result.is_proven
    assert num_proven >= 22


PAGE = (Path(__file__).parents[4] / "docs/schedules.md").read_text()
P, M = 8, 32
ROW = re.compile(
    r"\| `([\w-]+)`(?: v=(\d+))?(?: g=(\d+))? \| [^|]* \| ([^|]*) \| ([\d.]+) \| ([\d.]+) \| ?([^|]*?) ?\|"
)


def held(schedule: Schedule) -> str:
    return str(plain(Fraction(max(peak_counts(schedule)), schedule.num_chunks)))


def test_the_table_says_what_the_families_are() -> None:
    table = PAGE.partition("| name | holds at most (micro-batches per rank) |")[2].partition("\n\n")[0]
    rows = [match for line in table.splitlines() if (match := ROW.match(line))]
    assert {row[1] for row in rows} == set(FAMILIES)
    assert len(rows) == table.count("\n| `")
    for name, chunks, group, peak, bubble, moved, needs in (row.groups() for row in rows):
        family = FAMILIES[name]
        v, g = int(chunks or family.min_chunks), None if group is None else int(group)
        plain_one = build(ScheduleConfig(name, P, M, num_chunks=v, group_size=g))
        balanced = build(ScheduleConfig(name, P, M, num_chunks=v, balance=BalanceConfig(), group_size=g))
        peaks = [held(plain_one), held(balanced)]
        assert peak.strip() == " → ".join(peaks if peaks[0] != peaks[1] else peaks[:1]), name
        assert bubble == f"{float(iteration_time(plain_one, ALIKE).bubble_percent):.1f}", name
        assert moved == str(plain(Fraction(sum(num_transfers(balanced, rank).evictions for rank in range(P)), v))), name
        in_v = "V" if plain_one.layout.placements[0][-1] == 0 and v > 1 else ""
        pipes = "bidirectional" if family.num_pipes > 1 else ""
        expected_needs = ["split" if family.splits else "", in_v or ("chunks" if v > 1 else ""), pipes]
        assert needs.strip() == ", ".join(filter(None, expected_needs)), name
