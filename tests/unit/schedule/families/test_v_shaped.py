"""V-shaped families at any sizes and costs, and orders of many micro-batches made from those of few."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import blocked_ranks
from bpipe.schedule.check.rules import check
from bpipe.schedule.families import v_shape
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, FamilyOptions, UnitCosts, one_stage_a_rank
from bpipe.schedule.families.shift import shortened
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.families.v_shape import lengthened
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.schedule import Schedule

# Micro-batches of a rank's share that a rank of p holds.
MOST = {"zb-v": lambda p: p, "v-half": lambda p: (p + 2) // 2, "v-min": lambda p: (p + 4) // 3}


def generate(name: str, p: int, m: int, costs: UnitCosts = ALIKE) -> Schedule:
    return FAMILIES[name].generate(p, m, 2, FamilyOptions(costs=costs))


def more_slots(name: str, p: int) -> int:
    """Slots of half a micro-batch beyond the six per micro-batch, as in the families' docstrings."""
    if name == "zb-v" or p <= 2:
        return p - 1
    if name == "v-half":
        return 3 * p - (4 if p % 2 else 7)
    return 5 if p == 3 else 4 * p - {1: 5, 2: 9, 0: 7}[p % 3]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 14, 16])
@pytest.mark.parametrize("name", MOST)
def test_it_holds_and_takes_what_its_formulas_say(name: str, p: int) -> None:
    for m in (2 * p, 3 * p + 1):
        schedule = generate(name, p, m)
        check(schedule)
        assert max(peak_counts(schedule)) == 2 * MOST[name](p)
        assert iteration_time(schedule, ALIKE).makespan * 2 == 6 * m + more_slots(name, p)


DURATION = st.fractions(Fraction(1, 4), 4, max_denominator=6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(MOST)),
    st.integers(1, 7),
    st.integers(1, 20),
    st.builds(UnitCosts, *[DURATION] * 3, st.fractions(0, 1)),
)
def test_whatever_the_sizes_and_costs_it_keeps_its_peak_and_its_order(
    name: str, p: int, m: int, costs: UnitCosts
) -> None:
    schedule = generate(name, p, m, costs)
    check(schedule)
    assert not blocked_ranks(schedule)
    assert max(peak_counts(schedule)) <= 2 * MOST[name](p)
    for row in schedule.ranks:
        by_sort: dict[tuple[int, Kind], list[int]] = {}
        for slot in row:
            if slot.compute is not None:
                by_sort.setdefault((slot.compute.stage, slot.compute.kind), []).append(slot.compute.microbatch)
        assert all(microbatches == list(range(m)) for microbatches in by_sort.values()), (
            "weights add up in micro-batch order"
        )
    assert iteration_time(schedule, costs).makespan <= iteration_time(generate(name, p, m), costs).makespan * Fraction(
        21, 20
    ), "costs are looked at"


def test_costs_may_be_as_fine_as_numbers_are() -> None:
    """Times in common ticks of these costs exceeded the number that stood for "never"."""
    for hop in (Fraction(3, 63025129939556336), Fraction(5e-324)):
        costs = UnitCosts(2, 2, Fraction(3, 4), hop)
        schedule = generate("v-half", 5, 20, costs)
        check(schedule)
        assert (
            iteration_time(schedule, costs).makespan
            <= iteration_time(generate("v-half", 5, 20, UnitCosts(2, 2, Fraction(3, 4))), costs).makespan + 1
        )


# Costs of F, I, W and a hop, and the bubbles of zb-v, v-half, v-min at p = 8 and m = 32 in percent.
BUBBLES = {
    (1, Fraction(6, 5), Fraction(4, 5), 0): (4.2, 10.1, 19.8),
    (1, Fraction(11, 10), Fraction(3, 5), 0): (4.4, 11.3, 19.5),
    (1, 1, 1, Fraction(1, 20)): (4.8, 10.0, 16.1),
    (1, Fraction(103, 100), Fraction(9, 10), Fraction(1, 20)): (5.0, 10.8, 19.5),
    (1, 1, 1, Fraction(1, 10)): (5.9, 11.7, 20.4),
}


@pytest.mark.parametrize("costs", BUBBLES)
def test_bubbles_at_durations_that_differ(costs: tuple[int | Fraction, ...]) -> None:
    unit_costs = UnitCosts(*costs)
    bubbles = [float(iteration_time(generate(name, 8, 32, unit_costs), unit_costs).bubble_percent) for name in MOST]
    assert all(bubble <= limit for bubble, limit in zip(bubbles, BUBBLES[costs], strict=True)), bubbles


def test_shortening_keeps_orders_that_are_as_short_as_can_be() -> None:
    orders = [[Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD_INPUT, 0), Action(0, Kind.BACKWARD_WEIGHT, 0)]]
    assert shortened(one_stage_a_rank(1, 1), 1, orders, [1], UnitCosts(3, 2, 1)) is orders


V_SHAPES = ("zb-v", "v-half", "v-min")


def orders_of(name: str, p: int, m: int, slices: int = 1, costs: UnitCosts = ALIKE) -> list[list[Action]]:
    v_shape.orders_within.cache_clear()
    return [list(order) for order in FAMILIES[name].orders(p, m, 2, FamilyOptions(slices=slices, costs=costs))]


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 7, 9])
@pytest.mark.parametrize("name", V_SHAPES)
def test_a_v_of_many_micro_batches_is_the_same_as_if_all_were_moved(
    monkeypatch: pytest.MonkeyPatch, name: str, p: int, slices: int
) -> None:
    few = v_shape._num_steady(p, slices)
    lengthenings: list[object] = []

    def noting(*asked: Any) -> object:
        lengthenings.append(lengthened(*asked))
        return lengthenings[-1]

    for further in (1, p + 2):
        with monkeypatch.context() as patched:
            patched.setattr(v_shape, "lengthened", noting)
            orders = orders_of(name, p, few + further, slices)
        with monkeypatch.context() as patched:
            patched.setattr(v_shape, "lengthened", lambda *asked: None)
            assert orders == orders_of(name, p, few + further, slices)
    assert len(lengthenings) == 2
    assert None not in lengthenings


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_step_of_several_micro_batches_is_repeated_as_often_as_asked(name: str) -> None:
    family, p = FAMILIES[name], 4
    for m, step, times in ((12, 1, 0), (12, 1, 5), (14, 3, 2)):
        few, many = (family.orders(p, count, 1, FamilyOptions()) for count in (m, m + step * times))
        layout = family.layout(p, 1)
        costs = ALIKE if family.splits else UnitCosts(1, 2)
        assert lengthened(layout, m, few, step, times, costs) == [list(order) for order in many]


def test_where_no_step_repeats_there_are_none() -> None:
    family = FAMILIES["1f1b"]
    few = family.orders(4, 4, 1, FamilyOptions())
    assert lengthened(family.layout(4, 1), 4, few, 1, 3, ALIKE) is None, "the pipeline is never full"
    # GPipe computes all forwards, then all backwards, so no whole step repeats.
    family = FAMILIES["gpipe"]
    assert lengthened(family.layout(4, 1), 30, family.orders(4, 30, 1, FamilyOptions()), 1, 3, ALIKE) is None


def test_uneven_durations_are_all_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v_shape, "lengthened", lambda *asked: pytest.fail("nobody knows when a step repeats"))
    for costs in (UnitCosts(1, 1, 2), UnitCosts(1, 1, 1, 1)):
        orders_of("v-half", 2, 12, costs=costs)
