"""Shards of the vocabulary on costs: collectives by hand, what they wait for, what shards hold."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from bpipe.balance.budget import ActivationBudget, balance_within
from bpipe.schedule.action import Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import live_bytes, memory_of, peak_bytes
from bpipe.simulate.cost import CollectiveCost, Costs, Link, Links, Number, ShardCost, StageCost
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation
from tests.unit.schedule.families.test_sharded_schedules import ONE, SPLIT, TWO, sharded

COLLECTIVES = CollectiveCost(broadcast_s=1, gather_s=2, reduce_s=3, input_reduce_s=4, input_broadcast_s=5)
ALL_ONE = ShardCost(1, 1, 1, 1)


def times(simulation: Simulation, kind: Kind, microbatch: int) -> list[tuple[Number, Number]]:
    """From when to when, by rank."""
    rows = simulation.computations
    return [
        (one.start_s, one.end_s)
        for row in rows
        for one in row
        if (one.action.kind, one.action.microbatch) == (kind, microbatch)
    ]


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_one_micro_batch_by_hand(vocabulary: Vocabulary) -> None:
    """Forwards until 3, broadcast until 4, S until 5, statistics until 7, with algorithm 2 reduced until 10."""
    simulation = simulate(
        sharded(3, 1, vocabulary), Costs((StageCost(1, 2),) * 3, shards=(ALL_ONE,), collectives=COLLECTIVES)
    )
    assert times(simulation, Kind.SHARD_FORWARD, 0) == [(4, 5), (4, 5), (3, 4)]
    assert times(simulation, Kind.SHARD_BACKWARD, 0) == [(10, 11) if vocabulary is TWO else (7, 8)] * 3
    # Algorithm 1 reduces from 8 to 11. With algorithm 2 T and the last B could both begin at 10: T does.
    assert times(simulation, Kind.BACKWARD, 0) == [(15, 17), (13, 15), (11, 13)]


def test_shards_of_the_embedding_by_hand() -> None:
    """IF until 1, embeddings at the first stage at 5; links of half a second add half a second."""
    for latency, begin in ((0, 5), (0.5, 5.5)):
        costs = Costs(
            (StageCost(1, 2),) * 3, Links(Link(latency_s=latency)), shards=(ALL_ONE,), collectives=COLLECTIVES
        )
        simulation = simulate(sharded(3, 1, ONE, input_shards=True), costs)
        assert times(simulation, Kind.INPUT_FORWARD, 0) == [(0, 1)] * 3
        assert times(simulation, Kind.FORWARD, 0)[0] == (begin, begin + 1)
        over = times(simulation, Kind.BACKWARD, 0)[0][1]
        there = over + 5 + latency
        assert times(simulation, Kind.INPUT_BACKWARD, 0) == [(over, over + 1), (there, there + 1), (there, there + 1)]


def test_collectives_of_a_sort_take_turns() -> None:
    """Statistics take 10 seconds, longer than S0 and S1 are apart, so T1 waits for the second gathering."""
    costs = Costs((StageCost(1, 2),) * 3, shards=(ShardCost(1, 1),), collectives=CollectiveCost(gather_s=10))
    simulation = simulate(sharded(3, 6, ONE), costs)
    begun = [times(simulation, Kind.SHARD_BACKWARD, k)[0][0] for k in range(6)]
    assert all(after - before >= 10 for before, after in pairwise(begun))


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_nobody_has_the_next_before_everybody_has_come_for_the_last(vocabulary: Vocabulary) -> None:
    """A broadcast needs all its receivers, and each makes ready for one at a time."""
    rng = random.Random(3)
    p, m = 4, 12
    for _ in range(5):
        shards = tuple(ShardCost(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(p))
        stages = tuple(StageCost(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(p))
        simulation = simulate(sharded(p, m, vocabulary), Costs(stages, shards=shards))
        for k in range(m - 1):
            came = max(start for start, _ in times(simulation, Kind.SHARD_FORWARD, k))
            assert all(start >= came for start, _ in times(simulation, Kind.SHARD_FORWARD, k + 1))


def test_each_rank_may_have_a_cost_of_its_own() -> None:
    schedule = sharded(3, 4, ONE)
    shards = tuple(ShardCost(1 + rank, 2) for rank in range(3))
    simulation = simulate(schedule, Costs((StageCost(1, 2),) * 3, shards=shards))
    assert [end - start for start, end in times(simulation, Kind.SHARD_FORWARD, 2)] == [1, 2, 3]
    with pytest.raises(ValueError, match="costs of 2 shards, but the schedule has 3 ranks"):
        simulate(schedule, Costs((StageCost(1, 2),) * 3, shards=shards[:2]))
    with pytest.raises(ValueError, match="give the costs of its shards"):
        simulate(schedule, Costs((StageCost(1, 2),) * 3))


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_logits_are_held_from_s_to_t_on_every_rank(vocabulary: Vocabulary) -> None:
    """In slots as in seconds, and never of more than one micro-batch."""
    p, m = 4, 12
    schedule = sharded(p, m, vocabulary)
    for rank, row in enumerate(schedule.ranks):
        curve, held = (
            live_bytes(schedule, rank, memory_of([100] * p, shard_bytes=7)),
            live_bytes(schedule, rank, memory_of([100] * p)),
        )
        between = False
        for slot, cell in enumerate(row):
            kind = cell.compute.kind if cell.compute else None
            between = between or kind is Kind.SHARD_FORWARD
            assert curve[slot] - held[slot] == 7 * between
            between = between and kind is not Kind.SHARD_BACKWARD
    costs = Costs((StageCost(1, 2, saved_bytes=100),) * p, shards=(ShardCost(1, 1, held_bytes=7),))
    simulation = simulate(schedule, costs)
    assert {level.held_bytes % 100 for rank in range(p) for level in simulation.levels(rank)} == {0, 7}


def test_evictions_make_room_for_logits() -> None:
    """Bounds in bytes, logits included: what fits without them has to evict more with them, and keeps the bound."""
    schedule = sharded(8, 24, ONE)
    for logits in (0, 90):
        memory = memory_of([100] * 8, shard_bytes=logits)
        balanced = balance_within(schedule, ActivationBudget((800,) * 8, memory))
        check(balanced)
        assert max(peak_bytes(balanced, memory)) <= 800
    tight = memory_of([100] * 8, shard_bytes=90)
    plain = balance_within(schedule, ActivationBudget((800,) * 8, memory_of([100] * 8)))
    assert max(peak_bytes(plain, tight)) > 800
    with pytest.raises(ValueError, match="shard_bytes is -1"):
        peak_bytes(schedule, memory_of([100] * 8, shard_bytes=-1))
