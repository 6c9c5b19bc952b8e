"""What is sent is let go once it was answered: nobody waits for it, nothing is lost, and little is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from bpipe.generate.families import FAMILIES
from bpipe.ir.program import Do, Exchange, Instruction, Message
from bpipe.ir.schedule import Schedule
from bpipe.ir.text import read_csv
from bpipe.passes.answered import as_run
from bpipe.passes.lower import lower
from bpipe.program import BalanceConfig, ScheduleConfig, build
from tests.unit.hand_made import chimera, far_ahead, v_flat
from tests.unit.interleaving import World, fault_of

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    **{
        f"{name}, {v} chunks": partial(build, ScheduleConfig(name, 4, 8, v, BalanceConfig()))
        for name, family in FAMILIES.items()
        for v in range(family.min_chunks, min(family.max_chunks or 2, 2) + 1)
    },
    "v-flat": partial(v_flat, 3, 4),
    "two pipes": partial(chimera, 4),
    "far ahead": far_ahead,
    "one rank": lambda: read_csv("# bpipe schedule=a microbatches=2 stage_to_rank=0\n0F0,0F1,0B1,0B0\n"),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]()


def test_the_same_is_done_in_the_same_order_but_for_letting_go(schedule: Schedule) -> None:
    for judged, run in zip(lower(schedule, Exchange.POSTED), as_run(schedule, Exchange.POSTED), strict=True):
        assert Counter(judged.instructions) == Counter(run.instructions)
        others = [[one for one in program.instructions if not lets_go(one, program.rank)] for program in (judged, run)]
        assert others[0] == others[1]
        slots = [[program.slot_of(index) for index, do in enumerate(program.dos) if do == Do.RUN] for program in (judged, run)]
        assert slots[0] == slots[1]
        assert len(run.starts) == len(judged.starts)


def lets_go(one: Instruction, rank: int) -> bool:
    return one.do is Do.WAIT and isinstance(one.what, Message) and one.what.parties[0] == rank


class Arrived(World):
    """A world in which a rank must not have to wait for what it has sent."""

    def may(self, rank: int, instruction: Instruction) -> bool:
        may = super().may(rank, instruction)
        if lets_go(instruction, rank) and not self.ending[rank]:
            (taker,) = self.needs.route(instruction.what.value).takers  # type: ignore[union-attr]
            assert may, f"rank {rank} waits for {instruction.what}"
            assert instruction.what.value in self.waited[taker], f"{instruction.what} may not have arrived"  # type: ignore[union-attr]
        return may


@pytest.mark.parametrize("seed", range(5))
def test_whoever_lets_go_never_waits(schedule: Schedule, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [program.instructions for program in as_run(schedule, Exchange.POSTED)]
    ends = [max(index for index, one in enumerate(program) if one.do is Do.RUN) for program in programs]

    class Ending(Arrived):
        def __init__(self, schedule: Schedule) -> None:
            super().__init__(schedule)
            self.done = [0] * schedule.num_ranks

        @property
        def ending(self) -> list[bool]:
            """By rank: whether all that is left is to let go of what nobody answers."""
            return [done > end for done, end in zip(self.done, ends, strict=True)]

        def do(self, rank: int, instruction: Instruction) -> None:
            super().do(rank, instruction)
            self.done[rank] += 1

    monkeypatch.setattr("tests.unit.interleaving.World", Ending)
    assert fault_of(schedule, programs, seed) is None


@pytest.mark.parametrize("name", ["1f1b", "1f1b-split", "zb-h1"])
def test_no_more_is_kept_however_many_micro_batches_there_are(name: str) -> None:
    kept = [most_kept(build(ScheduleConfig(name, 4, m))) for m in (8, 64)]
    assert kept[0] == kept[1] <= 8


def most_kept(schedule: Schedule) -> int:
    most = 0
    for program in as_run(schedule, Exchange.POSTED):
        kept = 0
        for one in program.instructions:
            kept += (one.do is Do.SEND) - lets_go(one, program.rank)
            most = max(most, kept)
    return most


def test_megatrons_loops_wait_as_they_do() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    for exchange in (Exchange.MEGATRON_1F1B, Exchange.MEGATRON_INTERLEAVED):
        programs = [[program.instructions for program in made(schedule, exchange)] for made in (lower, as_run)]
        assert programs[0] == programs[1]
