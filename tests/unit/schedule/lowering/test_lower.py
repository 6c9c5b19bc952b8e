"""What each rank does, written out by hand where a person can, and held to the rule of dependencies where nobody
can."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.case import ScheduleError
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.rules import check
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.families.families import exchange_of
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Instruction, Message, Op, Program
from bpipe.schedule.schedule import Schedule
from tests.support.interleaving import fault_of
from tests.unit.schedule.check.test_deadlock import REFILLED
from tests.unit.schedule.check.test_overlap import OVERLAPPED
from tests.unit.schedule.families.test_sharded_schedules import sharded

SCHEDULES = {
    "1f1b": partial(build, ScheduleConfig("1f1b", 4, 6, balance=BalanceConfig())),
    "chunks": partial(build, ScheduleConfig("interleaved-1f1b", 4, 8, num_chunks=2, balance=BalanceConfig())),
    "gpipe": partial(build, ScheduleConfig("gpipe", 3, 4)),
    "one rank": partial(build, ScheduleConfig("1f1b", 1, 2)),
    "refilled": partial(read_csv, REFILLED),
    "own memory": lambda: read_csv(
        "# bpipe schedule=a microbatches=2 stage_to_rank=0 hosts=own\n0F0,0F1 0EVICT0,0B1 0LOAD0,0B0\n"
    ),
    "overlapped": lambda: OVERLAPPED,
    "v-half": partial(build, ScheduleConfig("v-half", 4, 4, num_chunks=2)),
    "two pipes": partial(build, ScheduleConfig("chimera", 4, 4)),
    "two pipes, balanced": partial(build, ScheduleConfig("chimera", 8, 8, balance=BalanceConfig())),
    "vocabulary": partial(sharded, 4, 5, Vocabulary.ONE),
    "vocabulary of two": partial(sharded, 2, 3, Vocabulary.TWO),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_passes_is_sent_once_and_waited_for(name: str) -> None:
    schedule = SCHEDULES[name]()
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    programs = lower(schedule, Exchange.POSTED)
    sent = [(program.rank, operand.value) for program in programs for operand in messages(program, Op.SEND)]
    computed = {one for row in schedule.ranks for cell in row for one in cell.computations}
    routes = {
        value: dependencies.route(value) for value in {dependencies.value_of(one) for one in computed} - {NOTHING}
    }
    passing = {value: route for value, route in routes.items() if route.takers and len(route.parties) > 1}
    assert sorted(sent) == sorted((maker, value) for value, route in passing.items() for maker in route.makers)
    for program in programs:
        waited: set[int] = set()
        for op, operand in program.instructions:
            if op is Op.WAIT and isinstance(operand, Message):
                waited.add(operand.value)
            elif isinstance(operand, Action) and (value := dependencies.operand_of(operand)) != NOTHING:
                assert value in waited or routes[value].makers == (program.rank,)


def messages(program: Program, op: Op) -> Iterator[Message]:
    return (operand for each, operand in program.instructions if each is op and isinstance(operand, Message))


@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_complete_in_any_interleaving_or_in_none(name: str, exchange: Exchange) -> None:
    """As the deadlock check says. What the rules take under an exchange completes."""
    schedule = SCHEDULES[name]()
    try:
        programs = [program.instructions for program in lower(schedule, exchange)]
    except ValueError:
        assert exchange is not Exchange.POSTED
        return
    faults = [fault_of(schedule, programs, seed) for seed in range(5)]
    if exchange in (Exchange.POSTED, exchange_of(schedule.name)) and name != "refilled":
        check(schedule, exchange)
        assert faults == [None] * 5
    is_blocked = bool(blocked_ranks(schedule, WaitLevel.ASYNCHRONOUS, exchange))
    assert [bool(fault) for fault in faults] == [is_blocked] * 5
    assert all(fault is None or fault.startswith("stuck: ") for fault in faults)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "refilled", "own memory", "v-half", "overlapped"])
def test_nothing_can_be_left_out(name: str) -> None:
    """Each instruction in turn."""
    schedule = SCHEDULES[name]()
    programs = [program.instructions for program in lower(schedule, Exchange.POSTED)]
    assert fault_of(schedule, programs, 0) is None
    for rank, program in enumerate(programs):
        for index in range(len(program)):
            without = (*program[:index], *program[index + 1 :])
            assert fault_of(schedule, [*programs[:rank], without, *programs[rank + 1 :]], index), (
                f"rank {rank} without {program[index]}"
            )


@pytest.mark.parametrize("op", [Op.POST, Op.SEND])
@pytest.mark.parametrize("name", ["1f1b", "chunks", "v-half", "two pipes"])
def test_no_two_messages_of_one_way_can_change_places(name: str, op: Op) -> None:
    schedule = SCHEDULES[name]()
    programs = [program.instructions for program in lower(schedule, Exchange.POSTED)]
    changed = 0
    for rank, program in enumerate(programs):
        places = [index for index, one in enumerate(program) if one.op is op]
        for first, second in pairwise(places):
            one, other = program[first].operand, program[second].operand
            if isinstance(one, Message) and isinstance(other, Message) and one.parties == other.parties:
                swapped = list(program)
                swapped[first], swapped[second] = Instruction(op, other), Instruction(op, one)
                assert fault_of(schedule, [*programs[:rank], swapped, *programs[rank + 1 :]], first)
                changed += 1
    assert changed > 4


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Any order that respects the needs: computations that are ready, drawn by lot.

    Shards keep one order on all ranks.
    """
    p, chunks, pipes, m = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
    )
    vocabulary = draw(st.sampled_from([Vocabulary.WHOLE, Vocabulary.WHOLE, Vocabulary.ONE, Vocabulary.TWO]))
    rng = random.Random(draw(st.integers(0, 10**6)))
    placements = tuple(tuple(rng.sample([*range(p)] * chunks, p * chunks)) for _ in range(pipes))
    layout = Layout(placements, vocabulary)
    dependencies = Dependencies(layout, m)
    is_split = draw(st.booleans())
    kinds = (Kind.FORWARD, *((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if is_split else (Kind.BACKWARD,)))
    # Each stage's passes of a micro-batch follow each other, and so do the shards' of a rank.
    queues = [[Action(stage, kind, k) for kind in kinds] for stage in range(p * chunks) for k in range(m)]
    shards = [(kind, k) for k in rng.sample(range(m), m) for kind in layout.shard_kinds]
    queues += [[Action(rank, kind, k) for kind, k in shards] for rank in range(p)]
    made: dict[int, int] = {}
    rows: list[list[Action]] = [[] for _ in range(p)]

    def is_ready(action: Action) -> bool:
        value = dependencies.operand_of(action)
        return value == NOTHING or made.get(value, 0) == len(dependencies.route(value).makers)

    while ready := [queue for queue in queues if queue and is_ready(queue[0])]:
        action = rng.choice(ready).pop(0)
        made[dependencies.value_of(action)] = made.get(dependencies.value_of(action), 0) + 1
        rows[layout.rank_of_action(action)].append(action)
    assert not any(queues)
    return place("drawn", m, layout, rows)


@settings(max_examples=150, deadline=None)
@given(orders(), st.booleans(), st.integers(0, 10**6))
def test_what_is_checked_completes_and_has_what_it_needs(schedule: Schedule, is_balanced: bool, seed: int) -> None:
    if is_balanced:
        schedule = balance(schedule)
    try:
        check(schedule, Exchange.POSTED)
    except ScheduleError:
        assume(False)
    assert fault_of(schedule, [program.instructions for program in lower(schedule, Exchange.POSTED)], seed) is None
