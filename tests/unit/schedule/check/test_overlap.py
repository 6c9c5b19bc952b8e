"""A forward and a backward in one slot, as in torch's DualPipeV: files, rules, memory, time and pictures."""

from dataclasses import replace
from io import BytesIO, TextIOWrapper

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import adopt
from bpipe.cli import main
from bpipe.draw.picture import lay_out, render_svg
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import blocked_ranks
from bpipe.schedule.check.rules import ScheduleError, check
from bpipe.schedule.families.unit_grid import align
from bpipe.schedule.files.document import read, read_json, write_json
from bpipe.schedule.files.grid import write_grid
from bpipe.schedule.files.text import TextError, read_csv, write_csv
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.memory import live_bytes, live_counts, memory_of, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Slot
from tests.support.hand_made import PLANNED_WAITS

# What torch 2.15 prints for ScheduleDualPipeV with 2 ranks and 4 micro-batches: orders, not yet a grid.
TORCH = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""
GRID = """\
# bpipe schedule=dualpipev microbatches=4 stage_to_rank=0,1,1,0
slot       0   1   2   3   4   5   6       7       8       9      10  11  12  13  14  15
rank 0 C 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0     3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
rank 1 C   . 1F0 2F0 1F1 2F1 1F2 2B0 2F2&1B0 1F3&2B1 2F3&1B1     2B2 1B2 2I3 1I3 2W3 1W3
"""
OVERLAPPED = align(read_csv(TORCH, "dualpipev"))
PAIR = Slot(Action(0, Kind.FORWARD, 3), (), Action(3, Kind.BACKWARD, 1))


def test_it_goes_both_ways_in_every_format() -> None:
    assert OVERLAPPED.ranks[0][7] == PAIR
    assert read_csv(write_csv(read_csv(TORCH))) == read_csv(TORCH)
    assert write_csv(read_csv(TORCH)).replace(",\n", "\n") == TORCH
    assert write_grid(OVERLAPPED) == GRID
    assert read_json(write_json(OVERLAPPED)) == OVERLAPPED
    assert '{"compute": "(0F3;3B1)OVERLAP_F_B", "transfers": []}' in write_json(OVERLAPPED)
    assert read(write_json(OVERLAPPED)) == OVERLAPPED


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


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (Slot(PAIR.overlapped, (), PAIR.compute), "3B1 and 0F3 cannot overlap"),
        (Slot(PAIR.compute), "stage 3 has no B or I of micro-batch 1"),
        (Slot(PAIR.compute, (), Action(3, Kind.BACKWARD, 0)), "3B0: already computed in slot 4"),
        (Slot(PAIR.compute, (), Action(3, Kind.BACKWARD, 9)), "micro-batches 0 to 3"),
        (Slot(PAIR.compute, (), Action(2, Kind.BACKWARD, 1)), "stage 2 belongs to rank 1"),
    ],
)
def test_the_checker_sees_both(cell: Slot, reason: str) -> None:
    check(OVERLAPPED)
    rows = [list(row) for row in OVERLAPPED.ranks]
    rows[0][7] = cell
    with pytest.raises(ScheduleError, match=reason) as raised:
        check(replace(OVERLAPPED, ranks=tuple(map(tuple, rows))))
    assert raised.value.rule == "each computation once"


def test_neither_may_need_what_the_slot_itself_makes() -> None:
    """Both inputs exist before the pair begins, both outputs only after it, as torch's runtime sends them."""
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
    # torch's analyze_pipeline_activation_liveness says the same of this schedule (test_files.py).
    assert peak_counts(OVERLAPPED) == (5, 5)


def test_align_moves_the_pair_as_one() -> None:
    """It waits for the later of its two inputs."""
    schedule = align(read_csv("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n"))
    assert write_csv(schedule) == "0F0,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1,\n"
    with pytest.raises(ValueError, match="wait for each other: rank 0 at 0F1 with 0B0"):
        align(read_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n"))


def test_it_cannot_deadlock() -> None:
    single = read_csv("0F0,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1,\n")
    for schedule in (OVERLAPPED, single):
        for waits in PLANNED_WAITS:
            assert blocked_ranks(schedule, waits) == ()


def test_the_drawing_has_both() -> None:
    texts = "0F0,0F1,0B0,0B1\n", "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    plain, overlapped = (render_svg(lay_out(read_csv(text))) for text in texts)
    for word in ("F1", "B0"):
        assert f">{word}<" in overlapped
    assert overlapped.count("<polygon") == plain.count("<polygon")


@pytest.mark.parametrize("hosts", ["host", "all"])
def test_balancing_keeps_pairs_together_and_counts_both_of_one(hosts: str) -> None:
    """What is evicted during a pair is held until the pair ends, and what is loaded during one from its start."""
    balanced = adopt(OVERLAPPED, BalanceConfig(hosts=hosts))
    assert peak_counts(OVERLAPPED) == (5, 5)
    assert peak_counts(balanced) == (4, 4)
    for before, after in zip(OVERLAPPED.ranks, balanced.ranks, strict=True):
        assert [slot.computations for slot in before] == [slot.computations for slot in after]
    assert any(slot.overlapped and slot.transfers for row in balanced.ranks for slot in row)
    for exchange in (Exchange.POSTED, Exchange.TORCH):
        check(balanced, exchange)


def test_a_loop_of_one_stage_a_rank_knows_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"0F3 and 3B1 overlap, but the exchange megatron-1f1b handles one"):
        lower(OVERLAPPED, Exchange.MEGATRON_1F1B)


def test_the_command_reads_torchs_file(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(TORCH.encode())))
    assert main(["schedule", "--input", "-", "--align", "--format", "csv"]) == 0
    assert capfd.readouterr().out.replace(",\n", "\n").replace("\n,1F0", "\n1F0") == TORCH
