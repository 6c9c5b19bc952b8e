"""What each rank does, written out by hand where a person can, and held to the rule of dependencies where nobody can."""

from __future__ import annotations

from bpipe.check.rules import check
from bpipe.ir.program import Exchange, Program
from bpipe.ir.text import read_csv
from bpipe.passes.lower import lower


def lines(program: Program) -> list[str]:
    """A step a line, without the empty ones."""
    ends = [*program.starts[1:], len(program.dos)]
    steps = ("; ".join(map(str, program.instructions[start:end])) for start, end in zip(program.starts, ends, strict=True))
    return [step for step in steps if step]


def test_of_two_ranks_one_sends_the_other_what_all_shards_need() -> None:
    """The maker's own shard has it there: it once looked for a sender, found itself, and lowering two ranks failed."""
    schedule = read_csv("# bpipe schedule=a microbatches=1 stage_to_rank=0,1 vocabulary=2\n0F0,,0S0,0T0,,0B0\n,1F0,1S0,1T0,1B0,\n")
    check(schedule)
    first, second = lower(schedule, Exchange.POSTED)
    shared = "0S0+1S0>0T0+1T0+1B0"
    assert lines(first) == [
        "post 1F0>0S0+1S0",
        "run 0F0; send 0F0>1F0",
        f"wait 1F0>0S0+1S0; post 1B0>0B0; run 0S0; send {shared}",
        f"wait {shared}; run 0T0",
        "wait 1B0>0B0; run 0B0",
        f"wait 0F0>1F0; wait {shared}",
    ]
    assert lines(second) == [
        "post 0F0>1F0",
        "wait 0F0>1F0; run 1F0; send 1F0>0S0+1S0",
        f"run 1S0; send {shared}",
        f"wait {shared}; run 1T0",
        f"wait {shared}; run 1B0; send 1B0>0B0",
        f"wait 1F0>0S0+1S0; wait {shared}; wait 1B0>0B0",
    ]
