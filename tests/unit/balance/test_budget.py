"""Balancing within budgets in bytes: no other plan evicts less or needs less, and host buffers always count."""

import random
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from bpipe.balance.budget import (
    ActivationBudget,
    BudgetTooSmall,
    balance_within,
    chosen_partners,
    fewest_moved,
    sent_bytes,
    smallest_level_of_pair,
)
from bpipe.balance.config import named_balance
from bpipe.balance.pairs import allocated_bytes, balance
from bpipe.balance.pool import balance_over_hosts
from bpipe.plan.budget import plan_lines, predicted_devices, within
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import POOL, in_pairs
from bpipe.schedule.memory import live_bytes, memory_of, num_transfers, peak_bytes
from bpipe.schedule.schedule import Schedule, Slot
from tests.support.smallest import smallest_bytes


def generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return FAMILIES[name].generate(num_stages, num_microbatches, num_chunks)


def held(schedule: Schedule, activation_budget: ActivationBudget) -> tuple[int, ...]:
    return tuple(sum(allocated_bytes(schedule, rank, activation_budget.memory)) for rank in range(schedule.num_ranks))


def test_equal_sizes_in_bytes_are_counts() -> None:
    plain = generate("1f1b", 8, 24)
    counted = balance(plain, [5, 5, 5, 5, 8, 8, 8, 8])
    assert (
        balance_within(plain, ActivationBudget((5 * 70 + 69,) * 4 + (560,) * 4, memory_of([70] * 8))).ranks
        == counted.ranks
    )


def test_nothing_leaves_where_there_is_room() -> None:
    plain = generate("1f1b", 4, 8)
    memory = memory_of([100, 90, 80, 300])
    fitted = balance_within(plain, ActivationBudget(peak_bytes(plain, memory), memory))
    assert fitted.ranks == plain.ranks
    assert fitted.bounds == (4, 3, 2, 1)


def test_the_heavy_rank_sends_wherever_it_is() -> None:
    """If the last stage, with an output layer, is the largest, its rank evicts."""
    plain = generate("interleaved-1f1b", 4, 8, 2)
    sizes = [100] * 7 + [900]
    memory = memory_of(sizes)
    peaks = peak_bytes(plain, memory)
    activation_budget = ActivationBudget((*(2 * peak for peak in peaks[:3]), peaks[3] - 1), memory)
    fitted = balance_within(plain, activation_budget)
    check(fitted)
    assert [num_transfers(fitted, rank).evictions > 0 for rank in range(4)] == [False, False, False, True]
    assert all(
        peak <= room for peak, room in zip(held(fitted, activation_budget), activation_budget.room_bytes, strict=True)
    )


def test_part_of_a_microbatch() -> None:
    """Half of each micro-batch moves: the evictor keeps the other half, the acceptor hosts only what moved."""
    plain = generate("1f1b", 4, 8)
    memory = memory_of([100] * 4, [50] * 4)
    fitted = balance_within(plain, ActivationBudget((350, 400, 400, 400), memory))
    check(fitted)
    assert max(live_bytes(fitted, 0, memory)) == 350
    assert allocated_bytes(fitted, 3, memory) == (100, 100)


def test_whom_it_refuses() -> None:
    plain, memory = generate("1f1b", 4, 8), memory_of([100] * 4)
    cases = {
        (0, 400, 400, 400): "rank 0 has no room for even one micro-batch",
        (399, 400, 400, 99): "ranks 0 and 3 both have no room for their own micro-batches",
        (150, 400, 400, 800): "rank 0 cannot keep to 150 bytes",
        (300, 300, 300, 150): "rank 3, which hosts for rank 0, needs 300 bytes but has room for 150 bytes",
    }
    for activation_budget, reason in cases.items():
        with pytest.raises(BudgetTooSmall, match=reason):
            balance_within(plain, ActivationBudget(activation_budget, memory), (3, 2, 1, 0))
    with pytest.raises(BudgetTooSmall, match="rank 2 has no partner"):
        balance_within(generate("1f1b", 3, 8), ActivationBudget((300, 300, 99), memory_of([100] * 3)), (1, 0, 2))


def test_who_lacks_most_is_paired_with_who_has_most_to_spare() -> None:
    """By the room that is left, not by what a rank holds or by its budget."""
    rooms = ActivationBudget((400, 100, 200, 300), memory_of([100] * 4))
    assert chosen_partners(generate("1f1b", 4, 8), rooms) == (2, 3, 0, 1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"name": "bpip"}, "unknown balance 'bpip', did you mean 'bpipe'"),
        ({"name": "none", "hosts": POOL}, "hosts pool says how to balance"),
        ({"name": "none", "bounds": [3]}, "bounds and partners say how to balance"),
        ({"name": "none", "partners": [1, 0]}, "bounds and partners say how to balance"),
    ],
)
def test_what_names_no_balance_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        named_balance(**asked)


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_level_is_kept_and_one_below_is_not(seed: int) -> None:
    rng = random.Random(seed)
    p = rng.choice([4, 6])
    plain = generate("1f1b", p, 2 * p)
    memory = memory_of([rng.randint(50, 150) for _ in range(p)])
    fixed = [rng.randint(0, 400) for _ in range(p)]

    def rooms_at(level: int) -> ActivationBudget:
        return ActivationBudget(tuple(max(0, level - own) for own in fixed), memory)

    budget = max(peak + own for peak, own in zip(peak_bytes(plain, memory), fixed, strict=True))
    partners = chosen_partners(plain, rooms_at(budget))
    for pair in sorted({tuple(sorted(both)) for both in enumerate(partners)}):
        low, high = pair
        level = smallest_level_of_pair(plain, partners, (low, high), rooms_at, budget)
        loose = [10**9 if rank not in pair else room for rank, room in enumerate(rooms_at(level).room_bytes)]
        balance_within(plain, ActivationBudget(tuple(loose), memory), partners)
        tight = [10**9 if rank not in pair else room for rank, room in enumerate(rooms_at(level - 1).room_bytes)]
        with pytest.raises(BudgetTooSmall):
            balance_within(plain, ActivationBudget(tuple(tight), memory), partners)


def every_plan(schedule: Schedule, sender: int, host: int) -> list[Schedule]:
    """Return a plan for each set of the sender's micro-batches and each choice of their eviction and load slots.

    Later evictions and earlier loads free less on the sender; they are tried because they need less room on the host.
    """
    slots = {kind: {} for kind in (Kind.FORWARD, Kind.BACKWARD)}
    for slot, cell in enumerate(schedule.ranks[sender]):
        if cell.compute is not None:
            slots[cell.compute.kind][cell.compute.microbatch] = slot
    stays = {
        microbatch: [
            (out, load)
            for out, load in combinations(
                range(slots[Kind.FORWARD][microbatch] + 1, slots[Kind.BACKWARD][microbatch]), 2
            )
        ]
        for microbatch in slots[Kind.FORWARD]
    }
    plans = []
    for count in range(len(stays) + 1):
        for chosen in combinations(stays, count):
            plans += [
                with_stays(schedule, sender, host, chosen, times)
                for times in product(*(stays[microbatch] for microbatch in chosen))
            ]
    return plans


def with_stays(
    schedule: Schedule, sender: int, host: int, chosen: tuple[int, ...], times: tuple[tuple[int, int], ...]
) -> Schedule:
    rows = [list(row) for row in schedule.ranks]
    partners = [host if rank == sender else sender if rank == host else rank for rank in range(schedule.num_ranks)]
    (stage,) = schedule.layout.stages_of(sender)
    for microbatch, both in zip(chosen, times, strict=True):
        for slot, own, host_kind in zip(both, (Kind.EVICT, Kind.LOAD), (Kind.HOST, Kind.RETURN), strict=True):
            for rank, kind in ((sender, own), (host, host_kind)):
                rows[rank][slot] = Slot(
                    rows[rank][slot].compute, (*rows[rank][slot].transfers, Action(stage, kind, microbatch))
                )
    return replace(schedule, ranks=tuple(map(tuple, rows)), hosts=in_pairs(partners))


@pytest.mark.parametrize(("p", "m"), [(3, 3), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_no_part_and_no_plan_of_all_moves_fewer_bytes(p: int, m: int) -> None:
    """The first and last rank of 1F1B, with rooms of every size. A third, two thirds or all of each micro-batch moves."""
    plain, partners = generate("1f1b", p, m), (p - 1, *range(1, p - 1), 0)
    parts = ((4, 8, 12),) * p
    memories = {part: memory_of([12] * p, [part, *(12,) * (p - 1)]) for part in parts[0]}
    needs = {
        (
            sum(allocated_bytes(plan, 0, memory)),
            sum(allocated_bytes(plan, p - 1, memory)),
            part * num_transfers(plan, 0).evictions,
        )
        for plan in every_plan(plain, 0, p - 1)
        for part, memory in memories.items()
    }
    refused, less = 0, 0
    for own, host_room in product(range(12, 12 * p + 1, 4), range(12, 12 * m + 13, 4)):
        least = min((moved for needed, theirs, moved in needs if needed <= own and theirs <= host_room), default=None)
        activation_budget = ActivationBudget((own, *(1000,) * (p - 2), host_room), memories[12])
        try:
            chosen = fewest_moved(plain, activation_budget, parts, partners)
        except BudgetTooSmall:
            refused += 1
            assert least is None, f"rooms for {own} and {host_room}: a plan that moves {least} keeps them"
            continue
        fitted = balance_within(plain, chosen, partners)
        check(fitted)
        assert sent_bytes(fitted, 0, chosen.memory) == least
        with suppress(BudgetTooSmall):
            less += sent_bytes(balance_within(plain, activation_budget, partners), 0, activation_budget.memory) > least
    assert refused
    assert less


def test_parts_keep_rooms_that_whole_microbatches_do_not() -> None:
    plain = generate("1f1b", 4, 8)
    activation_budget = ActivationBudget((350, 400, 400, 200), memory_of([100] * 4))
    with pytest.raises(BudgetTooSmall):
        balance_within(plain, activation_budget, (3, 2, 1, 0))
    chosen = fewest_moved(plain, activation_budget, ((50, 100),) * 4, (3, 2, 1, 0))
    assert [size.moved_bytes for size in chosen.memory.stages] == [50, 100, 100, 100]
    fitted = balance_within(plain, chosen, (3, 2, 1, 0))
    assert held(fitted, chosen) == (350, 300, 200, 200)


def test_a_budget_lets_no_more_leave_than_must() -> None:
    """Evicting only some of a stage's ten layers moves less, and keeps smaller budgets, than whole micro-batches."""
    setup = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 4, 8, 1, 32, 8192, (10,) * 8, "none")
    devices = predicted_devices(setup, [2**40])
    alone = max(devices.need_bytes(devices.schedule))
    whole = replace(devices, parts=())
    assert smallest_bytes(devices) < smallest_bytes(whole)
    moved = []
    for budget in (alone, *range(alone - 2**30, smallest_bytes(whole), -(2**32)), smallest_bytes(whole)):
        part, all_of_it = (within(replace(case, budget_bytes=(budget,) * 8)) for case in (devices, whole))
        assert all(need <= budget for need in part.need_bytes)
        assert part.moved_bytes <= all_of_it.moved_bytes
        assert bool(part.how.parts) == any("GiB of each of" in line for line in plan_lines(part))
        moved.append((part.moved_bytes, all_of_it.moved_bytes))
    assert moved[0] == (0, 0)
    assert any(0 < part < 0.5 * all_of_it for part, all_of_it in moved)


def test_host_buffers_with_a_reserve_take_room() -> None:
    """Budgets count the buffers' size, not the bytes that a transfer moves."""
    plain = generate("1f1b", 4, 8)
    memory = memory_of([800] * 4)
    activation_budget = ActivationBudget((2400, 3200, 3200, 800 + 2 * 800), memory)
    assert sent_bytes(balance_within(plain, activation_budget, (3, 2, 1, 0)), 0, memory) == 3 * 800
    reserved = replace(memory, reserved=True)
    with pytest.raises(BudgetTooSmall, match="needs 2600 bytes but has room for 2400"):
        balance_within(plain, ActivationBudget(activation_budget.room_bytes, reserved), (3, 2, 1, 0))
    enough = ActivationBudget((*activation_budget.room_bytes[:3], 800 + 2 * 900), reserved)
    assert held(balance_within(plain, enough, (3, 2, 1, 0)), enough) == (2400, 2400, 1600, 2600)
    pooled = balance_over_hosts(plain, POOL, enough)
    assert all(need <= room for need, room in zip(held(pooled, enough), enough.room_bytes, strict=True))
