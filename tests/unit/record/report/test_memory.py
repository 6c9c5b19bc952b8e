"""Peaks and bounds in bytes, as the run counts them, against sums that a person can check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.memory import (
    RankSizes,
    own_peak,
    peak_of_rule,
    rank_peaks,
    rule_by_slice,
    whole_peaks,
    without_transfers,
)
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.memory import StageMemory

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
BALANCED = build(ScheduleConfig("1f1b", 8, 16, balance=BalanceConfig()))


def test_an_evictor_holds_its_bound_what_stays_behind_and_the_last_input() -> None:
    """Stage 0 holds 5 micro-batches of 100, 40 of each of the 3 that are away, and 7 of the input that Megatron's
    loop still refers to."""
    assert own_peak(BALANCED, 0, {0: 100}, {0: 60}, 7, {}) == 5 * 100 + 3 * 40 + 7
    assert rank_peaks(BALANCED, 0, RankSizes({0: 100}, {0: 60}, 7, 0)).num_bytes == 627


SPLIT = place("split", 2, one_pipe((0,)), [[Action(0, kind, k) for kind in (FORWARD, INPUT, WEIGHT) for k in range(2)]])


def test_between_halves_a_rank_holds_what_the_second_one_needs() -> None:
    """Two micro-batches saved 100 each, and of each W needs 130."""
    assert own_peak(SPLIT, 0, {0: 100}, {}, 7, {0: 30}) == 200
    assert own_peak(SPLIT, 0, {0: 100}, {}, 7, {0: 130}) == 260
    assert rank_peaks(SPLIT, 0, RankSizes({0: 100}, {}, 0, 0, {0: 130})).num_bytes == 260
    assert rank_peaks(SPLIT, 0, RankSizes({0: 100}, {}, 0, 0)).num_bytes == 200
    assert whole_peaks(SPLIT, {0: 100}, {0: 130}) == (260,)
    assert whole_peaks(SPLIT, {0: 100}, {}) == (200,)


def test_an_acceptor_holds_its_host_buffers_throughout() -> None:
    assert num_host_buffers(BALANCED, 7) == 4
    peaks = rank_peaks(BALANCED, 7, RankSizes({7: 100}, {}, 7, 4 * 60))
    assert (peaks.microbatches, peaks.num_bytes, peaks.bound_bytes) == (5, 100 + 7 + 4 * 60, 100 + 7 + 4 * 60)


def test_a_bound_that_is_not_reached_lies_above_the_peak() -> None:
    peaks = rank_peaks(BALANCED, 4, RankSizes({4: 100}, {}, 0, 0))
    assert (peaks.microbatches, peaks.num_bytes, peaks.bound_microbatches, peaks.bound_bytes) == (4, 400, 5, 500)


def test_without_sizes_there_are_counts_only() -> None:
    peaks = rank_peaks(BALANCED, 0, None)
    assert (peaks.microbatches, peaks.num_bytes, peaks.bound_microbatches, peaks.bound_bytes) == (5, None, 5, None)


@pytest.mark.parametrize("config", [("1f1b", 8, 16, 1), ("interleaved-1f1b", 4, 8, 2), ("gpipe", 4, 8, 1)])
def test_without_transfers_a_program_is_the_one_that_is_not_balanced(config: tuple[str, int, int, int]) -> None:
    name, p, m, v = config
    plain = ScheduleConfig(name, p, m, num_chunks=v)
    assert without_transfers(build(replace(plain, balance=BalanceConfig()))) == build(plain)


def test_whole_peaks_need_every_size() -> None:
    assert whole_peaks(BALANCED, dict.fromkeys(range(8), 10), {}) == (50, 50, 50, 50, 40, 50, 50, 50)
    assert whole_peaks(BALANCED, dict.fromkeys(range(7), 10), {}) is None


def test_slices_that_differ_in_size_are_each_counted_as_it_is() -> None:
    """Slices of 1 and 10 bytes: taken for the largest, a rank that holds two of each was said to hold 40 bytes, where
    22 were measured."""
    schedule = build(ScheduleConfig("gpipe", 2, 2, slices=2))
    saved = {(0, number): 10 if number % 2 else 1 for number in range(4)}
    assert peak_of_rule(schedule, 0, rule_by_slice(schedule, saved, {}, {}), 0) == 22
    assert own_peak(schedule, 0, {0: 10}, {}, 0, {}) == 40
    # Halves: what W needs of the last slices, while the first ones wait for their I.
    split = build(ScheduleConfig("zb-h1", 2, 2, slices=2))
    after = dict.fromkeys(saved, 3)
    rule = rule_by_slice(split, saved, {}, after)
    assert rule.stages[:2] == (StageMemory(1, 0, 3), StageMemory(10, 0, 3))
    assert rule.stages[2:] == (StageMemory(0, 0, 0),) * 2
