"""What is sent is let go once it was answered: nobody waits for it, nothing is lost, and little is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.lowering.lower import lower, lower_as_run
from bpipe.schedule.program import Exchange, Instruction, Message, Op, Program
from bpipe.schedule.schedule import Schedule
from tests.support.hand_made import far_ahead, v_flat
from tests.support.interleaving import World, fault_of

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    **{
        f"{name}, {v} chunks": partial(build, ScheduleConfig(name, 4, 8, num_chunks=v, balance=BalanceConfig()))
        for name, family in FAMILIES.items()
        for v in range(family.min_chunks, min(family.max_chunks or 2, 2) + 1)
    },
    "v-flat": partial(v_flat, 3, 4),
    "far ahead": far_ahead,
    "one rank": lambda: read_csv("# bpipe schedule=a microbatches=2 stage_to_rank=0\n0F0,0F1,0B1,0B0\n"),
}


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return SCHEDULES[request.param]()


def test_the_same_is_done_in_the_same_order_but_for_letting_go(schedule: Schedule) -> None:
    for judged, run in zip(lower(schedule, Exchange.POSTED), lower_as_run(schedule, Exchange.POSTED), strict=True):
        assert Counter(judged.instructions) == Counter(run.instructions)
        others = [[one for one in program.instructions if not lets_go(one, program.rank)] for program in (judged, run)]
        assert others[0] == others[1]
        slots = [
            [program.slot_of(index) for index, op in enumerate(program.ops) if op == Op.RUN]
            for program in (judged, run)
        ]
        assert slots[0] == slots[1]
        assert len(run.starts) == len(judged.starts)


def lets_go(one: Instruction, rank: int) -> bool:
    return one.op is Op.WAIT and isinstance(one.operand, Message) and one.operand.parties[0] == rank


class Arrived(World):
    """A world in which a rank must not have to wait for what it has sent."""

    def may(self, rank: int, instruction: Instruction) -> bool:
        may = super().may(rank, instruction)
        if lets_go(instruction, rank) and not self.ending[rank]:
            (taker,) = self.dependencies.route(instruction.operand.value).takers  # type: ignore[union-attr]
            assert may, f"rank {rank} waits for {instruction.operand}"
            assert instruction.operand.value in self.waited[taker], f"{instruction.operand} may not have arrived"  # type: ignore[union-attr]
        return may


@pytest.mark.parametrize("seed", range(5))
def test_whoever_lets_go_never_waits(schedule: Schedule, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [program.instructions for program in lower_as_run(schedule, Exchange.POSTED)]
    ends = [max(index for index, one in enumerate(program) if one.op is Op.RUN) for program in programs]

    class Ending(Arrived):
        def __init__(self, schedule: Schedule) -> None:
            super().__init__(schedule)
            self.done = [0] * schedule.num_ranks

        @property
        def ending(self) -> list[bool]:
            """By rank: whether all that is left is to let go of what nobody answers."""
            return [done > end for done, end in zip(self.done, ends, strict=True)]

        def op(self, rank: int, instruction: Instruction) -> None:
            super().op(rank, instruction)
            self.done[rank] += 1

    monkeypatch.setattr("tests.support.interleaving.World", Ending)
    assert fault_of(schedule, programs, seed) is None


@pytest.mark.parametrize("name", ["1f1b", "1f1b-split", "zb-h1"])
def test_no_more_is_kept_however_many_micro_batches_there_are(name: str) -> None:
    kept = [most_kept(build(ScheduleConfig(name, 4, m))) for m in (8, 64)]
    assert kept[0] == kept[1] <= 8


def most_kept(schedule: Schedule) -> int:
    most = 0
    for program in lower_as_run(schedule, Exchange.POSTED):
        kept = 0
        for one in program.instructions:
            kept += (one.op is Op.SEND) - lets_go(one, program.rank)
            most = max(most, kept)
    return most


def test_megatrons_loops_wait_as_they_do() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    for exchange in (Exchange.MEGATRON_1F1B, Exchange.MEGATRON_INTERLEAVED):
        programs = [[program.instructions for program in made(schedule, exchange)] for made in (lower, lower_as_run)]
        assert programs[0] == programs[1]


SPLIT = (Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED)


@pytest.mark.parametrize("vocabulary", SPLIT)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 16)])
def test_of_what_all_shards_share_little_is_kept(p: int, m: int, vocabulary: Vocabulary) -> None:
    """The last rank keeps its output until all have it; each rank keeps its part of a gradient."""
    for program in lower_as_run(build(ScheduleConfig("1f1b", p, m, vocabulary=vocabulary)), Exchange.POSTED):
        dependencies, kept = program.messages.dependencies, set[int]()
        most: Counter[str] = Counter()
        for op, operand in zip(program.ops, program.operands, strict=True):
            if isinstance(operand, int) and op == Op.WAIT:
                kept.discard(operand)
            elif isinstance(operand, int) and op == Op.SEND:
                kept.add(operand)
                most |= Counter(dependencies.sort(value) for value in kept)
        assert most["statistics"] == 1
        assert most["last gradient"] <= 3
        assert program.rank < p - 1 or most["output"] <= 3
        assert not kept


@pytest.mark.parametrize("vocabulary", SPLIT)
def test_whoever_lets_go_of_what_shards_share_waits_for_nobody(vocabulary: Vocabulary) -> None:
    """All who take it have, in any order in which the ranks can run."""
    schedule = build(ScheduleConfig("1f1b", 4, 9, vocabulary=vocabulary))
    programs = lower_as_run(schedule, Exchange.POSTED)
    dependencies = programs[0].messages.dependencies
    judged = lower(schedule, Exchange.POSTED)
    for program, plain in zip(programs, judged, strict=True):
        assert Counter(program.instructions) == Counter(plain.instructions)
    # What must have happened when each instruction is over: by rank, how far every rank has come.
    come = _come(programs)
    ends = [max(index for index, op in enumerate(program.ops) if op == Op.RUN) for program in programs]
    for program in programs:
        for index, (op, operand) in enumerate(zip(program.ops, program.operands, strict=True)):
            if op != Op.WAIT or not isinstance(operand, int) or index > ends[program.rank]:
                continue
            makers, takers = dependencies.route(operand)
            if program.rank not in makers or program.rank in takers:
                continue
            for taker in takers:
                taken = _place(programs[taker], Op.WAIT, operand)
                assert come[program.rank][index][taker] >= taken, (
                    f"rank {program.rank} may wait for {dependencies.describe(operand)}"
                )


def _place(program: Program, op: Op, operand: int) -> int:
    return next(
        index for index, each in enumerate(zip(program.ops, program.operands, strict=True)) if each == (op, operand)
    )


def _come(programs: Sequence[Program]) -> list[list[list[int]]]:
    """By rank and instruction, before it: how far each rank must have come, as far as what was received says so."""
    dependencies = programs[0].messages.dependencies
    come: list[list[list[int]]] = [[] for _ in programs]
    at = [[-1] * len(programs) for _ in programs]
    sent: dict[tuple[int, int], list[int]] = {}
    while any(len(done) < len(program.ops) for done, program in zip(come, programs, strict=True)):
        for program in programs:
            rank = program.rank
            while len(come[rank]) < len(program.ops):
                index = len(come[rank])
                op, operand = program.ops[index], program.operands[index]
                if op == Op.WAIT and isinstance(operand, int):
                    makers, takers = dependencies.route(operand)
                    parts = [sent.get((maker, operand)) for maker in makers if maker != rank] if rank in takers else []
                    if None in parts:
                        break
                    come[rank].append(list(at[rank]))
                    at[rank] = [max(places) for places in zip(at[rank], *filter(None, parts), strict=True)]
                else:
                    come[rank].append(list(at[rank]))
                at[rank][rank] = index
                if op == Op.SEND and isinstance(operand, int):
                    sent[rank, operand] = list(at[rank])
    return come
