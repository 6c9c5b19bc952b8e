"""Grouped interleaving: what it holds, how long it takes, and that any sizes will do."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.check.rules import check
from bpipe.generate.families import FAMILIES
from bpipe.generate.family import Asked, UnitCosts
from bpipe.generate.list_scheduler import ChoiceRule, Discipline, schedule_list, ticks_of
from bpipe.generate.turns import groups_of, turns
from bpipe.ir.action import Kind
from bpipe.ir.memory import peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.program import BalanceConfig, ScheduleConfig, build

NAME = "grouped-interleaved"


def bubble_percent(schedule: Schedule) -> float:
    """Where every computation takes a slot."""
    return 100 * (1 - 3 * schedule.num_chunks * schedule.num_microbatches / len(schedule.ranks[0]))


def test_the_published_point() -> None:
    """The figures that a prototype had: half of a micro-batch less than V-Half, and a smaller bubble."""
    plain = build(ScheduleConfig(NAME, 8, 32, 4, group_size=4))
    assert peak_counts(plain) == tuple(range(20, 12, -1))
    balanced = build(ScheduleConfig(NAME, 8, 32, 4, BalanceConfig(), group_size=4))
    assert balanced.bounds == (17,) * 8
    assert bubble_percent(plain) == bubble_percent(balanced) == pytest.approx(6.34, abs=0.01)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 4])
def test_what_it_holds_is_what_the_formula_says(p: int, v: int) -> None:
    """No more with whatever number of micro-batches, and in small groups, which starve the pipeline, less."""
    for g in range(1, p + 3):
        for m in (1, g, g + 1, 2 * g + p, 3 * g + p + 1):
            peaks = peak_counts(FAMILIES[NAME].generate(p, m, v, Asked(g)))
            most = tuple(min(m * v, (v - 1) * min(g, m) + p - rank) for rank in range(p))
            assert all(peak <= one for peak, one in zip(peaks, most, strict=True)), (g, m)
            assert peaks == most or m < 3 * g + p or 2 * g < p, (g, m)


def test_a_group_of_half_as_many_as_there_are_ranks_is_the_default() -> None:
    for p, g in ((1, 1), (2, 1), (5, 3), (8, 4)):
        assert build(ScheduleConfig(NAME, p, 11, 3)) == build(ScheduleConfig(NAME, p, 11, 3, group_size=g))


def test_from_half_as_many_as_ranks_on_the_pipeline_runs_at_its_full_rate() -> None:
    """What more micro-batches add is their computing; in smaller groups it is more."""

    def added(p: int, v: int, g: int) -> int:
        few, many = (len(FAMILIES[NAME].generate(p, rounds * g, v, Asked(g)).ranks[0]) for rounds in (4, 6))
        return many - few - 2 * g * 3 * v

    for p, v in ((4, 2), (6, 3), (8, 4)):
        assert added(p, v, p // 2) == added(p, v, p) == 0
        assert added(p, v, p // 2 - 1) > 0


def test_without_chunks_it_is_1f1b_in_halves() -> None:
    """What is held, and the order of forwards and first halves, are 1F1B's; the second halves fill what would be bubbles."""
    schedule, other = build(ScheduleConfig(NAME, 6, 14)), build(ScheduleConfig("1f1b", 6, 14))
    assert peak_counts(schedule) == peak_counts(other)
    for mine, theirs in zip(schedule.ranks, other.ranks, strict=True):
        order = [
            (one.compute.kind is Kind.FORWARD, one.compute.microbatch)
            for one in mine
            if one.compute and one.compute.kind is not Kind.BACKWARD_WEIGHT
        ]
        assert order == [(one.compute.kind is Kind.FORWARD, one.compute.microbatch) for one in theirs if one.compute]


sizes = st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
durations = st.fractions(Fraction(1, 3), 3, max_denominator=12)
some_costs = st.builds(UnitCosts, durations, durations, durations, st.just(0) | st.fractions(0, Fraction(1, 4), max_denominator=12))


@settings(max_examples=60)
@given(sizes, st.none() | st.integers(1, 12), some_costs)
def test_any_sizes_and_costs(size: tuple[int, int, int], group: int | None, costs: UnitCosts) -> None:
    p, m, v = size
    schedule = build(ScheduleConfig(NAME, p, m, v, group_size=group, costs=costs))
    check(schedule)
    assert sum(slot.compute is not None for row in schedule.ranks for slot in row) == 3 * p * v * m
    for rank, row in enumerate(schedule.ranks):
        for stage in schedule.layout.stages_of(rank):
            mine = [slot.compute for slot in row if slot.compute is not None and slot.compute.stage == stage]
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                assert [one.microbatch for one in mine if one.kind is kind] == list(range(m)), "training is exact only in this order"


@settings(max_examples=40)
@given(sizes, st.integers(1, 12), some_costs, st.data())
def test_ranks_choose_within_what_a_rule_lets_them_hold(
    size: tuple[int, int, int], group: int, costs: UnitCosts, data: st.DataObject
) -> None:
    """Or they wait for each other, and the rule has no order."""
    p, m, v = size
    caps = tuple(data.draw(st.lists(st.integers(1, 20), min_size=p, max_size=p)))
    rule = ChoiceRule(caps, (0,) * p, data.draw(st.sampled_from(Discipline)), data.draw(st.none() | st.integers(2, 30)))
    taken = turns(groups_of(m, min(group, m)), v)
    listed = schedule_list(taken, p, ticks_of(costs, v), rule)
    if listed is None:
        return
    for rank, kinds in enumerate(listed.kinds):
        held = peak = 0
        for kind in kinds:
            held += {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHT: -1}.get(kind, 0)
            peak = max(peak, held)
        assert peak <= caps[rank]
    assert listed.makespan >= m * (costs.forward + costs.backward_input + costs.backward_weight)
    assert FAMILIES[NAME].layout(p, v).num_stages == p * v
