"""Two pipes over the same ranks: what they hold and take, as their papers say."""

from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action
from bpipe.schedule.check.rules import check, check_microbatch_order
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE, FamilyOptions, UnitCosts
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule

# Families of two pipes, with the numbers of chunks tested, and the most that a rank of p holds.
CASES = [("chimera", 1), ("mixpipe", 1), ("bitpipe", 2), ("bitpipe", 3), ("bitpipe-early", 2)]
# The last one with two chunks per rank: with more it holds less.
MOST = {
    "chimera": lambda p: p,
    "mixpipe": lambda p: 3 * p // 2,
    "bitpipe": lambda p: p,
    "bitpipe-early": lambda p: (5 * p + 14) // 4,
}


def generate(name: str, p: int, m: int, v: int = 1, costs: UnitCosts = ALIKE) -> Schedule:
    return FAMILIES[name].generate(p, m, v, FamilyOptions(costs=costs))


def computed(schedule: Schedule, rank: int) -> list[Action]:
    return [slot.compute for slot in schedule.ranks[rank] if slot.compute is not None]


def held(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return what each rank holds, in micro-batches of its share."""
    return tuple(Fraction(peak) / schedule.num_chunks for peak in peak_counts(schedule))


@pytest.mark.parametrize("p", [2, 4, 6, 8, 12, 16])
def test_chimera_takes_and_holds_what_its_formulas_say(p: int) -> None:
    for rounds in (1, 2, 3):
        schedule = generate("chimera", p, rounds * p)
        check(schedule)
        assert iteration_time(schedule, ALIKE).makespan == 3 * rounds * p + 2 * (p - 2)
        unit = tuple(p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p))
        assert peak_counts(schedule) == (unit if rounds == 1 else (p,) * p)


def test_the_middle_of_chimera_is_relieved_by_its_ends_and_not_by_its_mirror_image() -> None:
    schedule = generate("chimera", 8, 8)
    balanced = balance(schedule)
    check(balanced)
    assert balanced.partners == (3, 2, 1, 0, 7, 6, 5, 4)
    assert peak_counts(balanced) == (6, 6, 7, 7, 7, 7, 6, 6)
    assert sum(num_transfers(balanced, rank).evictions for rank in range(8)) == 2
    assert max(peak_counts(balance(schedule, None, tuple(reversed(range(8)))))) == 8
    assert max(peak_counts(balance(generate("chimera", 16, 16)))) == 13


@pytest.mark.parametrize("p", [2, 4, 6, 8, 12, 16])
def test_mixpipe_takes_and_holds_what_its_formulas_say(p: int) -> None:
    for rounds in (2, 3, 4):
        schedule = generate("mixpipe", p, rounds * p)
        check(schedule)
        assert 2 * iteration_time(schedule, ALIKE).makespan == 6 * rounds * p + 3 * (p - 2)
        peaks = tuple(p + 1 + min(rank, p - 1 - rank) for rank in range(p))
        assert peak_counts(schedule) == (peaks if p > 2 else (2, 2))
    # A single unit holds less: ranks at its ends have room for those in its middle.
    assert peak_counts(generate("mixpipe", p, p)) == peak_counts(generate("chimera", p, p))


def test_balancing_levels_mixpipe() -> None:
    schedule = build(ScheduleConfig("mixpipe", 8, 32))
    balanced = balance(schedule)
    check(balanced)
    assert (max(peak_counts(schedule)), max(peak_counts(balanced))) == (12, 11)
    assert balanced.partners == (3, 2, 1, 0, 7, 6, 5, 4)
    assert max(peak_counts(balance(build(ScheduleConfig("mixpipe", 16, 32))))) == 21


def test_mixpipe_of_32_ranks_takes_what_its_formula_says() -> None:
    """With a single rule it was one forward longer."""
    assert iteration_time(generate("mixpipe", 32, 96), ALIKE).makespan == 3 * 96 + 45


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 4, 6, 8, 14])
def test_bitpipe_takes_and_holds_what_its_formulas_say(p: int, v: int) -> None:
    for rounds in (1, 2, 4) if p < 14 else (1, 2):
        schedule = generate("bitpipe", p, rounds * p, v)
        assert iteration_time(schedule, ALIKE).makespan == 3 * rounds * p + Fraction(2 * (p - 2), v)
        least = [p - Fraction(max(p // 2 - 1 - min(rank, p - 1 - rank), 0), v) for rank in range(p)]
        assert held(schedule) == (tuple(least) if rounds == 1 else (p,) * p)


def test_what_rules_leave_is_gained_by_moving_everything_to_and_fro() -> None:
    """With 16 ranks and 4 chunks the best of seven rules was one forward longer."""
    schedule = generate("bitpipe", 16, 32, 4)
    check(schedule)
    assert iteration_time(schedule, ALIKE).makespan == 3 * 32 + 7
    for rank in range(8):
        assert computed(schedule, rank) == [
            Action(action.stage, action.kind, action.microbatch ^ 1) for action in computed(schedule, 15 - rank)
        ]


@pytest.mark.parametrize(
    ("p", "v", "peak"),
    [(4, 2, 9), (6, 2, 14), (8, 2, 19), (10, 2, 24), (16, 2, 39), (8, 3, 27), (10, 3, 34), (8, 4, 35), (16, 3, 55)],
)
def test_early_forwarding_takes_and_holds_what_its_formulas_say(p: int, v: int, peak: int) -> None:
    """It waits a quarter less than BitPipe, and holds less than the paper's 3 (p - 1) / 2 micro-batches."""
    for rounds in (2, 3, 4) if p < 16 else (2,):
        schedule = generate("bitpipe-early", p, rounds * p, v)
        check(schedule)
        assert iteration_time(schedule, ALIKE).makespan == 3 * rounds * p + Fraction(3 * (p - 2), 2 * v)
        assert max(peak_counts(schedule)) == peak <= Fraction(3 * (p - 1), 2) * v
    # A single unit starts no micro-batch early: ranks at its ends have room for those in its middle.
    unit = generate("bitpipe-early", p, p, v)
    assert peak_counts(unit) == peak_counts(generate("bitpipe", p, p, v))


@settings(max_examples=40, deadline=None)
@example(("bitpipe", 2), 1, 3, UnitCosts(Fraction(3, 4), Fraction(1, 4), Fraction(5, 4)))
@given(
    st.sampled_from(CASES),
    st.integers(1, 5),
    st.integers(1, 20),
    st.builds(
        UnitCosts, *[st.fractions(Fraction(1, 4), 4, max_denominator=6)] * 3, st.fractions(0, 3, max_denominator=4)
    ),
)
def test_whatever_the_sizes_and_costs_it_keeps_its_rules_and_its_room(
    case: tuple[str, int], half: int, m: int, costs: UnitCosts
) -> None:
    """If orders made for other costs deadlock, plain units are used."""
    (name, v), p = case, 2 * half
    schedule = generate(name, p, m, v, costs)
    check(schedule)
    check_microbatch_order(schedule)
    assert max(held(schedule)) <= MOST[name](p)
    assert iteration_time(schedule, costs).makespan <= iteration_time(generate(name, p, m, v), costs).makespan, (
        "costs are looked at"
    )


@pytest.mark.parametrize(("name", "v"), CASES)
def test_an_odd_number_of_ranks_is_refused(name: str, v: int) -> None:
    with pytest.raises(ValueError, match=r"two pipes need an even number of ranks, not 5, .*: use 4 or 6"):
        build(ScheduleConfig(name, 5, 8, num_chunks=v))
    with pytest.raises(ValueError, match=r"not 1, .*: use 2$"):
        build(ScheduleConfig(name, 1, 8, num_chunks=v))
