"""What a first iteration says of slices: by place, and beside it what is kept."""

from __future__ import annotations

from fractions import Fraction

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.memory import KeptMemory
from megatron.scheduling.loop.measurements import (
    FirstMeasured,
    kept_at_peak,
    latest_by_place,
    most_by_place,
    moved_by_place,
)
from megatron.scheduling.replanning import ProcessMemory, devices_of

# Two slices; what the first micro-batch saves is taken to have 5 more of what all share.
EACH = {(0, 0): 65, (0, 1): 45, (0, 2): 60, (0, 3): 40}


def test_sizes_are_those_of_the_last_of_each_slice_or_of_the_most() -> None:
    assert latest_by_place(EACH, 2) == {0: 60, 1: 40}
    assert most_by_place(EACH, 2) == {0: 65, 1: 45}
    assert latest_by_place({(1, 3): 7}, 1) == {1: 7}
    assert latest_by_place({(1, 3): 7}, 2) == {3: 7}


def test_what_of_a_slice_moves_is_known_or_as_of_another_of_its_stage() -> None:
    saved = {0: 60, 1: 40, 2: 60, 3: 40}
    assert moved_by_place({0: 50}, {}, saved, 2, differing=False) == {0: 50, 1: 50}
    # Of the second slice nothing left, or it stayed: 48 of 60 are four fifths.
    assert moved_by_place({0: 48}, {(0, 2): 48, (0, 3): 0}, saved, 2, differing=True) == {0: 48, 1: 32}
    assert moved_by_place({}, {}, saved, 2, differing=True) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_kept_keys_when_most_is_held(rank: int) -> None:
    """Rank 0 holds three slices of two micro-batches in the first B. On rank 1 the next micro-batch's first slice comes
    while the other's keys and sums are still there."""
    schedule = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    kept = {stage: KeptMemory(20, 40) for stage in range(2)}
    assert kept_at_peak(schedule, rank, {0: 60, 1: 59, 2: 60, 3: 59}, kept) == 2 * 20 + 40


def test_all_plan_with_sizes_by_slice_and_what_is_kept() -> None:
    plain = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    found = []
    for place in (0, 1):
        saved = {2 * place: 60, 2 * place + 1: 40}
        kept = {place: KeptMemory(20 + place, 40)}
        measured = FirstMeasured(saved, {0: 50} if place == 0 else {}, {place: 30}, 0, 0, 0, 0, 0, kept=kept)
        found.append(ProcessMemory(place, measured, 1000, 0, 0, Fraction(0)))
    memory = devices_of(found, plain, (5000, 5000)).memory
    assert (memory.slices, memory.kept) == (2, (KeptMemory(20, 40), KeptMemory(21, 40)))
    assert [(one.saved_bytes, one.moved_bytes, one.after_input_bytes) for one in memory.stages] == [
        *((60, 50, 30), (40, 40, 30)),
        *((60, 60, 30), (40, 40, 30)),
    ]
    assert devices_of(found, plain, (5000, 5000)).parts == ((50,), (60,))
