"""What every rank does, printed: both ends of everything name each other, and nothing of a program is lost."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.schedule.files.grid import write_listing
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Message, Op, Transfer
from tests.unit.schedule.check.test_overlap import OVERLAPPED
from tests.unit.schedule.families.test_sharded_schedules import sharded

MESSAGES = ["schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--messages"]

TEXT = """\
# bpipe schedule=1f1b microbatches=2 stage_to_rank=0,1
# exchange=megatron-1f1b
place slot does

0:0   0    run 0F0
0:1   1    send 0F0>1F0 output to rank 1, posted at 1:0
0:2   1    wait 0F0>1F0 output to rank 1, posted at 1:0
0:3   1    run 0F1
0:4   3    send 0F1>1F1 output to rank 1, posted at 1:5
0:5   3    post 1B0>0B0 gradient from rank 1, sent at 1:4
0:6   3    wait 0F1>1F1 output to rank 1, posted at 1:5
0:7   3    wait 1B0>0B0 gradient from rank 1, sent at 1:4
0:8   3    run 0B0
0:9   5    post 1B1>0B1 gradient from rank 1, sent at 1:10
0:10  5    wait 1B1>0B1 gradient from rank 1, sent at 1:10
0:11  5    run 0B1

1:0   1    post 0F0>1F0 output from rank 0, sent at 0:1
1:1   1    wait 0F0>1F0 output from rank 0, sent at 0:1
1:2   1    run 1F0
1:3   2    run 1B0
1:4   3    send 1B0>0B0 gradient to rank 0, posted at 0:5
1:5   3    post 0F1>1F1 output from rank 0, sent at 0:4
1:6   3    wait 1B0>0B0 gradient to rank 0, posted at 0:5
1:7   3    wait 0F1>1F1 output from rank 0, sent at 0:4
1:8   3    run 1F1
1:9   4    run 1B1
1:10  end  send 1B1>0B1 gradient to rank 0, posted at 0:9
1:11  end  wait 1B1>0B1 gradient to rank 0, posted at 0:9
"""

SCHEDULES = {
    "balanced": partial(build, ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())),
    "chunks": partial(build, ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig())),
    "overlapped": lambda: OVERLAPPED,
    "v-half": partial(build, ScheduleConfig("v-half", 4, 6, num_chunks=2)),
    "two pipes": partial(build, ScheduleConfig("chimera", 4, 4)),
    "vocabulary": partial(sharded, 4, 6, Vocabulary.TWO),
    "vocabulary of two": partial(sharded, 2, 3, Vocabulary.ONE),
    "own memory": lambda: read_csv(
        "# bpipe schedule=a microbatches=2 stage_to_rank=0 hosts=own\n0F0,0F1 0EVICT0,0B1 0LOAD0,0B0\n"
    ),
}


def test_a_program_is_printed_a_line_an_instruction(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(MESSAGES) == 0
    assert capfd.readouterr() == (TEXT, "")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--format", "grid"], "--messages is written as text: a grid has no room for messages"),
        (["--format", "json"], "a json has no room for messages"),
        (["--format", "png"], "a png has no room for messages"),
        (["--output", "a.csv"], "a csv has no room for messages"),
    ],
)
def test_other_formats_are_refused(more: list[str], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*MESSAGES, *more]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert reason in captured.err


def test_what_cannot_be_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*MESSAGES[:-1], "--exchange", "posted"]) == 2
    assert "--exchange says when messages pass: give --messages, too" in capfd.readouterr().err
    path = tmp_path / "a.csv"
    path.write_text(
        "# bpipe schedule=a microbatches=1 stage_to_rank=0,1 vocabulary=2\n0F0,,0S0,,0T0,0B0\n,1F0,1S0,1T0,1B0,\n"
    )
    assert main(["schedule", "--input", str(path), "--messages", "--exchange", "megatron-1f1b"]) == 2
    assert "shards of the vocabulary need posted" in capfd.readouterr().err


def test_an_exchange_that_blocks_is_printed_with_a_word_of_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """The ring of neighbours that all send first."""
    sizes = ["--schedule", "interleaved-1f1b", "--pp", "4", "--microbatches", "8", "--vp", "2", "--messages"]
    assert main(["schedule", *sizes, "--exchange", "megatron-1f1b"]) == 0
    printed, said = capfd.readouterr()
    assert "# exchange=megatron-1f1b\n" in printed
    assert said.splitlines() == [
        f"bpipe: with --exchange megatron-1f1b rank {rank}, slot 4: waits for ever for the output of "
        f"{rank}F{3 - rank}, "
        f"the other end is on rank {(rank + 1) % 4}"
        for rank in range(4)
    ]
    assert main(["schedule", *sizes]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_end_names_the_other(name: str) -> None:
    """What passes is posted where its sender's line says, and sent where its receiver's does."""
    programs = lower(SCHEDULES[name](), Exchange.POSTED)
    lines = write_listing(programs, Exchange.POSTED).splitlines()
    found = re.compile(r"(\d+):(\d+) +(start|end|\d+) +(\w+) (\S+)(?: +(.*))?")
    table = {(int(one[1]), int(one[2])): one for one in map(found.fullmatch, lines[4:]) if one}
    assert len(table) == sum(len(program.ops) for program in programs)
    for (rank, at), one in table.items():
        instruction = programs[rank].instructions[at]
        assert f"{one[4]} {one[5]}" == str(instruction)
        others = [(int(other), int(there)) for other, there in re.findall(r"(\d+):(\d+)", one[6] or "")]
        if isinstance(instruction.operand, Message):
            assert sorted(other for other, _ in others) == sorted(set(instruction.operand.parties) - {rank})
            assert all(programs[other].instructions[there].operand == instruction.operand for other, there in others)
        elif isinstance(instruction.operand, Transfer):
            assert [other for other, _ in others] == [one for one in instruction.operand[1:] if one != rank]
            for other, there in others:
                assert programs[other].instructions[there].operand[1:] == instruction.operand[1:]
                assert table[other, there][5][-1] == one[5][-1], "the same micro-batch"
        for other, there in others:
            assert programs[other].ops[there] in (Op.POST, Op.SEND, Op.START)
            if instruction.op not in (Op.WAIT, Op.FINISH):
                assert f"{rank}:{at}" in table[other, there][6]
