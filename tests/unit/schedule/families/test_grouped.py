"""Grouped interleaving: what it holds, how long it takes, and that it accepts any sizes."""

from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_counts
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.memory import rank_peaks
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check, check_microbatch_order
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import FamilyOptions, UnitCosts
from bpipe.schedule.families.grouped_interleaved import ChoiceRule, Discipline, actions_of, schedule_list
from bpipe.schedule.families.timing import iteration_time, stage_ticks
from bpipe.schedule.families.turns import groups_of, turns
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule

NAME = "grouped-interleaved"

# Costs of F, I, W and a hop; and the bubble in percent that a prototype of Rule A reached with each, by p, m, v and
# bound.
ALL = {
    "1:1:1": UnitCosts(),
    "1:1.2:.8": UnitCosts(1, Fraction(6, 5), Fraction(4, 5)),
    "h=.05": UnitCosts(hop=Fraction(1, 20)),
    "1:1.03:.9 h=.05": UnitCosts(1, Fraction(103, 100), Fraction(9, 10), Fraction(1, 20)),
    "h=.1": UnitCosts(hop=Fraction(1, 10)),
}
FRONT = {
    (8, 32, 4, 17): (6.34, 7.74, 9.09, 9.67, 11.7),
    (8, 32, 4, 18): (5.88, 7.38, 9.09, 9.48, 11.7),
    (8, 32, 4, 20): (4.71, 7.02, 8.44, 9.01, 11.1),
    (8, 32, 4, 24): (3.52, 4.86, 5.79, 6.49, 8.44),
    (8, 32, 4, 29): (2.29, 3.61, 4.62, 5.39, 7.65),
}
# The same, each for one column of costs.
MORE = (
    (4, 16, 4, 9, "1:1:1", 5.42),
    (4, 16, 4, 12, "1:1:1", 3.52),
    (4, 16, 4, 15, "1:1:1", 1.54),
    (8, 32, 8, 33, "1:1:1", 5.19),
    (8, 32, 8, 61, "1:1:1", 1.17),
    (8, 32, 3, 18, "h=.05", 6.04),
    (8, 32, 3, 22, "h=.05", 5.34),
    (8, 32, 2, 12, "h=.1", 7.87),
    (8, 32, 2, 16, "h=.1", 6.52),
)
# The bubbles of V-Min, which holds 4 micro-batches.
V_MIN = (12.3, 25.8, 19.3, 22.9, 25.2)


def bubble_percent(schedule: Schedule) -> float:
    """The bubble in percent if every computation takes one slot."""
    return 100 * (1 - 3 * schedule.num_chunks * schedule.num_microbatches / len(schedule.ranks[0]))


def test_the_published_point() -> None:
    """A prototype's figures: half a micro-batch less than V-Half, and a smaller bubble."""
    plain = build(ScheduleConfig(NAME, 8, 32, num_chunks=4, group_size=4))
    assert peak_counts(plain) == tuple(range(20, 12, -1))
    balanced = build(ScheduleConfig(NAME, 8, 32, num_chunks=4, balance=BalanceConfig(), group_size=4))
    assert balanced.bounds == (17,) * 8
    assert bubble_percent(plain) == bubble_percent(balanced) == pytest.approx(6.34, abs=0.01)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_what_it_holds_is_what_the_formula_says(p: int, v: int) -> None:
    """It holds no more with more micro-batches, and less with small groups, which starve the pipeline."""
    for g in range(1, p + 3):
        for m in (1, g, g + 1, 2 * g + p, 3 * g + p + 1):
            peaks = peak_counts(FAMILIES[NAME].generate(p, m, v, FamilyOptions(group_size=g)))
            bounds = tuple(min(m * v, (v - 1) * min(g, m) + p - rank) for rank in range(p))
            assert all(peak <= bound for peak, bound in zip(peaks, bounds, strict=True)), (g, m)
            assert peaks == bounds or m < 3 * g + p or 2 * g < p, (g, m)


def test_a_group_of_half_as_many_as_there_are_ranks_is_the_default() -> None:
    for p, g in ((1, 1), (2, 1), (5, 3), (8, 4)):
        assert build(ScheduleConfig(NAME, p, 11, num_chunks=3)) == build(
            ScheduleConfig(NAME, p, 11, num_chunks=3, group_size=g)
        )


sizes = st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
durations = st.fractions(Fraction(1, 3), 3, max_denominator=12)
some_costs = st.builds(
    UnitCosts, durations, durations, durations, st.just(0) | st.fractions(0, Fraction(1, 4), max_denominator=12)
)


@settings(max_examples=60)
@given(sizes, st.none() | st.integers(1, 12), some_costs)
def test_any_sizes_and_costs(size: tuple[int, int, int], group: int | None, costs: UnitCosts) -> None:
    p, m, v = size
    schedule = build(ScheduleConfig(NAME, p, m, num_chunks=v, group_size=group, costs=costs))
    check(schedule)
    assert sum(slot.compute is not None for row in schedule.ranks for slot in row) == 3 * p * v * m
    check_microbatch_order(schedule)


@settings(max_examples=60)
@given(sizes, st.integers(1, 12), some_costs)
def test_what_cannot_be_shorter_is_given_up(size: tuple[int, int, int], group: int, costs: UnitCosts) -> None:
    """The result equals that of running every discipline to its end, and none that is abandoned would have been shorter."""
    p, m, v = size
    taken, ticks = turns(groups_of(m, min(group, m)), v), stage_ticks(costs, v)
    rules = [
        ChoiceRule(tuple((v - 1) * min(group, m) + p - rank for rank in range(p)), (0,) * p, discipline)
        for discipline in Discipline
    ]
    orders = [order for rule in rules if (order := schedule_list(taken, p, ticks, rule)) is not None]
    first = min(orders, key=lambda order: order.makespan)
    assert FAMILIES[NAME].orders(p, m, v, FamilyOptions(group_size=group, costs=costs)) == actions_of(first, taken)
    for rule in rules:
        order, shorter = (
            schedule_list(taken, p, ticks, rule),
            schedule_list(taken, p, ticks, rule, shorter_than=first.makespan),
        )
        assert shorter is None
        if order is not None and order.makespan > first.makespan:
            assert schedule_list(taken, p, ticks, rule, shorter_than=order.makespan) is None
            assert schedule_list(taken, p, ticks, rule, shorter_than=order.makespan + 1) == order


@settings(max_examples=40)
@given(sizes, st.integers(1, 12), some_costs, st.data())
def test_ranks_choose_within_what_a_rule_lets_them_hold(
    size: tuple[int, int, int], group: int, costs: UnitCosts, data: st.DataObject
) -> None:
    """Otherwise they wait for each other, and the rule has no order."""
    p, m, v = size
    caps = tuple(data.draw(st.lists(st.integers(1, 20), min_size=p, max_size=p)))
    rule = ChoiceRule(caps, (0,) * p, data.draw(st.sampled_from(Discipline)), data.draw(st.none() | st.integers(2, 30)))
    taken = turns(groups_of(m, min(group, m)), v)
    listed = schedule_list(taken, p, stage_ticks(costs, v), rule)
    if listed is None:
        return
    for rank, kinds in enumerate(listed.kinds):
        count = peak = 0
        for kind in kinds:
            count += {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}.get(kind, 0)
            peak = max(peak, count)
        assert peak <= caps[rank]
    assert listed.makespan >= m * (costs.forward + costs.backward_input + costs.backward_weight)
    assert FAMILIES[NAME].layout(p, v).num_stages == p * v


@lru_cache(maxsize=64)
def chosen(p: int, m: int, v: int, bound: int, costs: UnitCosts) -> float:
    """Return the bubble, in percent, of the order chosen for a bound, which it keeps."""
    schedule = build(ScheduleConfig(NAME, p, m, num_chunks=v, balance=BalanceConfig((bound,)), costs=costs))
    assert max(peak_counts(schedule)) <= bound
    return float(iteration_time(schedule, costs).bubble_percent)


def front_on_the_page() -> dict[int, list[float]]:
    page = (Path(__file__).parents[4] / "docs/schedules.md").read_text()
    rows = (
        page.partition("| bound | F:I:W = 1:1:1 |")[2]
        .partition("|---|---|---|---|---|\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    return {int(4 * float(row.split("|")[1])): [float(cell) for cell in row.split("|")[2:-1]] for row in rows}


def test_the_page_shows_the_whole_front() -> None:
    assert front_on_the_page().keys() == {size[3] for size in FRONT}


@pytest.mark.slow
@pytest.mark.parametrize("size", FRONT, ids=lambda size: str(size[3]))
def test_the_front_is_reached_and_shown_on_the_page(size: tuple[int, int, int, int]) -> None:
    for (name, costs), percent in zip(ALL.items(), FRONT[size], strict=True):
        assert chosen(*size, costs) <= percent + 0.02, name
    for name, percent in zip(("1:1:1", "1:1.2:.8", "h=.05", "h=.1"), front_on_the_page()[size[3]], strict=True):
        assert chosen(*size, ALL[name]) == pytest.approx(percent, abs=0.06), name


@pytest.mark.parametrize(("p", "m", "v", "bound", "costs", "percent"), MORE)
def test_the_front_is_reached_with_other_sizes(p: int, m: int, v: int, bound: int, costs: str, percent: float) -> None:
    assert chosen(p, m, v, bound, ALL[costs]) <= percent + 0.02


def test_a_choice_takes_costs_as_fine_as_numbers_are() -> None:
    """A very short hop costs very little."""
    assert chosen(4, 8, 2, 6, UnitCosts(hop=Fraction(5e-324))) == pytest.approx(
        chosen(4, 8, 2, 6, UnitCosts()), abs=0.06
    )


@pytest.mark.slow
def test_below_half_of_the_ranks_it_takes_less_time_than_v_min() -> None:
    for costs, percent in zip(ALL.values(), V_MIN, strict=True):
        assert chosen(8, 32, 2, 8, costs) < percent


def test_a_bound_that_no_order_keeps_names_one_that_can_be_kept() -> None:
    with pytest.raises(ValueError, match=r"keeps every rank within 4 micro-batches of a chunk: its groups of 2 keep 9"):
        build(ScheduleConfig(NAME, 4, 16, num_chunks=4, balance=BalanceConfig((4,))))
    with pytest.raises(ValueError, match=r"within 4 micro-batches of .* host buffers included: its groups of 2 keep 9"):
        build(ScheduleConfig(NAME, 4, 16, num_chunks=4, balance=BalanceConfig((4,), buffers_stay=True)))
    assert build(ScheduleConfig(NAME, 4, 16, num_chunks=4, balance=BalanceConfig((9,)))).bounds == (9,) * 4


def test_a_group_or_partners_or_a_bound_for_each_leave_nothing_to_choose() -> None:
    for config in (
        ScheduleConfig(NAME, 4, 16, num_chunks=2, balance=BalanceConfig((6,)), group_size=2),
        ScheduleConfig(NAME, 4, 16, num_chunks=2, balance=BalanceConfig((6,), (3, 2, 1, 0))),
        ScheduleConfig(NAME, 4, 16, num_chunks=2, balance=BalanceConfig((6, 6, 6, 5))),
        ScheduleConfig(NAME, 4, 16, num_chunks=2, balance=BalanceConfig()),
        ScheduleConfig(NAME, 4, 16, num_chunks=2),
    ):
        assert config.limit is None
    assert ScheduleConfig(NAME, 4, 16, num_chunks=2, balance=BalanceConfig((6,))).limit == 6


@settings(max_examples=15)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3)),
    some_costs,
    st.integers(0, 6),
)
def test_what_is_chosen_keeps_the_bound_and_the_order_of_micro_batches(
    size: tuple[int, int, int], costs: UnitCosts, above: int
) -> None:
    p, m, v = size
    least = build(ScheduleConfig(NAME, p, m, num_chunks=v, balance=BalanceConfig())).bounds
    assert least is not None
    schedule = build(ScheduleConfig(NAME, p, m, num_chunks=v, balance=BalanceConfig((least[0] + above,)), costs=costs))
    check(schedule)
    assert max(peak_counts(schedule)) <= least[0] + above
    check_microbatch_order(schedule)


def occupied(schedule: Schedule) -> list[int]:
    """Return what a run allocates on each rank, in whole micro-batches."""
    return [rank_peaks(schedule, rank, None).microbatches for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize(
    "size",
    [
        (4, 8, 2, 5),
        (4, 8, 2, 8),
        (4, 16, 4, 12),
        *(pytest.param((8, 32, 4, bound), marks=pytest.mark.slow) for bound in (18, 20, 29)),
    ],
)
def test_with_host_buffers_that_stay_the_bound_is_of_all_that_a_run_allocates(size: tuple[int, int, int, int]) -> None:
    """A rank that hosts early and is full late needs memory for both."""
    p, m, v, bound = size
    staying, gone = (
        build(ScheduleConfig(NAME, p, m, num_chunks=v, balance=BalanceConfig((bound,), buffers_stay=stay)))
        for stay in (True, False)
    )
    assert max(occupied(staying)) <= bound
    assert occupied(staying) == list(allocated_counts(staying))
    assert max(occupied(gone)) == max(allocated_counts(gone)) == bound + 1 + 2 * (size[-1] == 20)
    assert (
        iteration_time(gone, UnitCosts()).makespan
        <= iteration_time(staying, UnitCosts()).makespan
        < 1.03 * iteration_time(gone, UnitCosts()).makespan
    )
