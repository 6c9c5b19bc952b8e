"""Slices in the event simulation: seconds, messages, transfers and bytes of each, by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from bpipe.balance.budget import ActivationBudget
from bpipe.balance.config import BalanceConfig, balanced
from bpipe.build import ScheduleConfig, build
from bpipe.plan.budget import windows_of
from bpipe.schedule.hosts import Host
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import KeptMemory
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost, uniform
from bpipe.simulate.engine import simulate

# The later slice is shorter, and takes longer.
FIRST = StageCost(2, 4, sent_bytes=30, saved_bytes=60, moved_bytes=50)
SECOND = StageCost(3, 6, sent_bytes=10, saved_bytes=20, moved_bytes=15)
KEPT = (KeptMemory(8, 16),) * 2
TWO = Costs((FIRST, SECOND) * 2, Links(Link(10)), slices=2, kept=KEPT)


def test_each_slice_takes_its_own_seconds_and_its_message_its_own() -> None:
    """Messages of 3 s and 1 s. Rank 1 has B of the second slice first."""
    found = simulate(build(ScheduleConfig("1f1b", 2, 1, slices=2)), TWO)
    rows = [[(str(one.action), one.start_s, one.end_s) for one in row] for row in found.computations]
    assert rows[0] == [("0F0", 0, 2), ("0F1", 2, 5), ("0B1", 17, 23), ("0B0", 23, 27)]
    assert rows[1] == [("1F0", 5, 7), ("1F1", 7, 10), ("1B1", 10, 16), ("1B0", 16, 20)]
    # Back come 10 bytes at 16, and 30 at 20.
    assert found.pipeline_s == 27


def test_what_is_held_is_by_slice_and_kept_keys_are_held_until_the_first_slices_backward() -> None:
    found = simulate(build(ScheduleConfig("1f1b", 2, 1, slices=2)), TWO)
    levels = [(level.start_s, level.held_bytes) for level in found.levels(0)]
    # Keys with F0, sums with B1; both go with B0.
    assert levels == [(0, 68), (2, 88), (17, 104), (23, 84), (27, 0)]


def test_a_schedule_of_slices_takes_costs_of_whole_ones_and_no_other_slices() -> None:
    schedule = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    assert simulate(schedule, uniform(2, StageCost(1, 2))).pipeline_s == 15
    with pytest.raises(ValueError, match="costs of 2 slices for a schedule of 4: give one for each, or one for all"):
        simulate(build(ScheduleConfig("1f1b", 2, 2, slices=4)), TWO)
    with pytest.raises(ValueError, match="the schedule has 2 stages, the costs 1: give one for each stage"):
        simulate(schedule, replace(TWO, stages=(FIRST, SECOND)))


def test_a_transfer_lasts_as_its_slice_has_bytes() -> None:
    costs = Costs((FIRST, SECOND) * 4, Links(Link(100)), slices=2, kept=KEPT * 2)
    schedule = build(ScheduleConfig("1f1b", 4, 4, slices=2))
    alone = simulate(schedule, costs)
    room = ActivationBudget((200, 1000, 1000, 1000), costs.memory)
    how = BalanceConfig(activation_budget=room)
    fitted = balanced(schedule, how)
    found = simulate(fitted, costs)
    moves = [one for one in found.transfers[0] if one.action.kind.value == "EVICT"]
    assert moves
    for one in moves:
        number = one.action.microbatch % 2
        assert one.end_s - one.start_s >= (0.5, 0.15)[number]
    assert alone.peak_bytes(0) > 200 >= found.peak_bytes(0)
    windows = windows_of(costs, 4)
    assert windows.slices == 2
    assert [windows.transfer_s(1, number, 0, Host(3)) for number in (0, 1, 6, 7)] == [
        Fraction(1, 2),
        Fraction(3, 20),
    ] * 2
    in_time = balanced(schedule, replace(how, windows=windows))
    assert simulate(in_time, costs).exposed_transfer_s <= found.exposed_transfer_s


def test_slices_and_shards_of_the_vocabulary_are_not_predicted_together() -> None:
    """They train together. Costs of shards are of whole micro-batches: a table of them was read beyond its end."""
    schedule = build(ScheduleConfig("1f1b", 2, 1, slices=2, vocabulary=Vocabulary.ONE))
    with pytest.raises(ValueError, match=r"costs of 2 slices together with shards of the vocabulary: .* leave"):
        simulate(schedule, replace(TWO, shards=(ShardCost(1, 1),)))
