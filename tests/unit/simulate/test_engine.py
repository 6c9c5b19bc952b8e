"""The event simulation: exact times by hand, against the unit grid, and what transfers, ports and exchanges add."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.families import FAMILIES, exchange_of
from bpipe.schedule.hosts import ARRANGEMENTS
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import live_counts, peak_bytes
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost, uniform
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation, Timed
from tests.support.late_loads import with_late_loads

EXCHANGES = [Exchange.POSTED, Exchange.MEGATRON_1F1B]
UNIT = StageCost(1, 1, moved_bytes=1, saved_bytes=1)


def schedules() -> Iterator[Schedule]:
    for balance in ("none", "bpipe"):
        yield build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance)))
        yield build(ScheduleConfig("1f1b", 8, 20, balance=named_balance(balance)))
        yield build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=named_balance(balance)))
    yield build(ScheduleConfig("gpipe", 4, 6))


def grids() -> Iterator[Schedule]:
    """Schedules whose slots are as long as their computations, also those that only our own loop runs."""
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
    [one for one in schedules() if one.partners],
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
    assert report.bubble_of_span == 1 - Fraction(32, 43)


def test_a_blocking_exchange_keeps_the_sender() -> None:
    schedule = build(ScheduleConfig("1f1b", 2, 2))
    costs = Costs((StageCost(3, 5, sent_bytes=2),) * 2, Links(Link(2, 1)), exchange=Exchange.MEGATRON_1F1B)
    report = simulate(schedule, costs)
    # Rank 0 sends F0 from 3 to 5 before it computes F1; then it is there for both, the output of F1 and the gradient of
    # B0, at 8; rank 1 is there for them at 13.
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
    """Stage 5, on another node, sends its last gradient longer than stage 0 takes to request micro-batch 10."""
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


def test_what_a_transfer_costs_beyond_its_slot_is_exposed() -> None:
    """With three units per forward and backward a transfer of 3 hides; one of 5 costs the evictor 2 each time."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    hidden, exposed = (simulate(schedule, uniform(4, StageCost(3, 3, transfer_s=seconds))) for seconds in (3, 5))
    assert hidden.exposed_transfer_s == 0
    assert exposed.exposed_s[0] > 0 == exposed.exposed_s[3]
    assert exposed.makespan_s > hidden.makespan_s


def test_messages_and_transfers_share_a_port() -> None:
    """Rank 0 sends outputs to rank 1 and evictions to rank 3 through one port, unless only one is in its node."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    sized = StageCost(6, 6, moved_bytes=6, saved_bytes=6, sent_bytes=1)
    shared = simulate(schedule, uniform(4, sized, Links(Link(1))))
    apart = simulate(schedule, uniform(4, sized, Links(Link(1), Link(1), (0, 0, 1, 1))))
    # F1's output is ready at 12, and so is the eviction beside F2: the output goes first. F2's is ready at 18, and the
    # eviction pauses.
    assert (when(shared, 0, "0EVICT1").start_s, when(shared, 0, "0EVICT1").end_s) == (13, 20)
    assert (when(apart, 0, "0EVICT1").start_s, when(apart, 0, "0EVICT1").end_s) == (12, 18)


def test_a_slow_partner_is_waited_for() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    costs = Costs((StageCost(1, 1, transfer_s=1),) * 3 + (StageCost(10, 10, transfer_s=1),))
    report = simulate(schedule, costs)
    evict, host = when(report, 0, "0EVICT1"), when(report, 3, "0HOST1")
    assert (evict.start_s, evict.end_s) == (host.start_s, host.end_s)


def test_a_one_sided_transfer_waits_for_no_partner() -> None:
    """The last stage computes long when the first one evicts."""
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
    # What is fetched back has been put there, also where the putting takes longer than everything between.
    slow = simulate(schedule, Costs((replace(stages[0], transfer_s=50), *stages[1:]), one_sided=frozenset({0})))
    assert when(slow, 0, "0LOAD1").start_s >= when(slow, 0, "0EVICT1").end_s


@pytest.mark.parametrize("one_sided", [frozenset[int](), frozenset({0})])
def test_synchronous_transfers_hold_up_the_evictor_for_as_long_as_they_take(one_sided: frozenset[int]) -> None:
    """Stage 0 of 4, 8 micro-batches: three evictions and three loads, nothing of them hidden."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))
    costs = uniform(4, StageCost(10, 20, transfer_s=7))
    hidden, report = (simulate(schedule, replace(costs, one_sided=one_sided, synchronous=how)) for how in (False, True))
    assert hidden.exposed_s[0] == 0
    assert report.exposed_s[0] >= 6 * 7
    assert report.exposed_s[0] == 6 * 7 or not one_sided
    for timed in report.transfers[0]:
        overlapping = [one for one in report.computations[0] if one.start_s < timed.end_s and timed.start_s < one.end_s]
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
