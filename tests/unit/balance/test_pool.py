"""Balancing in pools and over host memory."""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

import pytest

from bpipe.balance.budget import ActivationBudget, BudgetTooSmall, balance_within, smallest_level
from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes, balance
from bpipe.balance.pool import (
    APART,
    Item,
    balance_over_hosts,
    balance_over_hosts_within,
    pack,
)
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


def generate(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    return FAMILIES[name].generate(num_stages, num_microbatches, num_chunks)


def moved(schedule: Schedule, sizes: Sequence[int]) -> int:
    every = (action for row in schedule.ranks for cell in row for action in cell.transfers)
    return sum(sizes[action.stage] for action in every if action.kind is Kind.EVICT)


# For one sender: the most of its own micro-batches that it holds, the host buffers that it needs on every rank, and the
# number of evictions.
Way = tuple[int, tuple[int, ...], int]


def every_way(schedule: Schedule, sender: int) -> set[Way]:
    """Return a way for every set of the sender's micro-batches, with every pair of slots and every host."""
    row, num_ranks = schedule.ranks[sender], schedule.num_ranks
    slots = {
        (cell.compute.kind, cell.compute.microbatch): slot for slot, cell in enumerate(row) if cell.compute is not None
    }
    own = live_bytes(schedule, sender, memory_of([1] * num_ranks))
    others = [rank for rank in range(num_ranks) if rank != sender]
    choices = []
    for microbatch in range(schedule.num_microbatches):
        between = range(slots[Kind.FORWARD, microbatch] + 1, slots[Kind.BACKWARD, microbatch])
        choices.append([None, *product(combinations(between, 2), others)])
    return {_way(own, chosen, num_ranks) for chosen in product(*choices)}


def _way(own: Sequence[int], chosen: Sequence[tuple[tuple[int, int], int] | None], num_ranks: int) -> Way:
    away = [stay for stay in chosen if stay is not None]
    curve, hosted = list(own), [[0] * len(own) for _ in range(num_ranks)]
    for (out, load), host in away:
        # An evicted micro-batch is held until the end of its slot, and again from the start of the load's slot.
        for slot in range(out + 1, load):
            curve[slot] -= 1
        for slot in range(out, load + 1):
            hosted[host][slot] += 1
    return max(curve), tuple(map(max, hosted)), len(away)


def best_of(ways: Sequence[set[Way]]) -> list[list[Way]]:
    """Return each rank's ways that no other way dominates."""
    undominated = []
    for of_rank in ways:
        best: list[Way] = []
        for candidate in sorted(of_rank, key=lambda way: (way[0] + sum(way[1]) + way[2], way)):
            if not any(_as_good(better, candidate) for better in best):
                best.append(candidate)
        undominated.append(best)
    return undominated


def _as_good(first: Way, second: Way) -> bool:
    return (
        first[0] <= second[0]
        and first[2] <= second[2]
        and all(ours <= theirs for ours, theirs in zip(first[1], second[1], strict=True))
    )


def fewest_bytes(
    ways: Sequence[Sequence[Way]], sizes: Sequence[int], activation_budget: Sequence[int], in_turn: bool
) -> int | None:
    """Return the fewest bytes moved over all ways of all ranks; None if none keeps the rooms.

    With `in_turn`, a rank may evict to make room for what it hosts.
    """
    totals: list[int] = []
    for chosen in product(*ways):
        if not in_turn and any(
            leaving and any(buffers[rank] for _, buffers, _ in chosen) for rank, (_, _, leaving) in enumerate(chosen)
        ):
            continue
        peaks = [peak * size for (peak, _, _), size in zip(chosen, sizes, strict=True)]
        for (_, buffers, _), size in zip(chosen, sizes, strict=True):
            peaks = [peak + count * size for peak, count in zip(peaks, buffers, strict=True)]
        if all(peak <= room for peak, room in zip(peaks, activation_budget, strict=True)):
            totals.append(sum(count * size for (_, _, count), size in zip(chosen, sizes, strict=True)))
    return min(totals, default=None)


@pytest.mark.parametrize(
    ("p", "m", "num_rooms"),
    [(3, 3, 80), pytest.param(3, 4, 200, marks=pytest.mark.slow), pytest.param(4, 3, 200, marks=pytest.mark.slow)],
)
def test_no_plan_of_all_moves_less_and_what_is_refused_none_keeps(p: int, m: int, num_rooms: int) -> None:
    """1F1B with rooms of all sizes, and micro-batches whose size depends on the stage.

    No plan moves less, not even one in which a rank evicts to make room for another's micro-batches. Only such a plan
    may keep rooms that are refused.
    """
    plain = generate("1f1b", p, m)
    ways = best_of([every_way(plain, rank) for rank in range(p)])
    rng = random.Random(p * m)
    num_kept = refused = several = only_in_turn = 0
    for number in range(num_rooms):
        sizes = [rng.randint(3, 12) for _ in range(p)]
        largest = max((p - rank) * size for rank, size in enumerate(sizes))
        activation_budget = [rng.randint(size, (p - rank) * size + 8) for rank, size in enumerate(sizes)]
        if number % 2:
            activation_budget = [rng.randint(largest // 2, largest)] * p
        fewest = fewest_bytes(ways, sizes, activation_budget, in_turn=True)
        try:
            pooled = balance_over_hosts(plain, POOL, ActivationBudget(tuple(activation_budget), memory_of(sizes)))
        except BudgetTooSmall:
            refused += 1
            assert fewest_bytes(ways, sizes, activation_budget, in_turn=False) is None, (
                f"micro-batches of {sizes} in rooms of {activation_budget}"
            )
            only_in_turn += fewest is not None
            continue
        check(pooled)
        num_kept += 1
        several += any(len(of_rank) > 1 for of_rank in pooled.hosts or ())
        assert moved(pooled, sizes) == fewest, f"micro-batches of {sizes} in rooms of {activation_budget}"
        assert all(sum(allocated_bytes(pooled, rank, memory_of(sizes))) <= activation_budget[rank] for rank in range(p))
    assert min(num_kept, refused) > num_rooms // 10
    assert only_in_turn <= num_rooms // 50
    print(f"p={p} m={m}: {num_kept} kept, {refused} refused, of which {only_in_turn} could be kept in turn")
    assert several


@pytest.mark.parametrize("seed", range(8))
def test_no_packing_of_all_is_nearer(seed: int) -> None:
    """A packing is found whenever one exists, and no other costs less."""
    rng = random.Random(seed)
    none = 0
    for _ in range(40):
        num_ranks = rng.randint(3, 4)
        senders = rng.sample(range(num_ranks), rng.randint(1, 2))
        items = [Item(rng.choice(senders), rng.randint(2, 7), rng.randint(1, 9)) for _ in range(rng.randint(1, 5))]
        spare = [0 if rank in senders else rng.randint(4, 16) for rank in range(num_ranks)]
        nodes = [rng.randint(0, 1) for _ in range(num_ranks)]

        def cost(owner: int, host: int, nodes: Sequence[int] = nodes) -> int:
            return APART * (nodes[owner] != nodes[host]) + abs(owner - host)

        packing = pack(items, spare, cost)
        best = min((_total(items, hosts, cost) for hosts in _packings(items, spare)), default=None)
        assert (None if packing is None else _total(items, packing, cost)) == best
        none += best is None
    assert 0 < none < 40


def _total(items: Sequence[Item], hosts: Sequence[int], cost: Callable[[int, int], int]) -> int:
    return sum(item.moved_bytes * cost(item.owner, host) for item, host in zip(items, hosts, strict=True))


def _packings(items: Sequence[Item], spare: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for hosts in product(range(len(spare)), repeat=len(items)):
        taken = [0] * len(spare)
        for item, host in zip(items, hosts, strict=True):
            taken[host] += item.num_bytes
        if all(used <= room for used, room in zip(taken, spare, strict=True)):
            yield hosts


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (12, 24)])
def test_where_pairs_reach_all_there_is_a_pool_is_theirs(p: int, m: int) -> None:
    """With equal stages in 1F1B all mirrored pairs hold the same, so no other rank has more room."""
    plain = generate("1f1b", p, m)
    pooled, paired = balance_over_hosts_within(plain, POOL, None), balance(plain)
    assert pooled.bounds == paired.bounds
    assert pooled.ranks == paired.ranks
    assert pooled.partners is not None


def test_one_sends_to_several_and_several_to_one() -> None:
    plain, memory = generate("1f1b", 4, 8), memory_of([100] * 4)
    spread = balance_over_hosts(plain, POOL, ActivationBudget((200, 300, 300, 300), memory))
    check(spread)
    assert write_hosts(spread.hosts or ()) == "2+3,none,none,none"
    gathered = balance_over_hosts(plain, POOL, ActivationBudget((300, 200, 200, 600), memory))
    check(gathered)
    assert write_hosts(gathered.hosts or ()) == "3,3,none,none"
    assert allocated_bytes(gathered, 3, memory) == (100, 400)
    with pytest.raises(BudgetTooSmall, match="rank 2, which hosts for rank 1, needs 400 bytes"):
        balance_within(plain, ActivationBudget((300, 200, 200, 600), memory), (3, 2, 1, 0))


def test_who_is_on_the_same_node_comes_before_the_usual_partner() -> None:
    for nodes, host in ((None, "3"), ((0, 0, 1, 1), "1+3")):
        how = BalanceConfig((3, 4, 4, 4), hosts=POOL, nodes=nodes)
        schedule = build(ScheduleConfig("1f1b", 4, 8, balance=how))
        assert write_hosts(schedule.hosts or ()).split(",")[0] == host


def test_no_host_buffer_serves_two_ranks() -> None:
    """In a shared buffer, the rank that fills it would have to wait for another one to empty it."""
    plain, memory = generate("1f1b", 4, 8), memory_of([100] * 4)
    gathered = balance_over_hosts(plain, POOL, ActivationBudget((300, 200, 200, 600), memory))
    of = {rank: {buffer for stay, buffer in host_buffers(gathered, 3).items() if stay.stage == rank} for rank in (0, 1)}
    assert not of[0] & of[1]
    assert num_buffers_for(gathered, 3) == {0: 2, 1: 2}


def test_whom_it_refuses() -> None:
    plain, memory = generate("1f1b", 4, 8), memory_of([100] * 4)
    cases = {
        (0, 400, 400, 400): "rank 0 has no room for even one micro-batch",
        (150, 400, 400, 800): "rank 0 cannot keep to 150 bytes",
        (
            200,
            300,
            200,
            200,
        ): r"evicted memory needs host buffers \(rank 0 300 bytes\), more than the other ranks have room for \(rank 3 100\)",
    }
    for activation_budget, reason in cases.items():
        with pytest.raises(BudgetTooSmall, match=reason):
            balance_over_hosts(plain, POOL, ActivationBudget(activation_budget, memory))
    with pytest.raises(BudgetTooSmall, match=r"\(rank 0 300, rank 1 200 bytes\)") as two:
        balance_over_hosts(plain, POOL, ActivationBudget((200, 200, 200, 200), memory))
    assert two.value.pair == (0, 0), "the one that lacks most is named"
    with pytest.raises(BudgetTooSmall, match=r"rank 0 has no room for its own micro-batches, and no other rank"):
        balance_over_hosts(generate("gpipe", 1, 4), POOL, ActivationBudget((399,), memory_of([100])))
    with pytest.raises(ValueError, match=r"The smallest bound found that a pool keeps for all ranks is 3"):
        balance_over_hosts_within(plain, POOL, [2] * 4)


def test_the_smallest_level_is_kept_and_one_below_is_not() -> None:
    plain, memory = generate("1f1b", 6, 12), memory_of([100, 90, 80, 70, 60, 250])

    def at(level: int) -> Schedule:
        return balance_over_hosts(plain, POOL, ActivationBudget((level,) * 6, memory))

    level, worst = smallest_level(at, 600)
    at(level)
    with pytest.raises(BudgetTooSmall) as error:
        at(level - 1)
    assert error.value.pair == worst


def test_same_node_first() -> None:
    """Rank 0's usual partner is on another node: ranks with room on its own node come first."""
    plain, memory = generate("1f1b", 4, 8), memory_of([100] * 4)
    activation_budget = ActivationBudget((300, 300, 400, 300), memory)
    assert write_hosts(balance_over_hosts(plain, POOL, activation_budget).hosts or ()) == "3,none,none,0"
    apart = balance_over_hosts(plain, POOL, activation_budget, (0, 1, 0, 1))
    assert write_hosts(apart.hosts or ()) == "2,none,0,none"


def test_all_ranks_start_the_transfers_of_a_slot_in_one_order() -> None:
    """Otherwise ranks might wait for each other in a ring, each for its first transfer."""
    memory = memory_of([100 + 30 * (stage % 3) for stage in range(8)])
    plain = generate("1f1b", 8, 24)
    level, _ = smallest_level(
        lambda level: balance_over_hosts(plain, POOL, ActivationBudget((level,) * 8, memory)), 1200
    )
    pooled = balance_over_hosts(plain, POOL, ActivationBudget((level,) * 8, memory))
    assert any(len(of_rank) > 1 for of_rank in pooled.hosts or ())
    for slot in range(len(pooled.ranks[0])):
        orders = [[(action.stage, action.microbatch) for action in row[slot].transfers] for row in pooled.ranks]
        # The lowest sender's come first, and each sender's in its own order.
        in_order = [key for rank, order in enumerate(orders) for key in order if key[0] == rank]
        assert all(order == [key for key in in_order if key in order] for order in orders)


def balanced(
    name: str, p: int, m: int, v: int = 1, hosts: str = HOST, bounds: tuple[int, ...] | None = None
) -> Schedule:
    return build(ScheduleConfig(name, p, m, num_chunks=v, balance=BalanceConfig(bounds, hosts=hosts)))


def in_own(schedule: Schedule, rank: int) -> list[Residency]:
    return [stay for stay, host in hosts_of(schedule, rank).items() if not host.on_device]


# Ranks, micro-batches and chunks that each family takes.
SHAPES = {name: (4, 8, max(1, family.min_chunks)) for name, family in FAMILIES.items()}


@pytest.mark.parametrize("hosts", [HOST, ALL])
@pytest.mark.parametrize("name", SHAPES)
def test_every_family_keeps_less_than_pairs_and_every_rule(name: str, hosts: str) -> None:
    """`build` checks all rules. A schedule that is written is read back unchanged."""
    p, m, v = SHAPES[name]
    schedule, paired = (balanced(name, p, m, v, arrangement) for arrangement in (hosts, PAIR))
    assert schedule.bounds is not None
    assert max(schedule.bounds) <= max(paired.bounds or ())
    assert max(peak_counts(schedule)) <= max(schedule.bounds)
    for reading, writing in ((read_csv, write_csv), (read_json, write_json)):
        assert reading(writing(schedule)) == schedule


def test_two_are_held_where_pairs_hold_three_and_none_can_hold_one() -> None:
    """While one micro-batch is computed, another is on its way."""
    schedule = balanced("1f1b", 4, 8)
    assert schedule.bounds == (2, 2, 2, 2)
    assert write_hosts(schedule.hosts or ()) == "own,own,none,none"
    assert peak_counts(schedule) == (2, 2, 2, 1)
    assert [num_host_memory_buffers(schedule, rank) for rank in range(4)] == [3, 2, 0, 0]
    with pytest.raises(ValueError, match=r"rank 0 cannot keep to 1 micro-batches.*CPU memory keeps for all ranks is 2"):
        balanced("1f1b", 4, 8, bounds=(1,))
    # With a bound for each rank, only rank 0 evicts.
    assert peak_counts(balanced("1f1b", 4, 8, bounds=(2, 4, 4, 4))) == (2, 3, 2, 1)
    with pytest.raises(BudgetTooSmall, match="rank 0 has no room for even one micro-batch"):
        balance_over_hosts(generate("1f1b", 4, 8), HOST, ActivationBudget((0, 1, 1, 1), memory_of([1] * 4)))


def test_one_rank_alone_keeps_what_no_partner_could() -> None:
    alone = balanced("gpipe", 1, 6, bounds=(3,))
    assert write_hosts(alone.hosts or ()) == "own"
    assert peak_counts(alone) == (3,)


def test_devices_come_before_a_nodes_memory() -> None:
    """Rank 3 has room for one micro-batch of rank 0, and no rank has room for any of rank 1."""
    schedule = balanced("1f1b", 4, 8, hosts=ALL)
    assert write_hosts(schedule.hosts or ()) == "3+own,own,none,none"
    assert num_buffers_for(schedule, 3) == {0: 1}
    # With enough room on devices it equals the pool's plan to the last action.
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
        stays = set(in_own(schedule, rank))
        assert set(host_memory_buffers(schedule, rank)) == stays
        full: set[tuple[int, int]] = set()
        fullest, nth = 0, {}
        for cell in schedule.ranks[rank]:
            for action in cell.transfers:
                key = (action.stage, action.microbatch)
                if action.kind is Kind.EVICT:
                    nth[key] = nth.get(key, -1) + 1
                    full |= {key} if Residency(*key, nth[key]) in stays else set()
            fullest = max(fullest, len(full))
            full -= {(action.stage, action.microbatch) for action in cell.transfers if action.kind is Kind.LOAD}
        assert num_host_memory_buffers(schedule, rank) == fullest


@pytest.mark.parametrize("hosts", [HOST, POOL, ALL])
@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved-1f1b", 2), ("v-half", 2), ("chimera", 1)])
def test_no_buffer_holds_two_at_once(name: str, v: int, hosts: str) -> None:
    """A buffer is free in the slot after its load, not during it."""
    schedule = balanced(name, 4, 12, v, hosts)
    for rank in range(4):
        for buffers in (host_buffers(schedule, rank), host_memory_buffers(schedule, rank)):
            for (stay, buffer), (later, another) in combinations(buffers.items(), 2):
                first, second = sorted(_away(schedule, residency) for residency in (stay, later))
                assert buffer != another or first[1] < second[0]


def _away(schedule: Schedule, stay: Residency) -> tuple[int, int]:
    """Return the slots of the eviction and the load of a stay."""
    rank = schedule.layout.rank_of(stay.stage, stay.microbatch)
    slots = {
        action.kind: slot
        for slot, cell in enumerate(schedule.ranks[rank])
        for action in cell.transfers
        if (action.stage, action.microbatch) == stay[:2] and action.kind in (Kind.EVICT, Kind.LOAD)
    }
    return slots[Kind.EVICT], slots[Kind.LOAD]


@pytest.mark.parametrize(
    ("p", "m", "num_rooms"), [(3, 5, 200), (4, 4, 150), pytest.param(4, 5, 200, marks=pytest.mark.slow)]
)
def test_nothing_moves_less_and_nothing_of_it_stays_off_devices_needlessly(p: int, m: int, num_rooms: int) -> None:
    """No plan moves fewer bytes, and no choice of hosts leaves fewer bytes to host memory."""
    plain = generate("1f1b", p, m)
    ways = [every_tier(plain, rank) for rank in range(p)]
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
        in_memory = sum(sizes[rank] * len(in_own(tiers, rank)) for rank in range(p))
        assert in_memory == fewest_kept(tiers, sizes, activation_budget), (
            f"micro-batches of {sizes} in rooms of {activation_budget}"
        )
        alone += in_memory == moved(tiers, sizes) > 0
        mixed += 0 < in_memory < moved(tiers, sizes)
    print(f"p={p} m={m}: {refused} refused, {mixed} on devices and in memory, {alone} in memory only")
    assert min(refused, mixed, alone) > 0


def every_tier(schedule: Schedule, rank: int) -> set[tuple[int, int]]:
    """Return peak and number of evictions for every set of the rank's micro-batches and all their slots."""
    own = live_bytes(schedule, rank, memory_of([1] * schedule.num_ranks))
    slots = {
        (action.kind, action.microbatch): slot
        for slot, cell in enumerate(schedule.ranks[rank])
        for action in cell.computations
    }
    choices = []
    for microbatch in range(schedule.num_microbatches):
        between = range(slots[Kind.FORWARD, microbatch] + 1, slots[Kind.BACKWARD, microbatch])
        choices.append([(), *(range(out + 1, load) for out, load in combinations(between, 2))])
    tiers = set()
    for chosen in product(*choices):
        curve = list(own)
        for away in chosen:
            for slot in away:
                curve[slot] -= 1
        # With two successive slots nothing is away in between.
        tiers.add((max(curve), sum(away != () for away in chosen)))
    return tiers


def least_moved(ways: Collection[tuple[int, int]], size: int, room: int) -> int | None:
    return min((count * size for peak, count in ways if peak * size <= room), default=None)


def fewest_kept(schedule: Schedule, sizes: Sequence[int], activation_budget: Sequence[int]) -> int:
    """Return the fewest bytes that no other rank hosts, over every choice of hosts."""
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
        unhosted_bytes = sum(sizes[rank] for (rank, _, _), host in zip(stays, chosen, strict=True) if host is None)
        if unhosted_bytes < best and all(_taken(stays, chosen, host, sizes) <= spare[host] for host in hosts):
            best = unhosted_bytes
    return best


def _taken(stays: Sequence[tuple[int, int, int]], chosen: Sequence[int | None], host: int, sizes: Sequence[int]) -> int:
    """Return the bytes of a host's buffers: for each sender as many as are full at once."""
    total = 0
    for sender in {rank for rank, _, _ in stays}:
        spans = [
            (out, load)
            for (rank, out, load), where in zip(stays, chosen, strict=True)
            if where == host and rank == sender
        ]
        total += sizes[sender] * max((sum(out <= slot <= load for out, load in spans) for slot, _ in spans), default=0)
    return total


def times(schedule: Schedule, links: Links) -> Simulation:
    return simulate(schedule, Costs((StageCost(4, 8, moved_bytes=8, saved_bytes=8),) * schedule.num_stages, links))


def test_it_takes_the_link_to_the_nodes_memory_and_no_other() -> None:
    """8 bytes at 2 bytes per second in each direction; links between devices are infinitely fast, or slow."""
    schedule = balanced("1f1b", 4, 8)
    for inside in (Link(), Link(1e-6)):
        report = times(schedule, Links(inside=inside, host=Link(2)))
        assert {transfer.end_s - transfer.start_s for row in report.transfers for transfer in row} == {4}
    assert times(schedule, Links(host=Link(2))).makespan_s < times(schedule, Links(host=Link(1))).makespan_s


def test_what_goes_to_a_device_does_not_wait_for_what_goes_to_memory() -> None:
    """There are two ports: transfers to rank 3 end at once even if the link to host memory is very slow."""
    schedule = balanced("1f1b", 4, 8, hosts=ALL)
    report = times(schedule, Links(inside=Link(8), host=Link(0.1)))
    to_rank_3 = [transfer for transfer in report.transfers[3] if transfer.action.kind is Kind.HOST]
    assert {transfer.end_s - transfer.start_s for transfer in to_rank_3} == {1}


def test_a_load_waits_for_what_brought_it_there() -> None:
    report = times(balanced("1f1b", 4, 8), Links(host=Link(1 / 3)))
    for row in report.transfers:
        ends = {
            (transfer.action.stage, transfer.action.microbatch): transfer.end_s
            for transfer in row
            if transfer.action.kind is Kind.EVICT
        }
        loads = [transfer for transfer in row if transfer.action.kind is Kind.LOAD]
        assert all(transfer.start_s >= ends[transfer.action.stage, transfer.action.microbatch] for transfer in loads)
        assert all(buffer < 3 for _, buffer in with_host_buffers(report, 0))
