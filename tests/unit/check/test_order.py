"""What trains other bits than Megatron's own schedules is a sound schedule, and refused for training."""

from __future__ import annotations

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.check.case import ScheduleError
from bpipe.check.order import check_microbatch_order
from bpipe.check.rules import check
from bpipe.formats.grid import read_grid
from bpipe.generate.families import FAMILIES
from bpipe.ir.schedule import Schedule
from tests.support.hand_made import v_flat

# Each is sound; in each one pass of one stage takes micro-batch 1 before 0.
FORWARDS = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1
slot      0  1  2  3  4  5  6
rank 0 C F1 F0  .  . B0  . B1
rank 1 C  . F1 F0 B0  . B1  .
"""
BACKWARDS = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1
slot      0  1  2  3  4  5  6
rank 0 C F0 F1  .  . B1  . B0
rank 1 C  . F0 F1 B1  . B0  .
"""
INPUTS = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1
slot      0  1  2  3  4  5  6  7
rank 0 C F0 F1  .  . I1 I0 W0 W1
rank 1 C  . F0 F1 I1 I0 W0 W1  .
"""
WEIGHTS = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1
slot      0  1  2  3  4  5  6
rank 0 C F0 F1  .  . B0 B1  .
rank 1 C  . F0 F1 I0 I1 W1 W0
"""
MIXED = """\
# bpipe schedule=hand-made microbatches=2 stage_to_rank=0,1
slot      0  1  2  3  4  5  6
rank 0 C F0 F1  .  . B0 B1  .
rank 1 C  . F0 F1 I0 B1 W0  .
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
    schedule = read_grid(text)
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


@pytest.mark.parametrize(
    "schedule",
    [
        build(ScheduleConfig("v-half", 4, 8, num_chunks=2)),
        build(ScheduleConfig("v-min", 4, 8, num_chunks=2)),
        v_flat(3, 5),
        build(ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig())),
    ],
    ids=["v-half", "v-min", "v-flat", "balanced"],
)
def test_so_do_the_hand_made_ones(schedule: Schedule) -> None:
    check_microbatch_order(schedule)
