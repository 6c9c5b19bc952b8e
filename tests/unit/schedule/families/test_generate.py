"""The generators against their papers' figures, their formulas, and Megatron's own table."""

from __future__ import annotations

import random
from collections import Counter
from operator import add, mul

import pytest

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import blocked_ranks
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import FamilyOptions
from bpipe.schedule.families.turns import chunk_turns, groups_of
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.memory import live_bytes, memory_of, peak_counts
from bpipe.schedule.schedule import Schedule

GPIPE = """\
# bpipe schedule=gpipe microbatches=4 stage_to_rank=0,1,2
slot      0  1  2  3  4  5  6  7  8  9 10 11
rank 0 C F0 F1 F2 F3  .  .  .  . B0 B1 B2 B3
rank 1 C  . F0 F1 F2 F3  .  . B0 B1 B2 B3  .
rank 2 C  .  . F0 F1 F2 F3 B0 B1 B2 B3  .  .
"""

ONE_F_ONE_B = """\
# bpipe schedule=1f1b microbatches=8 stage_to_rank=0,1,2,3
slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21
rank 0 C F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
rank 1 C  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
rank 2 C  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
rank 3 C  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .
"""

INTERLEAVED = """\
# bpipe schedule=interleaved-1f1b microbatches=4 stage_to_rank=0,1,0,1
slot       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17
rank 0 C 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3
rank 1 C   . 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3   .
"""


def generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return FAMILIES[name].generate(num_stages, num_microbatches, num_chunks)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "figure"),
    [("gpipe", 3, 4, 1, GPIPE), ("1f1b", 4, 8, 1, ONE_F_ONE_B), ("interleaved-1f1b", 2, 4, 2, INTERLEAVED)],
)
def test_a_schedule_is_its_papers_figure(name: str, p: int, m: int, v: int, figure: str) -> None:
    assert write_grid(generate(name, p, m, v)) == figure


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
    """A group of g passes every chunk but the last before its first backward: (v - 1)(g - p) more than p."""
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
            one.compute for one in schedule.ranks[0] if one.compute is not None and one.compute.kind is Kind.FORWARD
        ]
        assert [(one.stage // p, one.microbatch) for one in order] == chunk_turns(groups_of(m, p), v)


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
    for p in (pipes * one for one in (1, 2, 3, 4, 6)):
        for balance in ("none", "bpipe"):
            full, more = (
                peak_counts(build(ScheduleConfig(name, p, rounds * p, num_chunks=v, balance=named_balance(balance))))
                for rounds in (fill or 3, 2 + (fill or 3))
            )
            assert (
                more == (5 * p,) * p
                if fill is None
                else all(one <= other for one, other in zip(more, full, strict=True))
            )


FIRST = (2, 2, 2), (2, 2, 7), (4, 2, 4), (4, 2, 7), (4, 2, 12), (4, 2, 17), (5, 3, 5), (5, 3, 19), (8, 4, 8), (8, 4, 26)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.ahead is not None])
def test_the_first_rank_holds_at_its_most_as_many_as_is_said(name: str) -> None:
    """Searches count with it before any schedule is made."""
    family = FAMILIES[name]
    assert family.ahead is not None
    for p, v, m in FIRST:
        if family.num_pipes == 2 and p in (2, 5):
            continue
        chunks = v if family.max_chunks is None else family.max_chunks
        for group in (family.usual_group(p), p) if family.takes_groups else (1,):
            asked = FamilyOptions(group_size=min(group, m)) if family.takes_groups else FamilyOptions()
            most = peak_counts(family.generate(p, m, chunks, asked))[0]
            assert most >= family.ahead(p, m, chunks, min(group, m)), (p, chunks, m, group)


@pytest.mark.parametrize("name", ["v-half", "v-min", "zb-v"])
@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_the_first_rank_holds_as_many_slices_as_is_said(name: str, slices: int) -> None:
    """Searches count so many slices where a family says nothing of its warm-up in slices."""
    family = FAMILIES[name]
    assert family.ahead is not None
    assert family.sliced_warm_up is None
    for p in (2, 3, 4, 5, 8, 9):
        for m in (1, -(-2 * p // slices), 3 * p):
            width = m * slices
            made = family.generate(p, m, 2, FamilyOptions(slices=slices))
            assert peak_counts(made)[0] >= family.ahead(p, width, 2, 1), (p, m)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.sliced_warm_up is not None])
def test_ranks_hold_as_many_slices_at_their_first_backward_as_is_said(name: str) -> None:
    family = FAMILIES[name]
    assert family.sliced_warm_up is not None
    for p, m, slices in ((2, 3, 2), (4, 4, 4), (5, 10, 2), (6, 3, 8), (8, 16, 2), (3, 7, 4)):
        for v in (1,) if family.max_chunks == 1 else (2, 3):
            for group in (None, p) if family.takes_groups and p <= m else (None,):
                orders = family.orders(p, m, v, FamilyOptions(group_size=group, slices=slices))
                said = family.sliced_warm_up(p, m, v, group, slices)
                for rank, order in enumerate(orders):
                    actions = [one for one in order if isinstance(one, Action)]
                    first = next(place for place, action in enumerate(actions) if action.kind is not Kind.FORWARD)
                    begun = Counter(action.stage // p for action in actions[: said.lengths[rank]])
                    assert first >= said.lengths[rank], (p, v, m, group, rank)
                    assert [begun[chunk] for chunk in range(v)] == said.at_first_backward(rank)
                assert any(said.lengths) or m % (group or 1)


SIZES = (4, 2, 4), (4, 3, 8), (4, 2, 13), (5, 3, 15), (5, 2, 20), (6, 4, 12), (8, 3, 24), (8, 5, 32), (8, 2, 25)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.warm_up is not None])
def test_ranks_warm_up_as_is_said_and_pairs_hold_no_less_together(name: str) -> None:
    """Searches rely on it before any schedule is generated; sizes of stages are drawn."""
    family, sizes = FAMILIES[name], random.Random(5)
    assert family.warm_up is not None
    for p, v, m in SIZES:
        for group in (family.usual_group(p), p) if family.splits else (p,):
            schedule, said = family.generate(p, m, v, FamilyOptions(group_size=group)), family.warm_up(p, m, v, group)
            for rank in range(p):
                order = [slot.compute for slot in schedule.ranks[rank] if slot.compute is not None]
                first = next(place for place, action in enumerate(order) if action.kind is not Kind.FORWARD)
                begun = Counter(action.stage // p for action in order[: said.lengths[rank]])
                assert first >= said.lengths[rank], (p, v, m, group, rank)
                assert [begun[chunk] for chunk in range(v)] == said.at_first_backward(rank)
            for rank in range(p // 2) if m % group == 0 else ():
                saved, after = ([sizes.choice((0, 1, 2, 5)) for _ in range(p * v)] for _ in range(2))
                memory, partner = memory_of(saved, None, after), p - 1 - rank
                held = [sum(map(mul, counts, saved[partner::p])) for counts in said.meanwhile(rank, partner)]
                together = sum(map(mul, said.at_first_backward(rank), saved[rank::p])) + min(held)
                assert together <= max(
                    map(add, live_bytes(schedule, rank, memory), live_bytes(schedule, partner, memory))
                )
