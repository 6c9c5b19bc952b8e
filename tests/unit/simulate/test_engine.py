"""Schedules in seconds, compared with the unit grid and with sums by hand; reductions, shards and slices."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.budget import ActivationBudget, balance_within
from bpipe.balance.config import BalanceConfig, balanced, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.plan.budget import windows_of
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES, exchange_of
from bpipe.schedule.hosts import ARRANGEMENTS, Host
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import KeptMemory, live_bytes, live_counts, memory_of, peak_bytes
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import CollectiveCost, Costs, Link, Links, Number, ShardCost, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Reduced, Simulation, Timed
from tests.support.hand_made import with_late_loads
from tests.unit.schedule.families.test_sharded_schedules import ONE, SPLIT, TWO, sharded

EXCHANGES = [Exchange.POSTED, Exchange.MEGATRON_1F1B]
UNIT = StageCost(1, 1, moved_bytes=1, saved_bytes=1)


def schedules() -> Iterator[Schedule]:
    for balance in ("none", "bpipe"):
        yield build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance)))
        yield build(ScheduleConfig("1f1b", 8, 20, balance=named_balance(balance)))
        yield build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=named_balance(balance)))
    yield build(ScheduleConfig("gpipe", 4, 6))


def grids() -> Iterator[Schedule]:
    """Return schedules whose slots last as long as their computations, including those that only our own loop runs."""
    yield from schedules()
    for name, p, m, v in (
        *(("v-half", 5, 7, 2), ("v-half", 8, 16, 2), ("v-min", 6, 9, 2), ("zb-h1", 4, 8, 1), ("mixpipe", 4, 9, 1)),
        *(("chimera", 2, 3, 1), ("chimera", 8, 12, 1), ("bitpipe", 4, 6, 2), ("bitpipe", 4, 6, 3)),
    ):
        yield build(ScheduleConfig(name, p, m, num_chunks=v))
    for split in (Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED):
        yield build(ScheduleConfig("1f1b", 8, 12, vocabulary=split))


def when(report: Simulation, rank: int, text: str) -> Timed:
    return next(timed for timed in (*report.computations[rank], *report.transfers[rank]) if str(timed.action) == text)


@pytest.mark.parametrize(
    "schedule", list(grids()), ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}-{schedule.bounds}"
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_unit_costs_and_free_links_give_the_unit_grid(schedule: Schedule, exchange: Exchange) -> None:
    if exchange_of(schedule.name) is Exchange.POSTED:
        exchange = Exchange.POSTED
    elif schedule.num_chunks > 1:
        exchange = Exchange.MEGATRON_INTERLEAVED.predicted
    unit = replace(UNIT, backward_s=2, weight_s=1) if FAMILIES[schedule.name.partition("-voc")[0]].splits else UNIT
    costs = Costs((unit,) * schedule.num_stages, exchange=exchange, shards=(ShardCost(1, 1),))
    report = simulate(schedule, costs)
    for rank, row in enumerate(schedule.ranks):
        assert [(timed.action, timed.start_s, timed.end_s) for timed in report.computations[rank]] == [
            (cell.compute, slot, slot + 1) for slot, cell in enumerate(row) if cell.compute is not None
        ]
        assert all(timed.start_s == timed.end_s for timed in report.transfers[rank])
    assert report.exposed_transfer_s == 0


@pytest.mark.parametrize(
    "schedule",
    [schedule for schedule in schedules() if schedule.partners],
    ids=lambda schedule: f"{schedule.name}-{schedule.num_ranks}",
)
def test_transfers_as_long_as_a_slot_hide_and_peak_as_the_schedule_says(schedule: Schedule) -> None:
    report = simulate(schedule, uniform(schedule.num_stages, replace(UNIT, transfer_s=1)))
    assert report.exposed_transfer_s == 0
    assert report.makespan_s == len(schedule.ranks[0])
    for rank in range(schedule.num_ranks):
        assert report.peak_bytes(rank) == max(live_counts(schedule, rank))


def test_two_ranks_by_hand() -> None:
    """f = 3, b = 5, a message of 2 bytes takes 1 + 2/4:

    rank 0  F0 0-3  F1 3-6          B0 14-19                B1 22-27
    rank 1    F0 4.5-7.5  B0 7.5-12.5   F1 12.5-15.5  B1 15.5-20.5
    """
    schedule = build(ScheduleConfig("1f1b", 2, 2))
    report = simulate(schedule, uniform(2, StageCost(3, 5, sent_bytes=2), Links(Link(4, 1))))
    half = Fraction(1, 2)
    assert [tuple(timed[1:]) for timed in report.computations[0]] == [(0, 3), (3, 6), (14, 19), (22, 27)]
    assert [tuple(timed[1:]) for timed in report.computations[1]] == [
        (4 + half, 7 + half),
        (7 + half, 12 + half),
        (12 + half, 15 + half),
        (15 + half, 20 + half),
    ]
    assert report.pipeline_s == report.makespan_s == 27
    assert report.bubble_of_makespan == 1 - Fraction(32, 54)


def test_a_blocking_exchange_keeps_the_sender() -> None:
    schedule = build(ScheduleConfig("1f1b", 2, 2))
    costs = Costs((StageCost(3, 5, sent_bytes=2),) * 2, Links(Link(2, 1)), exchange=Exchange.MEGATRON_1F1B)
    report = simulate(schedule, costs)
    # Rank 0 sends F0 from 3 to 5 before it computes F1. It is ready to exchange F1's output and B0's gradient at 8, and
    # rank 1 at 13.
    assert when(report, 0, "0F1").start_s == 5
    assert when(report, 1, "1B0").end_s == 13
    assert when(report, 0, "0B0").start_s == 15
    assert when(report, 1, "1F1").start_s == 15


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_eviction_holds_up_the_next_computation_and_not_the_output(exchange: Exchange) -> None:
    """0EVICT1 starts with 0F2 and lasts five times as long; stage 1 has 0F2's output at once."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    report = simulate(schedule, Costs((replace(UNIT, transfer_s=5),) * 4, exchange=exchange))
    assert when(report, 0, "0EVICT1").start_s == when(report, 0, "0F2").start_s == 2
    assert when(report, 1, "1F2").start_s == when(report, 0, "0F2").end_s == 3
    assert when(report, 0, "0F3").start_s == when(report, 0, "0EVICT1").end_s == 7
    assert report.peak_bytes(0) == max(live_counts(schedule, 0))


def test_what_follows_the_last_computation_waits_for_its_message() -> None:
    """Stage 5, on another node, takes longer to send its last gradient than stage 0 to request micro-batch 10."""
    schedule = with_late_loads(build(ScheduleConfig("1f1b", 6, 12, balance=BalanceConfig())))
    links = Links(Link(2, 1), Link(2, 20), (0, 0, 0, 0, 0, 1))
    costs = Costs(
        (StageCost(1, 4, sent_bytes=2, moved_bytes=1, saved_bytes=1, transfer_s=1),) * 6,
        links,
        exchange=Exchange.MEGATRON_1F1B,
    )
    report = simulate(schedule, costs)
    assert when(report, 5, "0RETURN10").start_s == when(report, 4, "4B11").start_s > when(report, 5, "5B11").end_s + 20


@pytest.mark.parametrize("hosts", ARRANGEMENTS)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1)])
def test_memory_in_time_is_that_of_the_slots(name: str, chunks: int, hosts: str) -> None:
    """An eviction in a bubble overlapped the next load: 1F1B held one micro-batch above its bound."""
    schedule = build(ScheduleConfig(name, 4, 8, num_chunks=chunks, balance=BalanceConfig(hosts=hosts)))
    stage = StageCost(1, 2, weight_s=1, transfer_s=Fraction(1, 2), saved_bytes=1, moved_bytes=1)
    costs = replace(uniform(4 * chunks, stage), exchange=exchange_of(name))
    report = simulate(schedule, costs)
    assert tuple(map(report.peak_bytes, range(4))) == peak_bytes(schedule, costs.memory)


def test_the_last_stages_output_layer_the_reduction_and_the_update_count() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    plain = StageCost(2, 4, reduction_s=7, optimizer_s=1)
    last = replace(plain, output_forward_s=1, output_backward_s=2, reduction_s=0, optimizer_s=3)
    report = simulate(schedule, Costs((plain,) * 3 + (last,)))
    # The last stage never waits between its first and its last computation: 3 forwards before it, 3 backwards after it.
    assert report.pipeline_s == 3 * 2 + 8 * 9 + 3 * 4
    assert report.makespan_s == report.pipeline_s + 7 + 3


@given(p=st.integers(1, 6), m=st.integers(1, 12), forward=st.integers(1, 9), backward=st.integers(1, 9))
@settings(max_examples=40)
def test_equal_stages_take_the_textbook_time(p: int, m: int, forward: int, backward: int) -> None:
    report = simulate(build(ScheduleConfig("1f1b", p, m)), uniform(p, StageCost(forward, backward)))
    assert report.makespan_s == (m + p - 1) * (forward + backward)
    assert report.bubble_of_makespan == Fraction(p - 1, m + p - 1)


def test_messages_and_transfers_share_a_port() -> None:
    """Rank 0 sends outputs to rank 1 and evictions to rank 3 through one port, unless only one is in its node."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    sized = StageCost(6, 6, moved_bytes=6, saved_bytes=6, sent_bytes=1)
    shared = simulate(schedule, uniform(4, sized, Links(Link(1))))
    apart = simulate(schedule, uniform(4, sized, Links(Link(1), Link(1), (0, 0, 1, 1))))
    # F1's output is ready at 12, and so is the eviction during F2: the output goes first. F2's is ready at 18, and the
    # eviction pauses.
    assert (when(shared, 0, "0EVICT1").start_s, when(shared, 0, "0EVICT1").end_s) == (13, 20)
    assert (when(apart, 0, "0EVICT1").start_s, when(apart, 0, "0EVICT1").end_s) == (12, 18)


def test_a_one_sided_transfer_waits_for_no_partner() -> None:
    """The last stage is in a long computation when the first one evicts."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    stages = (StageCost(1, 1, transfer_s=1),) * 3 + (StageCost(10, 10, transfer_s=1),)
    met, alone = (simulate(schedule, Costs(stages, one_sided=ranks)) for ranks in (frozenset[int](), frozenset({0})))
    assert met.exposed_s[0] > 0 == alone.exposed_s[0]
    assert (
        when(alone, 0, "0EVICT3").start_s
        == when(alone, 0, "0B0").start_s
        == when(met, 0, "0B0").start_s
        < when(met, 0, "0EVICT3").start_s
    )
    # A load waits for its eviction, even if the eviction takes longer than everything in between.
    slow = simulate(schedule, Costs((replace(stages[0], transfer_s=50), *stages[1:]), one_sided=frozenset({0})))
    assert when(slow, 0, "0LOAD1").start_s >= when(slow, 0, "0EVICT1").end_s


@pytest.mark.parametrize("one_sided", [frozenset[int](), frozenset({0})])
def test_synchronous_transfers_hold_up_the_evictor_for_as_long_as_they_take(one_sided: frozenset[int]) -> None:
    """Stage 0 of 4, 8 micro-batches: three evictions and three loads, none of them hidden."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    costs = uniform(4, StageCost(10, 20, transfer_s=7))
    hidden, report = (simulate(schedule, replace(costs, one_sided=one_sided, synchronous=how)) for how in (False, True))
    assert hidden.exposed_s[0] == 0
    assert report.exposed_s[0] >= 6 * 7
    assert report.exposed_s[0] == 6 * 7 or not one_sided
    for timed in report.transfers[0]:
        overlapping = [
            computation
            for computation in report.computations[0]
            if computation.start_s < timed.end_s and timed.start_s < computation.end_s
        ]
        assert not overlapping, f"{timed.action} beside {overlapping}"
    assert len(report.transfers[0]) == 6


@given(
    p=st.integers(4, 8),
    m=st.integers(4, 16),
    seconds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12)), min_size=8, max_size=8),
    exchange=st.sampled_from(EXCHANGES),
    balanced=st.booleans(),
    one_sided=st.frozensets(st.integers(0, 3)),
    synchronous=st.booleans(),
)
@settings(max_examples=60)
def test_everything_happens_after_what_it_needs(
    p: int,
    m: int,
    seconds: list[tuple[int, int, int]],
    exchange: Exchange,
    balanced: bool,
    one_sided: frozenset[int],
    synchronous: bool,
) -> None:
    schedule = build(ScheduleConfig("1f1b", p, m, balance=BalanceConfig() if balanced else None))
    stages = tuple(StageCost(f, b, transfer_s=t, sent_bytes=1, moved_bytes=1, saved_bytes=1) for f, b, t in seconds[:p])
    report = simulate(schedule, Costs(stages, Links(Link(2, 1)), exchange, one_sided, synchronous))
    times = {timed.action: timed for row in report.computations for timed in row}
    for action, timed in times.items():
        before = _needed(action, p)
        if before is not None:
            assert times[before].end_s <= timed.start_s
    for row, computed in zip(report.transfers, report.computations, strict=True):
        assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(computed))
        for timed in row:
            forward = times[Action(timed.action.stage, Kind.FORWARD, timed.action.microbatch)]
            backward = times[Action(timed.action.stage, Kind.BACKWARD, timed.action.microbatch)]
            assert forward.end_s <= timed.start_s <= timed.end_s <= backward.start_s
    for rank in range(p):
        assert report.levels(rank)[-1].held_bytes == 0
    assert report.pipeline_s >= max(report.busy_s(rank) for rank in range(p))


def _needed(action: Action, p: int) -> Action | None:
    if action.kind is Kind.FORWARD:
        return replace(action, stage=action.stage - 1) if action.stage else None
    return replace(action, stage=action.stage + 1) if action.stage < p - 1 else replace(action, kind=Kind.FORWARD)


def test_costs_that_do_not_cover_the_schedule_are_refused() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    with pytest.raises(ValueError, match="the schedule has 4 stages, the costs 3"):
        simulate(schedule, uniform(3, UNIT))
    with pytest.raises(ValueError, match="nodes of 2 ranks, but the schedule has 4"):
        simulate(schedule, uniform(4, UNIT, Links(nodes=(0, 1))))
    with pytest.raises(ValueError, match="forward_s is -1"):
        StageCost(-1, 1)
    with pytest.raises(ValueError, match="bytes_per_s is 0"):
        Link(0)


def exposed_s(simulation: Simulation) -> Number:
    """Seconds by which the last reduction ends after the pipeline."""
    return max(row[-1].end_s for row in simulation.reductions if row) - simulation.pipeline_s


def test_reductions_of_two_ranks_by_hand() -> None:
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
    """One rank, two micro-batches, b = 8 and a reduction of 4: the last of four buckets begins when the backward ends.

    With one reduction after everything, a 32B model on 8 devices per replica was predicted at 318 TFLOP/s per GPU; it
    was measured at 460.
    """
    costs = uniform(1, StageCost(2, 8, reduction_s=4, optimizer_s=1))
    schedule = build(ScheduleConfig("1f1b", 1, 2))

    def reduced(seconds: int, buckets: int, eager: bool = True) -> tuple[Reduced, ...]:
        cost = replace(costs.stages[0], reduction_s=seconds, buckets=buckets)
        return simulate(schedule, replace(costs, stages=(cost,), eager=eager)).reductions[0]

    assert reduced(4, 1) == (Reduced(0, 20, 24),)
    # Buckets are complete at 14, 16, 18 and 20.
    assert reduced(4, 4) == (Reduced(0, 14, 21),)
    # Each bucket takes longer than its part of the backward.
    assert reduced(16, 4) == (Reduced(0, 14, 30),)
    # If reductions may not overlap computations, they begin after the end.
    assert reduced(4, 4, eager=False) == (Reduced(0, 20, 24),)


def test_replicas_on_other_nodes_share_no_port_with_messages_inside_one() -> None:
    costs = uniform(2, StageCost(1, 2, sent_bytes=1, reduction_s=4), Links(Link(1)))
    apart = simulate(build(ScheduleConfig("chimera", 2, 2)), replace(costs, eager=True, replicas_apart=True))
    assert apart.reductions == ((Reduced(1, 5, 9), Reduced(0, 9, 13)),) * 2


CASES = [("chimera", 1, 1), ("mixpipe", 1, 2), ("bitpipe", 2, 1), ("bitpipe", 2, 2), ("bitpipe", 3, 1)]


@pytest.mark.parametrize("p", [8, 16])
@pytest.mark.parametrize(("name", "v", "rounds"), CASES)
def test_eagerly_one_reduction_is_exposed_and_lazily_one_for_each_chunk(name: str, v: int, rounds: int, p: int) -> None:
    """Stage 0 is complete only at the end; a rank's other stages of both pipes were complete earlier."""
    schedule = build(ScheduleConfig(name, p, rounds * p, num_chunks=v))
    seconds = Fraction(1, 4 * v)
    costs = uniform(p * v, StageCost(Fraction(1, v), Fraction(2, v), reduction_s=seconds))
    assert exposed_s(simulate(schedule, costs)) == 2 * v * seconds
    assert exposed_s(simulate(schedule, replace(costs, eager=True))) == seconds


def test_a_reduction_waits_for_the_later_of_a_pair() -> None:
    """Rank 7 is on another node with slow links; its mirror image, rank 0, is complete long before."""
    schedule = build(ScheduleConfig("bitpipe", 8, 16, num_chunks=2))
    links = Links(Link(latency_s=1), Link(latency_s=7), (0, 0, 0, 0, 0, 0, 0, 1))
    report = simulate(schedule, Costs((StageCost(2, 4, reduction_s=1),) * 16, links, eager=True))
    ends = [
        {timed.action.stage: timed.end_s for timed in row if timed.action.kind.value == "B"}
        for row in report.computations
    ]
    assert any(ends[0][stage] != ends[7][stage] for stage in ends[0])
    for rank, row in enumerate(report.reductions):
        assert row == report.reductions[7 - rank]
        assert sorted(reduction.stage for reduction in row) == list(schedule.layout.stages_of(rank))
        for reduction in row:
            assert reduction.start_s >= max(ends[rank][reduction.stage], ends[7 - rank][reduction.stage])
    assert report.reductions[0][0].start_s == max(min(ends[0].values()), min(ends[7].values()))


def test_a_transfer_is_given_way_to_as_well() -> None:
    schedule = build(ScheduleConfig("bitpipe", 8, 8, num_chunks=2, balance=named_balance("bpipe")))
    cost = StageCost(6, 12, saved_bytes=1, moved_bytes=1, transfer_s=5, reduction_s=40)
    plain, eager = (simulate(schedule, replace(uniform(16, cost), eager=eager)) for eager in (False, True))
    assert eager.transfers == plain.transfers, "nobody waits for a reduction"
    for rank, row in enumerate(eager.reductions):
        for transfer in row:
            pair = (rank, 7 - rank)
            beside = [
                t for r in pair for t in eager.transfers[r] if t.start_s < transfer.end_s and t.end_s > transfer.start_s
            ]
            assert bool(beside) == (transfer.end_s - transfer.start_s > 40)


def test_with_one_pipe_a_rank_reduces_by_itself() -> None:
    """The last rank of 1F1B is done first: eagerly its reduction is over when the first rank's begins."""
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    costs = uniform(4, StageCost(1, 2, reduction_s=2))
    eager = simulate(schedule, replace(costs, eager=True))
    assert [row[0].end_s for row in eager.reductions] == [35, 33, 31, 29]
    assert eager.makespan_s == simulate(schedule, costs).makespan_s == 35
    assert simulate(schedule, uniform(4, StageCost(1, 2))).reductions == ((),) * 4


def test_a_pipe_without_a_micro_batch_reduces_as_well() -> None:
    """Its gradients are zeros and complete at once, so an eager reduction of them is hidden."""
    costs = uniform(4, StageCost(1, 2, reduction_s=2))
    runs = [simulate(build(ScheduleConfig("chimera", 4, 1)), replace(costs, eager=eager)) for eager in (False, True)]
    assert [run.makespan_s for run in runs] == [12 + 2 + 2, 12 + 2]


COLLECTIVES = CollectiveCost(broadcast_s=1, gather_s=2, reduce_s=3, input_reduce_s=4, input_broadcast_s=5)
ALL_ONE = ShardCost(1, 1, 1, 1)


def times(simulation: Simulation, kind: Kind, microbatch: int) -> list[tuple[Number, Number]]:
    """Return starts and ends by rank."""
    rows = simulation.computations
    return [
        (timed.start_s, timed.end_s)
        for row in rows
        for timed in row
        if (timed.action.kind, timed.action.microbatch) == (kind, microbatch)
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
        arrival_s = over + 5 + latency
        assert times(simulation, Kind.INPUT_BACKWARD, 0) == [
            (over, over + 1),
            (arrival_s, arrival_s + 1),
            (arrival_s, arrival_s + 1),
        ]


def test_collectives_of_a_sort_take_turns() -> None:
    """Statistics take 10 seconds, longer than S0 and S1 are apart, so T1 waits for the second gathering."""
    costs = Costs((StageCost(1, 2),) * 3, shards=(ShardCost(1, 1),), collectives=CollectiveCost(gather_s=10))
    simulation = simulate(sharded(3, 6, ONE), costs)
    begun = [times(simulation, Kind.SHARD_BACKWARD, k)[0][0] for k in range(6)]
    assert all(after - before >= 10 for before, after in pairwise(begun))


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_nobody_has_the_next_before_everybody_has_come_for_the_last(vocabulary: Vocabulary) -> None:
    """A broadcast needs all its receivers, and each prepares for one at a time."""
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
    """In slots as in seconds, and never for more than one micro-batch."""
    p, m = 4, 12
    schedule = sharded(p, m, vocabulary)
    for rank, row in enumerate(schedule.ranks):
        curve, plain = (
            live_bytes(schedule, rank, memory_of([100] * p, shard_bytes=7)),
            live_bytes(schedule, rank, memory_of([100] * p)),
        )
        between = False
        for slot, cell in enumerate(row):
            kind = cell.compute.kind if cell.compute else None
            between = between or kind is Kind.SHARD_FORWARD
            assert curve[slot] - plain[slot] == 7 * between
            between = between and kind is not Kind.SHARD_BACKWARD
    costs = Costs((StageCost(1, 2, saved_bytes=100),) * p, shards=(ShardCost(1, 1, held_bytes=7),))
    simulation = simulate(schedule, costs)
    assert {level.held_bytes % 100 for rank in range(p) for level in simulation.levels(rank)} == {0, 7}


def test_evictions_make_room_for_logits() -> None:
    """Bounds in bytes include logits: a schedule that fits without them must evict more with them."""
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


# The later slice is shorter, and takes longer.
FIRST = StageCost(2, 4, sent_bytes=30, saved_bytes=60, moved_bytes=50)
SECOND = StageCost(3, 6, sent_bytes=10, saved_bytes=20, moved_bytes=15)
KEPT = (KeptMemory(8, 16),) * 2
SLICED = Costs((FIRST, SECOND) * 2, Links(Link(10)), slices=2, kept=KEPT)


def test_each_slice_takes_its_own_seconds_and_its_message_its_own() -> None:
    """Messages take 3 s and 1 s. Rank 1 runs B of the second slice first."""
    report = simulate(build(ScheduleConfig("1f1b", 2, 1, slices=2)), SLICED)
    rows = [[(str(timed.action), timed.start_s, timed.end_s) for timed in row] for row in report.computations]
    assert rows[0] == [("0F0", 0, 2), ("0F1", 2, 5), ("0B1", 17, 23), ("0B0", 23, 27)]
    assert rows[1] == [("1F0", 5, 7), ("1F1", 7, 10), ("1B1", 10, 16), ("1B0", 16, 20)]
    # Gradients of 10 bytes are sent back at 16, and of 30 bytes at 20.
    assert report.pipeline_s == 27


def test_what_is_held_is_by_slice_and_kept_keys_are_held_until_the_first_slices_backward() -> None:
    report = simulate(build(ScheduleConfig("1f1b", 2, 1, slices=2)), SLICED)
    levels = [(level.start_s, level.held_bytes) for level in report.levels(0)]
    # Keys are held from F0 on and their gradients from B1 on, both until the end of B0.
    assert levels == [(0, 68), (2, 88), (17, 104), (23, 84), (27, 0)]


def test_a_schedule_of_slices_takes_costs_of_whole_ones_and_no_other_slices() -> None:
    schedule = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    assert simulate(schedule, uniform(2, StageCost(1, 2))).pipeline_s == 15
    with pytest.raises(ValueError, match="costs of 2 slices for a schedule of 4: give one for each, or one for all"):
        simulate(build(ScheduleConfig("1f1b", 2, 2, slices=4)), SLICED)
    with pytest.raises(ValueError, match="the schedule has 2 stages, the costs 1: give one for each stage"):
        simulate(schedule, replace(SLICED, stages=(FIRST, SECOND)))


def test_a_transfer_lasts_as_its_slice_has_bytes() -> None:
    costs = Costs((FIRST, SECOND) * 4, Links(Link(100)), slices=2, kept=KEPT * 2)
    schedule = build(ScheduleConfig("1f1b", 4, 4, slices=2))
    alone = simulate(schedule, costs)
    room = ActivationBudget((200, 1000, 1000, 1000), costs.memory)
    how = BalanceConfig(activation_budget=room)
    fitted = balanced(schedule, how)
    report = simulate(fitted, costs)
    moves = [transfer for transfer in report.transfers[0] if transfer.action.kind.value == "EVICT"]
    assert moves
    for transfer in moves:
        number = transfer.action.microbatch % 2
        assert transfer.end_s - transfer.start_s >= (0.5, 0.15)[number]
    assert alone.peak_bytes(0) > 200 >= report.peak_bytes(0)
    windows = windows_of(costs, 4)
    assert windows.slices == 2
    assert [windows.transfer_s(1, number, 0, Host(3)) for number in (0, 1, 6, 7)] == [
        Fraction(1, 2),
        Fraction(3, 20),
    ] * 2
    in_time = balanced(schedule, replace(how, windows=windows))
    assert simulate(in_time, costs).exposed_transfer_s <= report.exposed_transfer_s


def test_slices_and_shards_of_the_vocabulary_are_not_predicted_together() -> None:
    """They can be combined, but costs of shards are per whole micro-batch: their table was once read beyond its end."""
    schedule = build(ScheduleConfig("1f1b", 2, 1, slices=2, vocabulary=Vocabulary.ONE))
    with pytest.raises(ValueError, match=r"costs of 2 slices together with shards of the vocabulary: .* leave"):
        simulate(schedule, replace(SLICED, shards=(ShardCost(1, 1),)))
