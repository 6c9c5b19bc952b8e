"""Evictions to host memory, alone or after all devices with room: as few as possible, one buffer each."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall
from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes
from bpipe.balance.pool import balance_over_hosts
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.document import read_json, write_json
from bpipe.schedule.files.text import read_csv, write_csv
from bpipe.schedule.host_buffers import (
    Residency,
    host_buffers,
    host_memory_buffers,
    hosts_of,
    num_buffers_for,
    num_host_memory_buffers,
)
from bpipe.schedule.hosts import ALL, ARRANGEMENTS, HOST, PAIR, POOL, write_hosts
from bpipe.schedule.memory import live_bytes, memory_of, peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation, with_host_buffers
from tests.unit.balance.test_pool import generate, moved


def balanced(
    name: str, p: int, m: int, v: int = 1, hosts: str = HOST, bounds: tuple[int, ...] | None = None
) -> Schedule:
    return build(ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig(bounds, hosts=hosts)))


def in_own(schedule: Schedule, rank: int) -> list[Residency]:
    return [stay for stay, host in hosts_of(schedule, rank).items() if not host.on_device]


# Sizes and chunks that each family knows.
SHAPES = {name: (4, 8, max(1, family.min_chunks)) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("hosts", [HOST, ALL])
@pytest.mark.parametrize("name", SHAPES)
def test_every_family_keeps_less_than_pairs_and_every_rule(name: str, hosts: str) -> None:
    """`build` asks all rules. What is written is read back as it was."""
    p, m, v = SHAPES[name]
    schedule, paired = (balanced(name, p, m, v, each) for each in (hosts, PAIR))
    assert schedule.bounds is not None
    assert max(schedule.bounds) <= max(paired.bounds or ())
    assert max(peak_counts(schedule)) <= max(schedule.bounds)
    for reading, writing in ((read_csv, write_csv), (read_json, write_json)):
        assert reading(writing(schedule)) == schedule


def test_two_are_held_where_pairs_hold_three_and_none_can_hold_one() -> None:
    """While one is computed on another is on its way."""
    schedule = balanced("1f1b", 4, 8)
    assert schedule.bounds == (2, 2, 2, 2)
    assert write_hosts(schedule.hosts or ()) == "own,own,none,none"
    assert peak_counts(schedule) == (2, 2, 2, 1)
    assert [num_host_memory_buffers(schedule, rank) for rank in range(4)] == [3, 2, 0, 0]
    with pytest.raises(ValueError, match=r"rank 0 cannot keep to 1 micro-batches.*CPU memory keeps for all ranks is 2"):
        balanced("1f1b", 4, 8, bounds=(1,))
    # With a rank of its own each does what it can.
    assert peak_counts(balanced("1f1b", 4, 8, bounds=(2, 4, 4, 4))) == (2, 3, 2, 1)
    with pytest.raises(BudgetTooSmall, match="rank 0 has no room for even one micro-batch"):
        balance_over_hosts(generate("1f1b", 4, 8), HOST, ActivationBudget((0, 1, 1, 1), memory_of([1] * 4)))


def test_one_rank_alone_keeps_what_no_partner_could() -> None:
    alone = balanced("gpipe", 1, 6, bounds=(3,))
    assert write_hosts(alone.hosts or ()) == "own"
    assert peak_counts(alone) == (3,)


def test_devices_come_before_a_nodes_memory() -> None:
    """Rank 3 has room for one micro-batch of rank 0, and nobody for any of rank 1."""
    schedule = balanced("1f1b", 4, 8, hosts=ALL)
    assert write_hosts(schedule.hosts or ()) == "3+own,own,none,none"
    assert num_buffers_for(schedule, 3) == {0: 1}
    # With room enough on devices it is the pool's plan to the last action.
    assert balanced("1f1b", 4, 8, hosts=ALL, bounds=(3,)) == balanced("1f1b", 4, 8, hosts=POOL, bounds=(3,))


def test_what_an_arrangement_is_called() -> None:
    assert ARRANGEMENTS == ("pair", "pool", "host", "all")
    with pytest.raises(ValueError, match="unknown hosts 'own'"):
        BalanceConfig(hosts="own")
    with pytest.raises(ValueError, match="partners define pairs, but hosts is 'all'"):
        BalanceConfig(partners=(3, 2, 1, 0), hosts=ALL)


@pytest.mark.parametrize("hosts", [HOST, ALL])
@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved-1f1b", 2), ("v-half", 2), ("chimera", 1)])
def test_as_many_buffers_as_are_full_at_once(name: str, v: int, hosts: str) -> None:
    schedule = balanced(name, 4, 12, v, hosts)
    for rank in range(4):
        mine = set(in_own(schedule, rank))
        assert set(host_memory_buffers(schedule, rank)) == mine
        full: set[tuple[int, int]] = set()
        most, nth = 0, {}
        for cell in schedule.ranks[rank]:
            for one in cell.transfers:
                key = (one.stage, one.microbatch)
                if one.kind is Kind.EVICT:
                    nth[key] = nth.get(key, -1) + 1
                    full |= {key} if Residency(*key, nth[key]) in mine else set()
            most = max(most, len(full))
            full -= {(one.stage, one.microbatch) for one in cell.transfers if one.kind is Kind.LOAD}
        assert num_host_memory_buffers(schedule, rank) == most


@pytest.mark.parametrize("hosts", [HOST, POOL, ALL])
@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved-1f1b", 2), ("v-half", 2), ("chimera", 1)])
def test_no_buffer_holds_two_at_once(name: str, v: int, hosts: str) -> None:
    """A buffer is free in the slot after its load, not beside it."""
    schedule = balanced(name, 4, 12, v, hosts)
    for rank in range(4):
        for buffers in (host_buffers(schedule, rank), host_memory_buffers(schedule, rank)):
            for (stay, buffer), (other, another) in combinations(buffers.items(), 2):
                first, second = sorted(_away(schedule, of) for of in (stay, other))
                assert buffer != another or first[1] < second[0]


def _away(schedule: Schedule, stay: Residency) -> tuple[int, int]:
    """The slots beside which it leaves and comes back."""
    rank = schedule.layout.rank_of(stay.stage, stay.microbatch)
    slots = {
        one.kind: slot
        for slot, cell in enumerate(schedule.ranks[rank])
        for one in cell.transfers
        if (one.stage, one.microbatch) == stay[:2] and one.kind in (Kind.EVICT, Kind.LOAD)
    }
    return slots[Kind.EVICT], slots[Kind.LOAD]


@pytest.mark.parametrize(
    ("p", "m", "num_rooms"), [(3, 5, 200), (4, 4, 150), pytest.param(4, 5, 200, marks=pytest.mark.slow)]
)
def test_nothing_moves_less_and_nothing_of_it_stays_off_devices_needlessly(p: int, m: int, num_rooms: int) -> None:
    """No plan moves fewer bytes, and no choice of hosts leaves fewer bytes to host memory."""
    plain = generate("1f1b", p, m)
    ways = [every_way(plain, rank) for rank in range(p)]
    rng = random.Random(p * m)
    mixed = refused = alone = 0
    for _ in range(num_rooms):
        sizes = [rng.randint(3, 12) for _ in range(p)]
        activation_budget = [rng.randint(2 * size - 2, (p - rank) * size + 12) for rank, size in enumerate(sizes)]
        fewest = [least_moved(ways[rank], sizes[rank], activation_budget[rank]) for rank in range(p)]
        try:
            tiers = balance_over_hosts(plain, ALL, ActivationBudget(tuple(activation_budget), memory_of(sizes)))
        except BudgetTooSmall:
            refused += 1
            assert None in fewest
            continue
        check(tiers)
        assert moved(tiers, sizes) == sum(fewest)
        assert all(sum(allocated_bytes(tiers, rank, memory_of(sizes))) <= activation_budget[rank] for rank in range(p))
        kept = sum(sizes[rank] * len(in_own(tiers, rank)) for rank in range(p))
        assert kept == fewest_kept(tiers, sizes, activation_budget), (
            f"micro-batches of {sizes} in rooms of {activation_budget}"
        )
        alone += kept == moved(tiers, sizes) > 0
        mixed += 0 < kept < moved(tiers, sizes)
    print(f"p={p} m={m}: {refused} refused, {mixed} on devices and in memory, {alone} in memory only")
    assert min(refused, mixed, alone) > 0


def every_way(schedule: Schedule, rank: int) -> set[tuple[int, int]]:
    """Peak and number of evictions of every set of the rank's micro-batches, at every time."""
    own = live_bytes(schedule, rank, memory_of([1] * schedule.num_ranks))
    slots = {
        (one.kind, one.microbatch): slot for slot, cell in enumerate(schedule.ranks[rank]) for one in cell.computations
    }
    choices = []
    for microbatch in range(schedule.num_microbatches):
        between = range(slots[Kind.FORWARD, microbatch] + 1, slots[Kind.BACKWARD, microbatch])
        choices.append([(), *(range(out + 1, back) for out, back in combinations(between, 2))])
    found = set()
    for chosen in product(*choices):
        curve = list(own)
        for away in chosen:
            for slot in away:
                curve[slot] -= 1
        # Beside two slots in a row nothing is away in between.
        found.add((max(curve), sum(away != () for away in chosen)))
    return found


def least_moved(ways: Collection[tuple[int, int]], size: int, room: int) -> int | None:
    return min((count * size for peak, count in ways if peak * size <= room), default=None)


def fewest_kept(schedule: Schedule, sizes: Sequence[int], activation_budget: Sequence[int]) -> int:
    """Over every choice of a host, or none, for every stay: the fewest bytes that none has."""
    p = schedule.num_ranks
    senders = [rank for rank in range(p) if hosts_of(schedule, rank)]
    hosts = [rank for rank in range(p) if rank not in senders]
    plain = replace(
        schedule, ranks=tuple(tuple(replace(cell, transfers=()) for cell in row) for row in schedule.ranks), hosts=None
    )
    spare = {rank: activation_budget[rank] - max(live_bytes(plain, rank, memory_of(sizes))) for rank in hosts}
    stays = [(rank, *_away(schedule, stay)) for rank in senders for stay in hosts_of(schedule, rank)]
    best = sum(sizes[rank] for rank, _, _ in stays)
    for chosen in product([None, *hosts], repeat=len(stays)):
        kept = sum(sizes[rank] for (rank, _, _), host in zip(stays, chosen, strict=True) if host is None)
        if kept < best and all(_taken(stays, chosen, host, sizes) <= spare[host] for host in hosts):
            best = kept
    return best


def _taken(stays: Sequence[tuple[int, int, int]], chosen: Sequence[int | None], host: int, sizes: Sequence[int]) -> int:
    """What a host's buffers take: for each sender as many as are full at once."""
    total = 0
    for sender in {rank for rank, _, _ in stays}:
        mine = [
            (out, back)
            for (rank, out, back), where in zip(stays, chosen, strict=True)
            if where == host and rank == sender
        ]
        total += sizes[sender] * max((sum(out <= at <= back for out, back in mine) for at, _ in mine), default=0)
    return total


def times(schedule: Schedule, links: Links) -> Simulation:
    return simulate(schedule, Costs((StageCost(4, 8, moved_bytes=8, saved_bytes=8),) * schedule.num_stages, links))


def test_it_takes_the_link_to_the_nodes_memory_and_no_other() -> None:
    """8 bytes at 2 bytes a second in each direction, while links between devices would take none, or for ever."""
    schedule = balanced("1f1b", 4, 8)
    for inside in (Link(), Link(1e-6)):
        found = times(schedule, Links(inside=inside, host=Link(2)))
        assert {one.end_s - one.start_s for row in found.transfers for one in row} == {4}
    assert times(schedule, Links(host=Link(2))).makespan_s < times(schedule, Links(host=Link(1))).makespan_s


def test_there_and_back_are_two_directions_each_one_after_the_other() -> None:
    found = times(balanced("1f1b", 4, 12), Links(host=Link(1)))
    rows = found.transfers
    both = 0
    for row in rows:
        out, back = (
            [(one.start_s, one.end_s) for one in row if one.action.kind is kind] for kind in (Kind.EVICT, Kind.LOAD)
        )
        for lane in (out, back):
            assert all(before[1] <= after[0] for before, after in pairwise(sorted(lane)))
        both += sum(a < d and c < b for a, b in out for c, d in back)
    assert both


def test_what_goes_to_a_device_does_not_wait_for_what_goes_to_memory() -> None:
    """Two ports: with a link to memory that takes ages, what goes to rank 3 still ends at once."""
    schedule = balanced("1f1b", 4, 8, hosts=ALL)
    found = times(schedule, Links(inside=Link(8), host=Link(0.1)))
    to_rank_3 = [one for one in found.transfers[3] if one.action.kind is Kind.HOST]
    assert {one.end_s - one.start_s for one in to_rank_3} == {1}


def test_a_load_waits_for_what_brought_it_there() -> None:
    found = times(balanced("1f1b", 4, 8), Links(host=Link(1 / 3)))
    for row in found.transfers:
        ends = {(one.action.stage, one.action.microbatch): one.end_s for one in row if one.action.kind is Kind.EVICT}
        loads = [one for one in row if one.action.kind is Kind.LOAD]
        assert all(one.start_s >= ends[one.action.stage, one.action.microbatch] for one in loads)
        assert all(buffer < 3 for _, buffer in with_host_buffers(found, 0))
