"""What trains other bits than Megatron's own schedules is a sound schedule, and refused for training."""

from __future__ import annotations

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.schedule.check.case import ScheduleError
from bpipe.schedule.check.rules import check, check_microbatch_order
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.text import read_csv

# Each is sound; in each one pass of one stage takes micro-batch 1 before 0.
FORWARDS = """\
0F1,0F0,,,0B0,,0B1
,1F1,1F0,1B0,,1B1,
"""
BACKWARDS = """\
0F0,0F1,,,0B1,,0B0
,1F0,1F1,1B1,,1B0,
"""
INPUTS = """\
0F0,0F1,,,0I1,0I0,0W0,0W1
,1F0,1F1,1I1,1I0,1W0,1W1,
"""
WEIGHTS = """\
0F0,0F1,,,0B0,0B1,
,1F0,1F1,1I0,1I1,1W1,1W0
"""
MIXED = """\
0F0,0F1,,,0B0,0B1,
,1F0,1F1,1I0,1B1,1W0,
"""


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (FORWARDS, r"rank 0, slot 1, 0F0: comes after 0F1"),
        (BACKWARDS, r"rank 0, slot 6, 0B0: comes after 0B1"),
        (INPUTS, r"rank 0, slot 5, 0I0: comes after 0I1"),
        (WEIGHTS, r"rank 1, slot 6, 1W0: comes after 1W1"),
        (MIXED, r"rank 1, slot 5, 1W0: comes after 1B1"),
    ],
    ids=["forwards", "backwards", "inputs", "weights", "whole and in halves"],
)
def test_a_pass_out_of_order_is_sound_and_refused_for_training(text: str, place: str) -> None:
    schedule = read_csv(text)
    check(schedule)
    with pytest.raises(
        ScheduleError, match=f"order of micro-batches: {place}, but Megatron's own schedules compute"
    ) as refused:
        check_microbatch_order(schedule)
    assert "[" in str(refused.value), "the grid shows the spot"


FAMILY_SIZES = [(name, 4, m, max(family.min_chunks, 1)) for name, family in FAMILIES.items() for m in (4, 7, 8)]


@pytest.mark.parametrize(("name", "p", "m", "v"), FAMILY_SIZES)
def test_every_family_takes_micro_batches_in_order(name: str, p: int, m: int, v: int) -> None:
    check_microbatch_order(build(ScheduleConfig(name, p, m, num_chunks=v)))
