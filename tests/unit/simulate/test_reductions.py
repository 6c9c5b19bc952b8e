"""Reductions of gradients behind and beside what is computed: by hand, and what two pipes expose of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.simulate.cost import Costs, Link, Links, Number, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Reduced, Simulation


def exposed_s(simulation: Simulation) -> Number:
    """Seconds of the last reduction beyond the pipeline."""
    return max(row[-1].end_s for row in simulation.reductions if row) - simulation.pipeline_s


def test_two_ranks_by_hand() -> None:
    """f = 1, b = 2, a message takes 1, a reduction 4:

    rank 0  0F0 0-1    1F1 2-3  1B1 3-5    0B0 6-8        and rank 1 is its mirror image
    messages        1-2               5-6
    """
    schedule = build(ScheduleConfig("chimera", 2, 2))
    costs = uniform(2, StageCost(1, 2, sent_bytes=1, reduction_s=4, optimizer_s=1), Links(Link(1)))
    lazily, eagerly = (simulate(schedule, replace(costs, eager=eager)) for eager in (False, True))
    assert lazily.pipeline_s == eagerly.pipeline_s == 8
    # Stage 1's gradients are complete on both ranks at 5, and gradients of its inputs pass the ports until 6.
    assert lazily.reductions == ((Reduced(1, 8, 12), Reduced(0, 12, 16)),) * 2
    assert eagerly.reductions == ((Reduced(1, 5, 10), Reduced(0, 10, 14)),) * 2
    # Each rank updates both of its stages.
    assert (lazily.makespan_s, eagerly.makespan_s) == (16 + 2, 14 + 2)
    assert (exposed_s(lazily), exposed_s(eagerly)) == (8, 6)


def test_buckets_are_reduced_beside_the_last_backward() -> None:
    """One rank, two micro-batches, b = 8 and a reduction of 4: of four buckets the last begins with the backward's end.

    A 32B model on 8 devices a replica was predicted 318 TFLOP/s a GPU, in one lump behind everything, and measured 460.
    """
    costs = uniform(1, StageCost(2, 8, reduction_s=4, optimizer_s=1))
    schedule = build(ScheduleConfig("1f1b", 1, 2))

    def reduced(seconds: int, buckets: int, eager: bool = True) -> tuple[Reduced, ...]:
        cost = replace(costs.stages[0], reduction_s=seconds, buckets=buckets)
        return simulate(schedule, replace(costs, stages=(cost,), eager=eager)).reductions[0]

    assert reduced(4, 1) == (Reduced(0, 20, 24),)
    # Buckets are complete at 14, 16, 18 and 20.
    assert reduced(4, 4) == (Reduced(0, 14, 21),)
    # Each takes longer than the backward of it.
    assert reduced(16, 4) == (Reduced(0, 14, 30),)
    # Not beside computations nothing begins before their end.
    assert reduced(4, 4, eager=False) == (Reduced(0, 20, 24),)


def test_replicas_on_other_nodes_share_no_port_with_messages_inside_one() -> None:
    costs = uniform(2, StageCost(1, 2, sent_bytes=1, reduction_s=4), Links(Link(1)))
    apart = simulate(build(ScheduleConfig("chimera", 2, 2)), replace(costs, eager=True, replicas_apart=True))
    assert apart.reductions == ((Reduced(1, 5, 9), Reduced(0, 9, 13)),) * 2


CASES = [("chimera", 1, 1), ("mixpipe", 1, 2), ("bitpipe", 2, 1), ("bitpipe", 2, 2), ("bitpipe", 3, 1)]


@pytest.mark.parametrize("p", [8, 16])
@pytest.mark.parametrize(("name", "v", "rounds"), CASES)
def test_eagerly_one_reduction_is_exposed_and_lazily_one_for_each_chunk(name: str, v: int, rounds: int, p: int) -> None:
    """Stage 0 is complete only when all is over; whatever a rank has of both pipes besides was complete sooner."""
    schedule = build(ScheduleConfig(name, p, rounds * p, num_chunks=v))
    seconds = Fraction(1, 4 * v)
    costs = uniform(p * v, StageCost(Fraction(1, v), Fraction(2, v), reduction_s=seconds))
    assert exposed_s(simulate(schedule, costs)) == 2 * v * seconds
    assert exposed_s(simulate(schedule, replace(costs, eager=True))) == seconds


def test_a_reduction_waits_for_the_later_of_a_pair() -> None:
    """Rank 7 is on another node with slow links; its mirror image, rank 0, is complete long before."""
    schedule = build(ScheduleConfig("bitpipe", 8, 16, num_chunks=2))
    links = Links(Link(latency_s=1), Link(latency_s=7), (0, 0, 0, 0, 0, 0, 0, 1))
    found = simulate(schedule, Costs((StageCost(2, 4, reduction_s=1),) * 16, links, eager=True))
    ends = [
        {timed.action.stage: timed.end_s for timed in row if timed.action.kind.value == "B"}
        for row in found.computations
    ]
    assert any(ends[0][stage] != ends[7][stage] for stage in ends[0])
    for rank, row in enumerate(found.reductions):
        assert row == found.reductions[7 - rank]
        assert sorted(one.stage for one in row) == list(schedule.layout.stages_of(rank))
        for one in row:
            assert one.start_s >= max(ends[rank][one.stage], ends[7 - rank][one.stage])
    assert found.reductions[0][0].start_s == max(min(ends[0].values()), min(ends[7].values()))


def test_a_transfer_is_given_way_to_as_well() -> None:
    schedule = build(ScheduleConfig("bitpipe", 8, 8, num_chunks=2, balance=named_balance("bpipe")))
    cost = StageCost(6, 12, saved_bytes=1, moved_bytes=1, transfer_s=5, reduction_s=40)
    plain, eager = (simulate(schedule, replace(uniform(16, cost), eager=eager)) for eager in (False, True))
    assert eager.transfers == plain.transfers, "nobody waits for a reduction"
    for rank, row in enumerate(eager.reductions):
        for one in row:
            pair = (rank, 7 - rank)
            beside = [t for r in pair for t in eager.transfers[r] if t.start_s < one.end_s and t.end_s > one.start_s]
            assert bool(beside) == (one.end_s - one.start_s > 40)


def test_with_one_pipe_a_rank_reduces_by_itself() -> None:
    """The last rank of 1F1B is done first: eagerly its reduction is over when the first rank's begins."""
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    costs = uniform(4, StageCost(1, 2, reduction_s=2))
    eager = simulate(schedule, replace(costs, eager=True))
    assert [row[0].end_s for row in eager.reductions] == [35, 33, 31, 29]
    assert eager.makespan_s == simulate(schedule, costs).makespan_s == 35
    assert simulate(schedule, uniform(4, StageCost(1, 2))).reductions == ((),) * 4
