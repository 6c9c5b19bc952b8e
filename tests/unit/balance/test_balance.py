"""Balancing any schedule: the fewest evictions, any pairing, counts, and refusals."""

from __future__ import annotations

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance, own_bytes
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import FamilyOptions
from bpipe.schedule.host_buffers import Residency, host_buffers, num_host_buffers, slots_away
from bpipe.schedule.hosts import default_partners, mirrored_pairs, pairing
from bpipe.schedule.memory import counts_of, live_counts, num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule


def generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return FAMILIES[name].generate(num_stages, num_microbatches, num_chunks)


@pytest.mark.parametrize("hosts", ["pair", "pool", "host"])
@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("grouped-interleaved", 2), ("v-half", 2), ("zb-h1", 1)]
)
def test_no_load_could_come_earlier_and_no_eviction_later(name: str, chunks: int, hosts: str) -> None:
    """Right before its backward a load had only that slot to come back in: three of 1F1B's cool-down stood in bubbles,
    and a stage without bubbles waited for each of them.

    What leaves is needed in the next slot: so a run waits there for the end of an eviction, and no earlier.
    """
    for p, m in ((4, 8), (6, 6), (8, 16)):
        schedule = build(ScheduleConfig(name, p, m, num_chunks=chunks, balance=BalanceConfig(hosts=hosts)))
        memory = counts_of(schedule)
        assert schedule.bounds is not None
        for rank, bound in enumerate(schedule.bounds):
            held = own_bytes(schedule, rank, memory)
            assert max(held) <= bound * memory.parts
            transfers = ((slot, cell.transfers) for slot, cell in enumerate(schedule.ranks[rank]))
            for slots in slots_away(transfers).values():
                earlier = slots[-1] - 1
                assert held[slots[0] + 1] + memory.parts > bound * memory.parts
                assert earlier == slots[0] or held[earlier] + memory.parts > bound * memory.parts


def test_interleaved_evicts_the_furthest_needed() -> None:
    """Evicting the latest finished instead costs 3 evictions here, because backwards are not first in, first out."""
    balanced = build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig()))
    assert num_transfers(balanced, 0) == (2, 2, 0, 0)
    assert num_transfers(balanced, 3) == (0, 0, 2, 2)
    assert peak_counts(balanced) == (9, 9, 7, 7)


@pytest.mark.parametrize(("p", "v", "ahead"), [(4, 2, [2, 0]), (8, 2, [6, 4, 2, 0]), (4, 3, [2, 0])])
def test_interleaved_sends_ahead_what_the_paper_says(p: int, v: int, ahead: list[int]) -> None:
    balanced = build(ScheduleConfig("interleaved-1f1b", p, 4 * p, num_chunks=v, balance=BalanceConfig()))
    for rank, expected in enumerate(ahead):
        first_load = next(
            (
                slot
                for slot, cell in enumerate(balanced.ranks[rank])
                if any(a.kind is Kind.LOAD for a in cell.transfers)
            ),
            None,
        )
        first_backward = next(
            slot
            for slot, cell in enumerate(balanced.ranks[rank])
            if cell.compute is not None and cell.compute.kind is Kind.BACKWARD
        )
        end = first_backward if first_load is None else min(first_load, first_backward)
        sent = sum(a.kind is Kind.EVICT for cell in balanced.ranks[rank][:end] for a in cell.transfers)
        # The last of them may leave beside the first backward already.
        assert expected - 1 <= sent <= expected


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 3), (4, 2), (5, 2), (6, 3), (8, 2)])
def test_the_smallest_bound_of_interleaved_is_the_formula_once_the_pipeline_is_full(p: int, v: int) -> None:
    """A pair saves 2 ((v - 1) g + p) together; one more place serves an eviction and a load."""
    for m, g in ((p, p), (p + 1, p), (2 * p, p), (3 * p + 1, p), (2 * p, 2 * p), (4 * p, 2 * p)):
        (bound,) = set(
            balance(FAMILIES["interleaved-1f1b"].generate(p, m, v, FamilyOptions(group_size=g))).bounds or ()
        )
        formula = (v - 1) * g + p + 1
        assert bound == formula if m >= 2 * g else bound <= formula


def test_pairs_that_could_keep_less_hold_as_much_as_the_heaviest() -> None:
    """Ranks 0 and 6 need 6; 1 and 7 and the others evict no more than that asks of them."""
    plain, partners = generate("1f1b", 8, 16), (6, 7, 5, 4, 3, 2, 0, 1)
    balanced = balance(plain, None, partners)
    assert balanced == balance(plain, [6] * 8, partners)
    check(balanced)


def test_a_bound_of_its_own_for_each_rank() -> None:
    plain = generate("1f1b", 4, 8)
    balanced = balance(plain, [3, 3, 2, 3])
    check(balanced)
    assert peak_counts(balanced) == (3, 3, 2, 3)
    with pytest.raises(ValueError, match=r"rank 3, which hosts for rank 0, holds up to 3 .* is 2\. The smallest bound"):
        balance(plain, [3, 3, 3, 2])


def test_a_bound_that_the_rank_itself_cannot_keep() -> None:
    with pytest.raises(
        ValueError,
        match=r"rank 0 cannot keep to 1 micro-batches: it needs 2 at once in slot 1, and at least 2 over all slots",
    ):
        balance(generate("1f1b", 4, 8), [1] * 4)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3)])
def test_default_partners_are_opposite_ranks_in_every_family(name: str, v: int) -> None:
    """Also where fewer micro-batches than ranks make the first ranks equally heavy, and in larger groups."""
    for p in (1, 2, 3, 4, 5, 8, 11):
        for m in sorted({1, 2, 3, p - 1, p, p + 1, 2 * p, 3 * p + 1} - {0}):
            for g in {None, m} if FAMILIES[name].takes_groups and m > p else {None}:
                peaks = peak_counts(FAMILIES[name].generate(p, m, v, FamilyOptions(group_size=g)))
                assert default_partners(peaks) == mirrored_pairs(p), peaks


@pytest.mark.parametrize(
    ("peaks", "partners"),
    [
        (
            (5, 6, 7, 8, 8, 7, 6, 5),
            (3, 2, 1, 0, 7, 6, 5, 4),
        ),  # two pipes in opposite directions: each half is a pipeline's
        ((3, 3, 3, 3, 3), (4, 3, 2, 1, 0)),
        ((1, 9, 2, 1, 4), (4, 3, 2, 1, 0)),  # of equally light ranks the opposite one; one is left over
        ((1, 1, 9, 4, 4, 4), (3, 2, 1, 0, 5, 4)),  # no opposite one among the lightest: the nearest
    ],
)
def test_default_partners_follow_the_peaks(peaks: tuple[int, ...], partners: tuple[int, ...]) -> None:
    assert default_partners(peaks) == partners
    assert pairing(len(peaks), partners) == partners


@pytest.mark.parametrize(
    ("partners", "reason"),
    [
        ((3, 2, 1), "3 partners for 4 ranks"),
        ((3, 2, 1, 4), "partner 4 is not a rank"),
        ((1, 2, 3, 0), "pair them both ways"),
    ],
)
def test_a_pairing_that_is_none_is_refused(partners: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        balance(generate("1f1b", 4, 8), [3] * 4, partners)


def test_a_rank_without_partner_cannot_be_balanced() -> None:
    with pytest.raises(ValueError, match=r"rank 0 has no partner and holds up to 4 .* is 3\. Give it 4, or a partner"):
        balance(generate("1f1b", 4, 8), [3] * 4, (0, 1, 2, 3))


def test_balancing_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="already has transfers"):
        balance(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), [3] * 4)


def test_gpipe_has_no_room_to_share() -> None:
    plain = generate("gpipe", 4, 8)
    assert balance(plain).bounds == (8,) * 4
    assert build(ScheduleConfig("gpipe", 4, 8, balance=BalanceConfig())).ranks == plain.ranks


def test_host_buffers_are_reused_only_in_the_next_slot() -> None:
    balanced = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    assert host_buffers(balanced, 3) == {Residency(0, 1, 0): 0, Residency(0, 3, 0): 1, Residency(0, 5, 0): 0}
    assert host_buffers(balanced, 0) == {}
    assert (num_host_buffers(balanced, 3), num_host_buffers(balanced, 0)) == (2, 0)


@pytest.mark.parametrize(("p", "v"), [(8, 1), (16, 1), (8, 2), (6, 3)])
def test_host_buffers_are_as_few_as_are_hosted_at_once(p: int, v: int) -> None:
    balanced = build(
        ScheduleConfig("1f1b" if v == 1 else "interleaved-1f1b", p, 4 * p, num_chunks=v, balance=BalanceConfig())
    )
    for rank in range(p):
        own = live_counts(FAMILIES[balanced.name].generate(p, 4 * p, v), rank)
        hosted = [all_held - one for all_held, one in zip(live_counts(balanced, rank), own, strict=True)]
        if num_transfers(balanced, rank).hosts:
            assert num_host_buffers(balanced, rank) == max(hosted)
