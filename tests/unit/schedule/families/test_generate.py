"""The generators against their papers' figures, their formulas, and Megatron's own table."""

import random
from collections import Counter
from fractions import Fraction
from operator import add, mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import blocked_ranks
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import FamilyOptions, UnitCosts
from bpipe.schedule.families.interleaved import COMBINED
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.families.turns import chunk_turns, groups_of
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.memory import live_bytes, memory_of, num_transfers, peak_counts
from bpipe.schedule.program import Exchange, Op
from bpipe.schedule.schedule import Schedule


def generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return FAMILIES[name].generate(num_stages, num_microbatches, num_chunks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (3, 1), (4, 3), (5, 5), (7, 20)])
def test_length(name: str, p: int, m: int) -> None:
    schedule = generate(name, p, m)
    check(schedule)
    assert len(schedule.ranks[0]) == 2 * (m + p - 1)
    assert peak_counts(schedule) == tuple(m if name == "gpipe" else min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(
    ("p", "m", "v", "g"),
    [
        *((p, m, v, p) for p in (2, 3, 4, 8) for v in (2, 3, 4) for m in (2 * p, 2 * p + 1, 3 * p)),
        *((2, 8, 2, 3), (2, 8, 2, 8), (4, 8, 2, 8), (4, 10, 2, 6), (4, 12, 3, 5), (8, 32, 2, 12), (3, 7, 4, 4)),
    ],
)
def test_interleaved_saves_what_the_formula_says(p: int, m: int, v: int, g: int) -> None:
    """A group of g passes every chunk but the last before its first backward: (v - 1)(g - p) more than a group of p."""
    schedule = FAMILIES["interleaved-1f1b"].generate(p, m, v, FamilyOptions(group_size=g))
    check(schedule)
    assert peak_counts(schedule) == tuple(min(g * (v - 1) + 2 * (p - rank - 1) + 1, m * v) for rank in range(p))
    balanced = build(ScheduleConfig("interleaved-1f1b", p, m, num_chunks=v, balance=BalanceConfig(), group_size=g))
    assert max(peak_counts(balanced)) <= (v - 1) * g + p + 1
    assert not blocked_ranks(balanced)


@pytest.mark.parametrize("g", [3, 9])
def test_a_group_outside_what_can_be_is_refused(g: int) -> None:
    with pytest.raises(ValueError, match=f"a group of {g} micro-batches is outside 4 to 8"):
        build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, group_size=g))
    with pytest.raises(ValueError, match=r"schedule 1f1b has no groups of micro-batches: .* interleaved-1f1b"):
        build(ScheduleConfig("1f1b", 4, 8, group_size=g))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_takes_any_number_of_microbatches(p: int, v: int) -> None:
    """Megatron's warm-up formula deadlocks at p=8, v=2, m=10: it refuses a small last group."""
    for m in range(1, 3 * p + 1):
        schedule = generate("interleaved-1f1b", p, m, v)
        check(schedule)
        order = [
            cell.compute for cell in schedule.ranks[0] if cell.compute is not None and cell.compute.kind is Kind.FORWARD
        ]
        assert [(action.stage // p, action.microbatch) for action in order] == chunk_turns(groups_of(m, p), v)


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_order_is_megatrons(p: int, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    sizes = (p, p), (2 * p, p), (5 * p, p), (3 * p, 3 * p), (5 * p, 2 * p), (4 * p + 1, p + 1), (5 * p + 2, 2 * p + 1)
    for m, g in sizes:
        if 0 < m % g < p:
            continue  # Megatron refuses
        table = schedules.get_schedule_table(m, v, g)
        for rank, row in enumerate(FAMILIES["interleaved-1f1b"].generate(p, m, v, FamilyOptions(group_size=g)).ranks):
            state = schedules.parallel_state
            monkeypatch.setattr(state, "get_pipeline_model_parallel_world_size", lambda: p)
            monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr(state, "get_virtual_pipeline_model_parallel_world_size", lambda: v)
            total, _, ahead, _ = schedules.get_pp_rank_microbatches(m, v, g)
            expected = [Action(chunk * p + rank, Kind.FORWARD, microbatch) for microbatch, chunk in table[:ahead]]
            for index in range(total - ahead):
                microbatch, chunk = table[ahead + index]
                expected.append(Action(chunk * p + rank, Kind.FORWARD, microbatch))
                microbatch, chunk = table[index]
                expected.append(Action((v - 1 - chunk) * p + rank, Kind.BACKWARD, microbatch))
            expected += [
                Action((v - 1 - chunk) * p + rank, Kind.BACKWARD, microbatch)
                for microbatch, chunk in table[total - ahead :]
            ]
            assert [slot.compute for slot in row if slot.compute is not None] == expected


def test_aligning_gives_a_plain_listing_its_bubbles() -> None:
    plain = generate("1f1b", 4, 8)
    squeezed = Schedule(
        "1f1b", 8, plain.layout, tuple(tuple(slot for slot in row if slot.compute is not None) for row in plain.ranks)
    )
    assert align(squeezed) == plain


FULL = ("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("chimera", 1), ("mixpipe", 1)


@pytest.mark.parametrize(("name", "v"), [*FULL, ("bitpipe", 2)])
def test_a_full_pipeline_holds_no_more_of_more_microbatches(name: str, v: int) -> None:
    fill, pipes = FAMILIES[name].fill, FAMILIES[name].num_pipes
    for p in (pipes * multiple for multiple in (1, 2, 3, 4, 6)):
        for balance in ("none", "bpipe"):
            full, more = (
                peak_counts(build(ScheduleConfig(name, p, rounds * p, num_chunks=v, balance=named_balance(balance))))
                for rounds in (fill or 3, 2 + (fill or 3))
            )
            assert (
                more == (5 * p,) * p
                if fill is None
                else all(actual <= expected for actual, expected in zip(more, full, strict=True))
            )


FIRST = (2, 2, 2), (2, 2, 7), (4, 2, 4), (4, 2, 7), (4, 2, 12), (4, 2, 17), (5, 3, 5), (5, 3, 19), (8, 4, 8), (8, 4, 26)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ahead is not None])
def test_the_first_rank_holds_at_its_most_as_many_as_is_said(name: str) -> None:
    """Searches rely on it before any schedule is generated."""
    family = FAMILIES[name]
    assert family.ahead is not None
    for p, v, m in FIRST:
        if family.num_pipes == 2 and p in (2, 5):
            continue
        chunks = v if family.max_chunks is None else family.max_chunks
        for group in (family.usual_group(p), p) if family.takes_groups else (1,):
            options = FamilyOptions(group_size=min(group, m)) if family.takes_groups else FamilyOptions()
            peak = peak_counts(family.generate(p, m, chunks, options))[0]
            assert peak >= family.ahead(p, m, chunks, min(group, m)), (p, chunks, m, group)


@pytest.mark.parametrize("name", ["v-half", "v-min", "zb-v"])
@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_the_first_rank_holds_as_many_slices_as_is_said(name: str, slices: int) -> None:
    """Searches assume this number of slices if a family does not declare its warm-up in slices."""
    family = FAMILIES[name]
    assert family.ahead is not None
    assert family.sliced_warm_up is None
    for p in (2, 3, 4, 5, 8, 9):
        for m in (1, -(-2 * p // slices), 3 * p):
            width = m * slices
            schedule = family.generate(p, m, 2, FamilyOptions(slices=slices))
            assert peak_counts(schedule)[0] >= family.ahead(p, width, 2, 1), (p, m)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sliced_warm_up is not None])
def test_ranks_hold_as_many_slices_at_their_first_backward_as_is_said(name: str) -> None:
    family = FAMILIES[name]
    assert family.sliced_warm_up is not None
    for p, m, slices in ((2, 3, 2), (4, 4, 4), (5, 10, 2), (6, 3, 8), (8, 16, 2), (3, 7, 4)):
        for v in (1,) if family.max_chunks == 1 else (2, 3):
            for group in (None, p) if family.takes_groups and p <= m else (None,):
                orders = family.orders(p, m, v, FamilyOptions(group_size=group, slices=slices))
                warm_up = family.sliced_warm_up(p, m, v, group, slices)
                for rank, order in enumerate(orders):
                    actions = [action for action in order if isinstance(action, Action)]
                    first = next(place for place, action in enumerate(actions) if action.kind is not Kind.FORWARD)
                    begun = Counter(action.stage // p for action in actions[: warm_up.lengths[rank]])
                    assert first >= warm_up.lengths[rank], (p, v, m, group, rank)
                    assert [begun[chunk] for chunk in range(v)] == warm_up.at_first_backward(rank)
                assert any(warm_up.lengths) or m % (group or 1)


SIZES = (4, 2, 4), (4, 3, 8), (4, 2, 13), (5, 3, 15), (5, 2, 20), (6, 4, 12), (8, 3, 24), (8, 5, 32), (8, 2, 25)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.warm_up is not None])
def test_ranks_warm_up_as_is_said_and_pairs_hold_no_less_together(name: str) -> None:
    """Searches rely on it before any schedule is generated; stage sizes are random."""
    family, sizes = FAMILIES[name], random.Random(5)
    assert family.warm_up is not None
    for p, v, m in SIZES:
        for group in (family.usual_group(p), p) if family.splits else (p,):
            schedule, warm_up = (
                family.generate(p, m, v, FamilyOptions(group_size=group)),
                family.warm_up(p, m, v, group),
            )
            for rank in range(p):
                order = [slot.compute for slot in schedule.ranks[rank] if slot.compute is not None]
                first = next(place for place, action in enumerate(order) if action.kind is not Kind.FORWARD)
                begun = Counter(action.stage // p for action in order[: warm_up.lengths[rank]])
                assert first >= warm_up.lengths[rank], (p, v, m, group, rank)
                assert [begun[chunk] for chunk in range(v)] == warm_up.at_first_backward(rank)
            for rank in range(p // 2) if m % group == 0 else ():
                saved, after = ([sizes.choice((0, 1, 2, 5)) for _ in range(p * v)] for _ in range(2))
                memory, partner = memory_of(saved, None, after), p - 1 - rank
                partner_held = [sum(map(mul, counts, saved[partner::p])) for counts in warm_up.meanwhile(rank, partner)]
                together = sum(map(mul, warm_up.at_first_backward(rank), saved[rank::p])) + min(partner_held)
                assert together <= max(
                    map(add, live_bytes(schedule, rank, memory), live_bytes(schedule, partner, memory))
                )


DURATION = st.fractions(Fraction(1, 4), 4, max_denominator=6)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), DURATION, DURATION, DURATION)
def test_zb_h1_holds_the_same_everywhere_and_is_as_long_as_its_formula(
    p: int, m: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    schedule = build(ScheduleConfig("zb-h1", p, m))
    assert peak_counts(schedule) == (min(p, m),) * p
    # The formula is for full pipelines, and for a W no longer than F and I. Filtering for both rejected too many draws
    # for hypothesis in one run of hundreds.
    w = min(w, f, i)
    if m >= p:
        assert iteration_time(schedule, UnitCosts(f, i, w)).makespan == m * (f + i + w) + (p - 1) * (f + i - w)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 25), DURATION, DURATION, DURATION)
def test_1f1b_split_holds_and_takes_what_its_formulas_say(
    p: int, m: int, delay: int, f: Fraction, i: Fraction, w: Fraction
) -> None:
    schedule = build(ScheduleConfig("1f1b-split", p, m, delay=delay))
    assert peak_counts(schedule) == tuple(min(p - rank + delay, m) for rank in range(p))
    assert iteration_time(schedule, UnitCosts(f, i, w)).makespan == m * (f + i + w) + (p - 1) * (f + i)


def test_a_delay_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="delay is -1"):
        build(ScheduleConfig("1f1b-split", 4, 8, delay=-1))


EXCHANGES = (Exchange.MEGATRON_INTERLEAVED, Exchange.MEGATRON_TURNS, Exchange.POSTED)


def made(p: int, m: int, v: int, group: int | None = None, balance: BalanceConfig | None = None) -> Schedule:
    return build(ScheduleConfig(COMBINED.name, p, m, num_chunks=v, balance=balance, group_size=group))


@pytest.mark.parametrize(
    ("p", "m", "v", "g"), [(2, 4, 2, 2), (4, 8, 2, 4), (4, 12, 3, 4), (4, 12, 2, 6), (8, 16, 2, 8)]
)
def test_it_is_megatrons_order(p: int, m: int, v: int, g: int) -> None:
    """`get_pp_rank_microbatches`: one forward more than interleaved 1F1B before the first backward, and then a
    forward with each backward, as long as there are forwards."""
    turns = [
        (chunk, microbatch)
        for first in range(0, m, g)
        for chunk in range(v)
        for microbatch in range(first, min(first + g, m))
    ]
    for rank, row in enumerate(COMBINED.generate(p, m, v, FamilyOptions(group_size=g)).ranks):
        cells = [cell.computations for cell in row if cell.compute is not None]
        ahead = min(2 * (p - rank - 1) + (v - 1) * g + 1, len(turns))
        pairs = len(turns) - ahead
        assert [len(cell) for cell in cells] == [1] * ahead + [2] * pairs + [1] * (len(turns) - pairs)
        flat = [action for cell in cells for action in cell]
        forwards = [(action.stage // p, action.microbatch) for action in flat if action.kind is Kind.FORWARD]
        backwards = [(v - 1 - action.stage // p, action.microbatch) for action in flat if action.kind is Kind.BACKWARD]
        assert forwards == backwards == turns


@pytest.mark.parametrize(("p", "m", "v"), [(2, 8, 2), (4, 8, 2), (4, 16, 3), (8, 16, 2), (8, 32, 4)])
def test_ranks_hold_one_more_than_interleaved_and_pairs_level_it(p: int, m: int, v: int) -> None:
    plain, interleaved = made(p, m, v), build(ScheduleConfig("interleaved-1f1b", p, m, num_chunks=v))
    assert peak_counts(plain) == tuple(peak + 1 for peak in peak_counts(interleaved))
    balanced = made(p, m, v, balance=BalanceConfig())
    peaks = peak_counts(plain)
    # What is evicted during a pair is held until both are over, and so is what is loaded: one more than half of both.
    assert max(peak_counts(balanced)) == (peaks[0] + peaks[-1]) // 2 + 1
    for exchange in EXCHANGES:
        check(balanced, exchange)
    assert any(num_transfers(balanced, rank).evictions for rank in range(p)) is (p > 2)


def test_a_pair_begins_with_both_inputs_and_passes_both_outputs_on_behind() -> None:
    """In the loop that overlaps messages and in the one that does not, nothing runs between the two of a pair."""
    schedule = made(4, 8, 2, balance=BalanceConfig())
    for exchange in EXCHANGES:
        for program, row in zip(lower(schedule, exchange), schedule.ranks, strict=True):
            runs = [number for number, instruction in enumerate(program.instructions) if instruction.op is Op.RUN]
            together = [cell.computations for cell in row if cell.overlapped is not None]
            pairs = [
                (program.instructions[number].operand, program.instructions[number + 1].operand)
                for number in runs
                if number + 1 in runs and program.starts.count(number + 1) == 0
            ]
            assert [pair for pair in pairs if pair in together] == together


def test_micro_batches_that_do_not_exist_leave_the_other_of_their_pair_alone() -> None:
    schedule = made(4, 9, 2)
    check(schedule)
    assert sum(len(cell.computations) for row in schedule.ranks for cell in row) == 2 * 2 * 4 * 9


def test_a_group_smaller_than_the_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 3 micro-batches is outside 4 to 8"):
        made(4, 8, 2, group=3)
