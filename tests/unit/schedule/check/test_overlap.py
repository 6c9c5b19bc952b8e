"""A forward and a backward in one place of the grid, as torch's DualPipeV has them: read, written, checked, counted,
timed and drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import adopt
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.case import ScheduleError
from bpipe.schedule.check.rules import check
from bpipe.schedule.files.text import TextError, read_csv
from bpipe.schedule.lowering.align import align
from bpipe.schedule.memory import live_bytes, live_counts, memory_of, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

# What torch 2.15 prints for ScheduleDualPipeV with 2 ranks and 4 micro-batches: orders, not yet a grid.
TORCH = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""
OVERLAPPED = align(read_csv(TORCH, "dualpipev"))
PAIR = Slot(Action(0, Kind.FORWARD, 3), (), Action(3, Kind.BACKWARD, 1))


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("(0B0;0F1)OVERLAP_F_B", "overlaps something other than a forward and a backward, in this order"),
        ("(0F1;0F2)OVERLAP_F_B", "overlaps something other than a forward and a backward"),
        ("(0F1;0W0)OVERLAP_F_B", "overlaps something other than a forward and a backward"),
        ("(0F1)OVERLAP_F_B", "is not an action"),
        ("(0F1;0B0;0F2)OVERLAP_F_B", "is not an action"),
        ("(0F1; 0B0)OVERLAP_F_B", "is not an action"),
        ("(0F1;0B0)OVERLAP", "is not an action"),
        ("(0F1;)OVERLAP_F_B", "is not an action"),
        ("((0F1;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B", "is not an action"),
        ("0F0 (0F1;0B0)OVERLAP_F_B", "0F1 is a second computation or comes after a transfer"),
        ("OVERLAP_F_B", "is not an action"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(cell: str, reason: str) -> None:
    with pytest.raises(TextError, match=f"line 1, cell 2: .*{reason}"):
        read_csv(f"0F0,{cell},0B1\n")


def changed(rank: int, slot: int, cell: Slot) -> Schedule:
    rows = [list(row) for row in OVERLAPPED.ranks]
    rows[rank][slot] = cell
    return replace(OVERLAPPED, ranks=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("schedule", "rule", "reason"),
    [
        (changed(0, 7, Slot(PAIR.overlapped, (), PAIR.compute)), "each computation once", "3B1 and 0F3 cannot overlap"),
        (changed(0, 7, Slot(PAIR.compute)), "each computation once", "stage 3 has no B or I of micro-batch 1"),
        (
            changed(0, 7, Slot(PAIR.compute, (), Action(3, Kind.BACKWARD, 0))),
            "each computation once",
            "3B0: already computed in slot 4",
        ),
        (
            changed(0, 7, Slot(PAIR.compute, (), Action(3, Kind.BACKWARD, 9))),
            "each computation once",
            "micro-batches 0 to 3",
        ),
        (
            changed(0, 7, Slot(PAIR.compute, (), Action(2, Kind.BACKWARD, 1))),
            "each computation once",
            "stage 2 belongs to rank 1",
        ),
    ],
)
def test_the_checker_sees_both(schedule: Schedule, rule: str, reason: str) -> None:
    check(OVERLAPPED)
    with pytest.raises(ScheduleError, match=reason) as raised:
        check(schedule)
    assert raised.value.rule == rule


def test_neither_may_need_what_the_slot_itself_makes() -> None:
    """Both inputs are there before the pair begins, both outputs only when it is over: as torch's runtime sends
    them."""
    ahead = read_csv("0F0,,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    with pytest.raises(ScheduleError, match="rank 1, slot 2, 1F1: needs 0F1, which rank 0 computes in slot 2"):
        check(ahead)
    late = read_csv("0F0,,0F1,0B0,0B1\n,1F0,,(1F1;1B0)OVERLAP_F_B,1B1\n")
    with pytest.raises(ScheduleError, match="rank 0, slot 3, 0B0: needs 1B0, which rank 1 computes in slot 3"):
        check(late)
    check(read_csv("0F0,0F1,,,0B0,0B1\n,1F0,,(1F1;1B0)OVERLAP_F_B,1B1\n"))


def test_a_pair_holds_both_until_it_is_over() -> None:
    schedule = read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert live_counts(schedule, 0) == (1, 2, 1)
    assert live_bytes(schedule, 0, memory_of((10,))) == (10, 20, 10)
    halves = read_csv("0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1\n")
    check(halves)
    assert live_counts(halves, 0) == (1, 2, 2, 1)
    # torch's analyze_pipeline_activation_liveness says the same of this schedule (test_torch_schedules).
    assert peak_counts(OVERLAPPED) == (5, 5)


@pytest.mark.parametrize("hosts", ["host", "all"])
def test_balancing_keeps_pairs_together_and_counts_both_of_one(hosts: str) -> None:
    """What leaves beside a pair is there until both are over, and what comes before one when they begin."""
    balanced = adopt(OVERLAPPED, BalanceConfig(hosts=hosts))
    assert peak_counts(OVERLAPPED) == (5, 5)
    assert peak_counts(balanced) == (4, 4)
    for before, after in zip(OVERLAPPED.ranks, balanced.ranks, strict=True):
        assert [slot.computations for slot in before] == [slot.computations for slot in after]
    assert any(slot.overlapped and slot.transfers for row in balanced.ranks for slot in row)
    for exchange in (Exchange.POSTED, Exchange.TORCH):
        check(balanced, exchange)
