"""Peaks and bounds in bytes, as the run counts them, against sums that a person can check."""

from __future__ import annotations

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.memory import own_peak, peak_of_rule, rule_by_slice, whole_peaks
from bpipe.schedule.memory import StageMemory

BALANCED = build(ScheduleConfig("1f1b", 8, 16, balance=BalanceConfig()))


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
