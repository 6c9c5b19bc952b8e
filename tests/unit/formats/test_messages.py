"""Torch's runtime form: every message is held to what the computations make necessary, then dropped."""

from __future__ import annotations

import random

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.check.rules import check
from bpipe.cli import main
from bpipe.formats.messages import has_messages, read_runtime, write_runtime
from bpipe.formats.read import read
from bpipe.formats.text import TextError, read_csv
from bpipe.lower.align import align
from tests.unit.check.test_overlap import OVERLAPPED

# Two ranks in V shape: stages 0 and 3 on rank 0. Torch's own, with ScheduleDualPipeV(p=2, m=4).
TORCH = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,3SEND_B0,3W0,3F1,3RECV_F2,0RECV_B0,\
(0F3;3B1)OVERLAP_F_B,0SEND_F3,3SEND_B1,(3F2;0B0)OVERLAP_F_B,0WAIT_SEND_F0,3RECV_F3,0RECV_B1,3B2,3SEND_B2,(3F3;0B1)OVERLAP_F_B,\
0WAIT_SEND_F1,0RECV_B2,3B3,3SEND_B3,3REDUCE_GRAD,0RECV_B3,3WAIT_REDUCE_GRAD,3RESHARD,0I2,0WAIT_SEND_F2,0W2,0I3,0WAIT_SEND_F3,0W3,\
0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD,3WAIT_SEND_B0,3WAIT_SEND_B1,3WAIT_SEND_B2,3WAIT_SEND_B3
1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1RECV_F2,1F1,2F1,2SEND_F1,2RECV_B0,1F2,2B0,2WAIT_SEND_F0,(2F2;1B0)OVERLAP_F_B,\
2SEND_F2,1SEND_B0,1RECV_F3,2RECV_B1,(1F3;2B1)OVERLAP_F_B,2WAIT_SEND_F1,(2F3;1B1)OVERLAP_F_B,2SEND_F3,1SEND_B1,2RECV_B2,2B2,\
2WAIT_SEND_F2,1B2,1SEND_B2,2RECV_B3,2I3,2WAIT_SEND_F3,1I3,1SEND_B3,2W3,2REDUCE_GRAD,2WAIT_REDUCE_GRAD,2RESHARD,1W3,1REDUCE_GRAD,\
1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0,1WAIT_SEND_B1,1WAIT_SEND_B2,1WAIT_SEND_B3
"""
ROWS = [line.split(",") for line in TORCH.splitlines()]
SMALL = """\
0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1
1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1
"""
CELLS = [(rank, index) for rank, row in enumerate(ROWS) for index, cell in enumerate(row) if has_messages(cell)]


def text_of(rows: list[list[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)


def test_messages_are_dropped() -> None:
    assert has_messages(TORCH)
    assert align(read_runtime(TORCH, "dualpipev")) == OVERLAPPED
    assert read(TORCH).ranks == OVERLAPPED.ranks
    check(align(read_runtime(SMALL)))
    assert align(read_runtime(write_runtime(OVERLAPPED), "dualpipev")) == OVERLAPPED
    for config in (
        ScheduleConfig("1f1b", 4, 6),
        ScheduleConfig("interleaved-1f1b", 3, 6, num_chunks=2),
        ScheduleConfig("gpipe", 1, 2),
    ):
        schedule = build(config)
        assert align(read_runtime(write_runtime(schedule), config.schedule)) == schedule


@pytest.mark.parametrize(("rank", "index"), CELLS)
def test_no_operation_may_be_missing_or_doubled(rank: int, index: int) -> None:
    """One by one: every message, wait, gathering and reduction of torch's own file."""
    for change in ([], [ROWS[rank][index]] * 2):
        rows = [list(row) for row in ROWS]
        rows[rank][index : index + 1] = change
        with pytest.raises(TextError, match=r"line [12], cell [0-9]+: |is missing$"):
            read_runtime(text_of(rows))


def test_a_message_moved_past_its_computation_is_refused() -> None:
    """Sends up before what they send, receives and waits down behind what needs them: each by its own computation."""
    moved = 0
    for rank, index in CELLS:
        cell = ROWS[rank][index]
        if "SHARD" in cell or "GRAD" in cell:
            continue
        row = list(ROWS[rank])
        row.insert(0 if "SEND" in cell else len(row), row.pop(index))
        with pytest.raises(TextError, match=f"line {rank + 1}, cell "):
            read_runtime(text_of([row if at == rank else other for at, other in enumerate(ROWS)]))
        moved += 1
    assert moved == 48


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0SEND_F0,", "", "line 1, cell 1: the result of 0F0 is never sent: 0SEND_F0 is missing after it"),
        ("1RECV_F0,", "", "line 2, cell 1: 1F0 needs a message from another rank: 1RECV_F0 is missing before it"),
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "line 1, cell 1: 0SEND_F0 comes before what it sends is computed"),
        ("0SEND_F0,", "0SEND_F0,0SEND_F0,", "line 1, cell 3: 0SEND_F0 appears twice"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "line 2, cell 1: 1F0 needs"),
        ("1RECV_F0,", "1RECV_F0,1RECV_F0,", "line 2, cell 2: 1RECV_F0 appears twice"),
        (
            "1RECV_F0,1F0,1RECV_F1",
            "1RECV_F1,1RECV_F0,1F0",
            "line 2, cell 1: 1RECV_F1 is out of order: from rank 0, 0SEND_F0 comes next",
        ),
        ("0F0,", "0F0,0RECV_F0,", "line 1, cell 2: 0RECV_F0 passes nothing: there is no other rank on that side"),
        ("1F0,", "1F0,1SEND_F0,", "line 2, cell 3: 1SEND_F0 passes nothing"),
        ("0F0,", "0F0,1SEND_F0,", "line 1, cell 2: 1SEND_F0 is of stage 1, which rank 0 does not compute"),
        ("0F0,", "0F0,7RECV_F0,", "line 1, cell 2: 7RECV_F0 is of stage 7"),
        ("0F0,", "0F0,0RECV_B7,", "line 1, cell 2: nothing after it needs what 0RECV_B7 receives"),
        ("0F0,", "0F0,0WAIT_SEND_F0,", "line 1, cell 2: 0WAIT_SEND_F0 waits for something that is not sent before it"),
        (
            "0SEND_F0,",
            "0SEND_F0,0WAIT_SEND_F0,",
            "line 1, cell 5: nothing waits for 0SEND_F1: 0WAIT_SEND_F1 is missing after it",
        ),
        ("0F0,", "0F0,,", "line 1, cell 2: an empty cell, but in the runtime's form every cell is an operation"),
        ("0F0,", "0F0,0UNSHARD,", "line 1, cell 2: 0UNSHARD comes after a computation of its stage"),
        ("0F0,", "0UNSHARD,0F0,", "line 1, cell 1: 0UNSHARD has no 0RESHARD after it"),
        ("0F0,", "0UNSHARD,0RESHARD,0F0,", "line 1, cell 3: 0F0 computes with parameters that 0RESHARD has freed"),
        ("0F0,", "1UNSHARD,0F0,", "line 1, cell 1: 1UNSHARD is of a stage that rank 0 does not compute"),
        ("0F0,", "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0F0,", "line 1, cell 3: 0F0 comes after 0REDUCE_GRAD"),
        ("0F0,", "0F0,0EVICT0,", "line 1, cell 2: 0EVICT0 is not a computation"),
        ("0F0,", "0F0,0SEND_F,", "line 1, cell 2: '0SEND_F' is not an action"),
        ("0F0,", "0F0,0SEND_F00,", "line 1, cell 2: '0SEND_F00' is not an action"),
    ],
)
def test_what_is_wrong_is_said_with_its_cell(old: str, new: str, reason: str) -> None:
    assert old in SMALL
    with pytest.raises(TextError) as raised:
        read_runtime(SMALL.replace(old, new, 1))
    assert str(raised.value).startswith(reason)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    """Each receives first what the other sends only after it has received."""
    stuck = "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    with pytest.raises(
        TextError, match="line 1, cell 2: 0RECV_B0 waits for ever: 1SEND_B0 is missing, or waits for this rank in turn"
    ):
        read_runtime(stuck)


def test_computations_alone_decide_what_is_missing() -> None:
    with pytest.raises(TextError, match="line 1, cell 1: the result of 0F0 is never sent: 0SEND_F0 is missing"):
        read_runtime("0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    # No message at all, but reductions: torch lists single-stage schedules so.
    schedule = read(
        "0F0,0F1,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n".replace(
            "\n,", "\n"
        )
    )
    check(schedule)
    assert [one.compute and str(one.compute) for one in schedule.ranks[1]] == [None, "1F0", "1B0", "1F1", "1B1", None][
        : len(schedule.ranks[1])
    ]


def test_transfers_have_no_place_in_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "schedule",
                "--schedule",
                "1f1b",
                "--pp",
                "4",
                "--microbatches",
                "4",
                "--balance",
                "bpipe",
                "--format",
                "runtime",
            ]
        )
        == 2
    )
    assert "0EVICT1 moves activations, for which torch's runtime has no operation" in capfd.readouterr().err
    assert main(["schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "1", "--format", "runtime"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1RESHARD",
    ]


def test_shuffled_files_are_refused_or_mean_the_same() -> None:
    """Operations exchanged at random: what is still accepted has the computations in the order in which the file has
    them."""
    rng = random.Random(5)
    accepted = 0
    for _ in range(600):
        rows = [list(row) for row in ROWS]
        row = rows[rng.randrange(2)]
        at = rng.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]
        try:
            schedule = read_runtime(text_of(rows))
        except TextError:
            continue
        accepted += 1
        computed = [[cell for cell in row if not has_messages(cell)] for row in rows]
        assert read_csv(text_of(computed)).num_stages == 4
        assert [[cell for cell in line if cell] for line in written(schedule)] == computed
    assert 50 < accepted < 550


def written(schedule: object) -> list[list[str]]:
    from bpipe.formats.text import write_csv
    from bpipe.ir.schedule import Schedule

    assert isinstance(schedule, Schedule)
    return [line.split(",") for line in write_csv(schedule).splitlines()]
