"""Slices in the event simulation: seconds, messages, transfers and bytes of each, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.memory import KeptMemory
from bpipe.simulate.cost import Costs, Link, Links, ShardCost, StageCost, uniform
from bpipe.simulate.engine import simulate

# The later slice is shorter, and takes longer.
FIRST = StageCost(2, 4, sent_bytes=30, saved_bytes=60, moved_bytes=50)
SECOND = StageCost(3, 6, sent_bytes=10, saved_bytes=20, moved_bytes=15)
KEPT = (KeptMemory(8, 16),) * 2
TWO = Costs((FIRST, SECOND) * 2, Links(Link(10)), slices=2, kept=KEPT)


def test_a_schedule_of_slices_takes_costs_of_whole_ones_and_no_other_slices() -> None:
    schedule = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    assert simulate(schedule, uniform(2, StageCost(1, 2))).pipeline_s == 15
    with pytest.raises(ValueError, match="costs of 2 slices for a schedule of 4: give one for each, or one for all"):
        simulate(build(ScheduleConfig("1f1b", 2, 2, slices=4)), TWO)
    with pytest.raises(ValueError, match="costs of 1 stages for a schedule of 2: give one for each stage"):
        simulate(schedule, replace(TWO, stages=(FIRST, SECOND)))


def test_slices_and_shards_of_the_vocabulary_are_not_predicted_together() -> None:
    """They train together. Costs of shards are of whole micro-batches: a table of them was read beyond its end."""
    schedule = build(ScheduleConfig("1f1b", 2, 1, slices=2, vocabulary=Vocabulary.ONE))
    with pytest.raises(
        ValueError, match=r"costs of 2 slices together with shards of the vocabulary: .* leave the slices out"
    ):
        simulate(schedule, replace(TWO, shards=(ShardCost(1, 1),)))
