"""Programs checked by hand; programs of any order complete, lose nothing, and keep little of what they send."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.rules import ScheduleError, check
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.families.families import FAMILIES, exchange_of
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import Layout, Vocabulary, one_pipe
from bpipe.schedule.lowering.forward_only import forwards_only
from bpipe.schedule.lowering.lower import lower, lower_as_run
from bpipe.schedule.program import Exchange, Instruction, Message, Op, Program
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Link, Links, StageCost
from bpipe.simulate.engine import simulate
from tests.support.hand_made import far_ahead, v_flat
from tests.support.interleaving import World, fault_of
from tests.unit.schedule.check.test_deadlock import REFILLED
from tests.unit.schedule.check.test_overlap import OVERLAPPED
from tests.unit.schedule.families.test_sharded_schedules import sharded

# One step per line, as in Megatron's loop: warm-up, one forward and one backward in turn, cool-down.
ONE_F_ONE_B = {
    (3, 3): """\
run 0F0
send 0F0>1F0; wait 0F0>1F0; run 0F1
send 0F1>1F1; wait 0F1>1F1; run 0F2
send 0F2>1F2; post 1B0>0B0; wait 0F2>1F2; wait 1B0>0B0; run 0B0
post 1B1>0B1; wait 1B1>0B1; run 0B1
post 1B2>0B2; wait 1B2>0B2; run 0B2

post 0F0>1F0; wait 0F0>1F0; run 1F0
send 1F0>2F0; wait 1F0>2F0; post 0F1>1F1; wait 0F1>1F1; run 1F1
send 1F1>2F1; post 2B0>1B0; wait 1F1>2F1; wait 2B0>1B0; run 1B0
send 1B0>0B0; post 0F2>1F2; wait 1B0>0B0; wait 0F2>1F2; run 1F2
send 1F2>2F2; post 2B1>1B1; wait 1F2>2F2; wait 2B1>1B1; run 1B1
send 1B1>0B1; wait 1B1>0B1; post 2B2>1B2; wait 2B2>1B2; run 1B2
send 1B2>0B2; wait 1B2>0B2

post 1F0>2F0; wait 1F0>2F0; run 2F0
run 2B0
send 2B0>1B0; post 1F1>2F1; wait 2B0>1B0; wait 1F1>2F1; run 2F1
run 2B1
send 2B1>1B1; post 1F2>2F2; wait 2B1>1B1; wait 1F2>2F2; run 2F2
run 2B2
send 2B2>1B2; wait 2B2>1B2
"""
}

# Two ranks, two chunks, two micro-batches: rank 0 runs all forwards before its first backward.
INTERLEAVED = """\
run 0F0; send 0F0>1F0; wait 0F0>1F0
run 0F1; send 0F1>1F1; post 1F0>2F0; wait 0F1>1F1; wait 1F0>2F0
run 2F0; send 2F0>3F0; post 1F1>2F1; wait 2F0>3F0; wait 1F1>2F1
run 2F1; send 2F1>3F1; post 3B0>2B0; wait 2F1>3F1; wait 3B0>2B0
run 2B0; send 2B0>1B0; post 3B1>2B1; wait 2B0>1B0; wait 3B1>2B1
run 2B1; send 2B1>1B1; post 1B0>0B0; wait 2B1>1B1; wait 1B0>0B0
run 0B0; post 1B1>0B1; wait 1B1>0B1
run 0B1

post 0F0>1F0; wait 0F0>1F0
run 1F0; send 1F0>2F0; post 0F1>1F1; wait 1F0>2F0; wait 0F1>1F1
run 1F1; send 1F1>2F1; post 2F0>3F0; wait 1F1>2F1; wait 2F0>3F0
run 3F0; post 2F1>3F1; wait 2F1>3F1
run 3B0; send 3B0>2B0; wait 3B0>2B0
run 3F1; post 2B0>1B0; wait 2B0>1B0
run 3B1; send 3B1>2B1; wait 3B1>2B1
run 1B0; send 1B0>0B0; post 2B1>1B1; wait 1B0>0B0; wait 2B1>1B1
run 1B1; send 1B1>0B1; wait 1B1>0B1
"""

# The last of three ranks with two chunks and six micro-batches, in the loop that does not overlap: three forwards, nine
# turns of a forward and then a backward, three backwards. After the first group the ring closes: what rank 0 computes
# next comes from this rank.
IN_TURNS = """\
post 1F0>2F0; wait 1F0>2F0; run 2F0
send 2F0>3F0; post 1F1>2F1; wait 2F0>3F0; wait 1F1>2F1; run 2F1
send 2F1>3F1; post 1F2>2F2; wait 2F1>3F1; wait 1F2>2F2; run 2F2
send 2F2>3F2; post 4F0>5F0; wait 2F2>3F2; wait 4F0>5F0; run 5F0
run 5B0
send 5B0>4B0; post 4F1>5F1; wait 5B0>4B0; wait 4F1>5F1; run 5F1
run 5B1
send 5B1>4B1; post 4F2>5F2; wait 5B1>4B1; wait 4F2>5F2; run 5F2
run 5B2
send 5B2>4B2; post 1F3>2F3; post 3B0>2B0; wait 5B2>4B2; wait 1F3>2F3; wait 3B0>2B0; run 2F3
run 2B0
send 2F3>3F3; send 2B0>1B0; post 1F4>2F4; post 3B1>2B1; wait 2F3>3F3; wait 2B0>1B0; wait 1F4>2F4; wait 3B1>2B1; run 2F4
run 2B1
send 2F4>3F4; send 2B1>1B1; post 1F5>2F5; post 3B2>2B2; wait 2F4>3F4; wait 2B1>1B1; wait 1F5>2F5; wait 3B2>2B2; run 2F5
run 2B2
send 2F5>3F5; send 2B2>1B2; post 4F3>5F3; wait 2F5>3F5; wait 2B2>1B2; wait 4F3>5F3; run 5F3
run 5B3
send 5B3>4B3; post 4F4>5F4; wait 5B3>4B3; wait 4F4>5F4; run 5F4
run 5B4
send 5B4>4B4; post 4F5>5F5; wait 5B4>4B4; wait 4F5>5F5; run 5F5
run 5B5
send 5B5>4B5; post 3B3>2B3; wait 5B5>4B5; wait 3B3>2B3; run 2B3
send 2B3>1B3; post 3B4>2B4; wait 2B3>1B3; wait 3B4>2B4; run 2B4
send 2B4>1B4; post 3B5>2B5; wait 2B4>1B4; wait 3B5>2B5; run 2B5
send 2B5>1B5; wait 2B5>1B5
"""

# Micro-batch 2 reuses the host buffer of 1. Programs wait for an eviction before the next computation or a load, for a
# HOST before its RETURN, for a RETURN before the buffer is filled again or at the end, and for a load before its
# backward.
WITH_TRANSFERS = """\
post 1B0>0B0
run 0F0; send 0F0>1F0
run 0F1; send 0F1>1F1
send 0EVICT1; run 0F2; send 0F2>1F2
wait 1B0>0B0; post 1B1>0B1; wait 0EVICT1; run 0B0; post 0LOAD1; send 0EVICT2
wait 1B1>0B1; post 1B2>0B2; wait 0EVICT2; post 0LOAD2; wait 0LOAD1; run 0B1
wait 1B2>0B2; wait 0LOAD2; run 0B2
wait 0F0>1F0; wait 0F1>1F1; wait 0F2>1F2

post 0F0>1F0
wait 0F0>1F0; post 0F1>1F1; run 1F0
wait 0F1>1F1; post 0F2>1F2; post 0HOST1; run 1F1
run 1B0; send 1B0>0B0; wait 0HOST1; send 0RETURN1; wait 0RETURN1; post 0HOST2
run 1B1; send 1B1>0B1
wait 0F2>1F2; wait 0HOST2; send 0RETURN2; run 1F2
run 1B2; send 1B2>0B2
wait 1B0>0B0; wait 1B1>0B1; wait 1B2>0B2; wait 0RETURN2
"""

# One of two ranks computes what both shards need, so its own shard need not wait for it.
TWO_SHARDS = """\
post 1F0>0S0+1S0
run 0F0; send 0F0>1F0
wait 1F0>0S0+1S0; post 1B0>0B0; run 0S0; send 0S0+1S0>0T0+1T0+1B0
wait 0S0+1S0>0T0+1T0+1B0; run 0T0
wait 1B0>0B0; run 0B0
wait 0F0>1F0; wait 0S0+1S0>0T0+1T0+1B0

post 0F0>1F0
wait 0F0>1F0; run 1F0; send 1F0>0S0+1S0
run 1S0; send 0S0+1S0>0T0+1T0+1B0
wait 0S0+1S0>0T0+1T0+1B0; run 1T0
wait 0S0+1S0>0T0+1T0+1B0; run 1B0; send 1B0>0B0
wait 1F0>0S0+1S0; wait 0S0+1S0>0T0+1T0+1B0; wait 1B0>0B0
"""
SHARDS_OF_TWO = (
    "# bpipe schedule=a microbatches=1 stage_to_rank=0,1 vocabulary=2\n0F0,,0S0,0T0,,0B0\n,1F0,1S0,1T0,1B0,\n"
)

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


def written(programs: tuple[Program, ...]) -> str:
    """Return a line for each step that does something, rank by rank."""
    ranks = []
    for program in programs:
        bounds = zip(program.starts, [*program.starts[1:], len(program.ops)], strict=True)
        steps = ("; ".join(map(str, program.instructions[start:end])) for start, end in bounds)
        ranks.append("".join(f"{step}\n" for step in steps if step))
    return "\n".join(ranks)


@pytest.mark.parametrize(("p", "m"), ONE_F_ONE_B)
def test_megatrons_loop_for_one_stage_a_rank(p: int, m: int) -> None:
    assert written(lower(build(ScheduleConfig("1f1b", p, m)), Exchange.MEGATRON_1F1B)) == ONE_F_ONE_B[p, m]


def test_megatrons_loop_for_several_stages_a_rank() -> None:
    assert (
        written(lower(build(ScheduleConfig("interleaved-1f1b", 2, 2, num_chunks=2)), Exchange.MEGATRON_INTERLEAVED))
        == INTERLEAVED
    )


def test_megatrons_interleaved_program_where_it_waits() -> None:
    programs = written(lower(build(ScheduleConfig("interleaved-1f1b", 3, 6, num_chunks=2)), Exchange.MEGATRON_TURNS))
    assert programs.split("\n\n")[2] == IN_TURNS


@pytest.mark.parametrize(("p", "v", "m"), [(3, 2, 3), (3, 2, 9), (4, 2, 8), (4, 3, 12), (5, 2, 10)])
def test_a_loop_in_turns_loses_nothing_to_exchanges_that_take_no_time(p: int, v: int, m: int) -> None:
    """Forwards and backwards take the same time on every rank."""
    schedule = build(ScheduleConfig("interleaved-1f1b", p, m, num_chunks=v))
    free, gaps = Links(), Links(Link(gap_s=Fraction(1, 10)))
    posted, turns, waiting = (
        simulate(schedule, Costs((StageCost(1, 2),) * (p * v), links, exchange=exchange)).makespan_s
        for links, exchange in (
            (free, Exchange.POSTED),
            (free, Exchange.MEGATRON_TURNS),
            (gaps, Exchange.MEGATRON_TURNS),
        )
    )
    assert turns == posted
    # Every rank sends at least one message per turn.
    assert waiting >= turns + Fraction(1, 10) * m * v


@pytest.mark.parametrize(("p", "m", "group"), [(3, 5, 5), (3, 10, 5), (4, 12, 6), (4, 12, 8), (5, 20, 6)])
def test_a_loop_in_turns_closes_its_ring_whatever_the_group(p: int, m: int, group: int) -> None:
    schedule = build(ScheduleConfig("interleaved-1f1b", p, m, num_chunks=2, group_size=group))
    assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.MEGATRON_TURNS)


@pytest.mark.parametrize(("text", "expected"), [(REFILLED, WITH_TRANSFERS), (SHARDS_OF_TWO, TWO_SHARDS)])
def test_our_executors_program(text: str, expected: str) -> None:
    schedule = read_csv(text)
    assert written(lower(schedule, Exchange.POSTED)) == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_passes_is_sent_once_and_waited_for(name: str) -> None:
    schedule = SCHEDULES[name]()
    dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
    programs = lower(schedule, Exchange.POSTED)
    sent = [(program.rank, operand.value) for program in programs for operand in messages(program, Op.SEND)]
    computed = {action for row in schedule.ranks for cell in row for action in cell.computations}
    routes = {
        value: dependencies.route(value) for value in {dependencies.value_of(action) for action in computed} - {NOTHING}
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_message_of_every_sender_is_posted_in_its_order(name: str) -> None:
    programs = lower(SCHEDULES[name](), Exchange.POSTED)
    for program in programs:
        for sender in programs:
            sent = [
                operand
                for operand in messages(sender, Op.SEND)
                if not operand.is_collective and program.rank in operand.parties[1:]
            ]
            assert [
                operand
                for operand in messages(program, Op.POST)
                if operand.parties[0] == sender.rank and not operand.is_collective
            ] == sent
            ahead = 0
            for op, operand in program.instructions:
                if operand in sent and program is not sender:
                    ahead += {Op.POST: 1, Op.WAIT: -1}[op]
                    assert ahead in (0, 1)


def messages(program: Program, op: Op) -> Iterator[Message]:
    return (operand for kind, operand in program.instructions if kind is op and isinstance(operand, Message))


@pytest.mark.parametrize("exchange", Exchange)
@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_complete_in_any_interleaving_or_in_none(name: str, exchange: Exchange) -> None:
    """Programs that the rules accept under an exchange complete, as the deadlock check says."""
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
    """Leave out each instruction in turn."""
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
        places = [index for index, instruction in enumerate(program) if instruction.op is op]
        for first, second in pairwise(places):
            earlier, later = program[first].operand, program[second].operand
            if isinstance(earlier, Message) and isinstance(later, Message) and earlier.parties == later.parties:
                swapped = list(program)
                swapped[first], swapped[second] = Instruction(op, later), Instruction(op, earlier)
                assert fault_of(schedule, [*programs[:rank], swapped, *programs[rank + 1 :]], first)
                changed += 1
    assert changed > 4


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Draw any order of ready computations; shards keep one order on all ranks."""
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
    counts: dict[int, int] = {}
    rows: list[list[Action]] = [[] for _ in range(p)]

    def is_ready(action: Action) -> bool:
        value = dependencies.operand_of(action)
        return value == NOTHING or counts.get(value, 0) == len(dependencies.route(value).makers)

    while ready := [queue for queue in queues if queue and is_ready(queue[0])]:
        action = rng.choice(ready).pop(0)
        counts[dependencies.value_of(action)] = counts.get(dependencies.value_of(action), 0) + 1
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


RELEASING: dict[str, Callable[[], Schedule]] = {
    **{
        f"{name}, {v} chunks": partial(build, ScheduleConfig(name, 4, 8, num_chunks=v, balance=BalanceConfig()))
        for name, family in FAMILIES.items()
        for v in range(family.min_chunks, min(family.max_chunks or 2, 2) + 1)
    },
    **{
        f"vocabulary {vocabulary.value}": partial(build, ScheduleConfig("1f1b", 4, 9, vocabulary=vocabulary))
        for vocabulary in (Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED)
    },
    "v-flat": partial(v_flat, 3, 4),
    "far ahead": far_ahead,
    "one rank": lambda: read_csv("# bpipe schedule=a microbatches=2 stage_to_rank=0\n0F0,0F1,0B1,0B0\n"),
}


@pytest.fixture(params=RELEASING)
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return RELEASING[request.param]()


def test_the_same_is_done_in_the_same_order_but_for_letting_go(schedule: Schedule) -> None:
    for judged, run in zip(lower(schedule, Exchange.POSTED), lower_as_run(schedule, Exchange.POSTED), strict=True):
        assert Counter(judged.instructions) == Counter(run.instructions)
        others = [
            [instruction for instruction in program.instructions if not lets_go(instruction, program)]
            for program in (judged, run)
        ]
        assert others[0] == others[1]
        slots = [
            [program.slot_of(index) for index, op in enumerate(program.ops) if op == Op.RUN]
            for program in (judged, run)
        ]
        assert slots[0] == slots[1]
        assert len(run.starts) == len(judged.starts)


def lets_go(instruction: Instruction, program: Program) -> bool:
    if instruction.op is not Op.WAIT or not isinstance(instruction.operand, Message):
        return False
    makers, takers = program.messages.dependencies.route(instruction.operand.value)
    return program.rank in makers and (len(makers) == 1 or program.rank not in takers)


class Arrived(World):
    """A world in which a rank must never wait for what it has sent."""

    def may(self, rank: int, instruction: Instruction) -> bool:
        may = super().may(rank, instruction)
        if lets_go(instruction, self.programs[rank]) and not self.ending[rank]:
            value = instruction.operand.value  # type: ignore[union-attr]
            assert may, f"rank {rank} waits for {instruction.operand}"
            takers = set(self.dependencies.route(value).takers) - {rank}
            assert all(value in self.waited[taker] for taker in takers), f"{instruction.operand} may not have arrived"
        return may


@pytest.mark.parametrize("seed", range(5))
def test_whoever_lets_go_never_waits(schedule: Schedule, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = lower_as_run(schedule, Exchange.POSTED)
    programs = [program.instructions for program in lowered]
    ends = [max(index for index, instruction in enumerate(program) if instruction.op is Op.RUN) for program in programs]

    class Ending(Arrived):
        def __init__(self, schedule: Schedule) -> None:
            super().__init__(schedule)
            self.done, self.programs = [0] * schedule.num_ranks, lowered

        @property
        def ending(self) -> list[bool]:
            """Return by rank whether it has only unanswered sends left to release."""
            return [done > end for done, end in zip(self.done, ends, strict=True)]

        def op(self, rank: int, instruction: Instruction) -> None:
            super().op(rank, instruction)
            self.done[rank] += 1

    monkeypatch.setattr("tests.support.interleaving.World", Ending)
    assert fault_of(schedule, programs, seed) is None


@pytest.mark.parametrize("name", ["1f1b", "1f1b-split", "zb-h1"])
def test_no_more_is_kept_however_many_micro_batches_there_are(name: str) -> None:
    peaks = [most_kept(build(ScheduleConfig(name, 4, m))) for m in (8, 64)]
    assert peaks[0] == peaks[1] <= 8


def most_kept(schedule: Schedule) -> int:
    peak = 0
    for program in lower_as_run(schedule, Exchange.POSTED):
        num_kept = 0
        for instruction in program.instructions:
            num_kept += (instruction.op is Op.SEND) - lets_go(instruction, program)
            peak = max(peak, num_kept)
    return peak


def test_megatrons_loops_wait_as_they_do() -> None:
    schedule = build(ScheduleConfig("1f1b", 4, 8))
    for exchange in (Exchange.MEGATRON_1F1B, Exchange.MEGATRON_INTERLEAVED):
        programs = [
            [program.instructions for program in lowering(schedule, exchange)] for lowering in (lower, lower_as_run)
        ]
        assert programs[0] == programs[1]


SPLIT = (Vocabulary.ONE, Vocabulary.TWO, Vocabulary.INTERLACED)


@pytest.mark.parametrize("vocabulary", SPLIT)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 16)])
def test_of_what_all_shards_share_little_is_kept(p: int, m: int, vocabulary: Vocabulary) -> None:
    """The last rank keeps its output until all ranks have it; each rank keeps its part of a gradient."""
    for program in lower_as_run(build(ScheduleConfig("1f1b", p, m, vocabulary=vocabulary)), Exchange.POSTED):
        dependencies, kept_values = program.messages.dependencies, set[int]()
        peaks: Counter[str] = Counter()
        for op, operand in zip(program.ops, program.operands, strict=True):
            if isinstance(operand, int) and op == Op.WAIT:
                kept_values.discard(operand)
            elif isinstance(operand, int) and op == Op.SEND:
                kept_values.add(operand)
                peaks |= Counter(dependencies.sort(value) for value in kept_values)
        assert peaks["statistics"] == 1
        assert peaks["last gradient"] <= 3
        assert program.rank < p - 1 or peaks["output"] <= 3
        assert not kept_values


LAYOUTS = {
    "one stage": one_pipe([0]),
    "a line": one_pipe(range(4)),
    "round robin": one_pipe([*range(4)] * 3),
    "v": one_pipe([0, 1, 2, 3, 3, 2, 1, 0]),
    "two pipes": Layout(((0, 1, 2, 3), (3, 2, 1, 0))),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_every_forward_once_and_in_order(layout: Layout, num_microbatches: int) -> None:
    schedule = forwards_only(layout, num_microbatches)
    for rank, row in enumerate(schedule.ranks):
        computations = [slot.compute for slot in row if slot.compute is not None]
        for stage in layout.stages_of(rank):
            own = [microbatch for microbatch in range(num_microbatches) if layout.rank_of(stage, microbatch) == rank]
            assert [action for action in computations if action.stage == stage] == [
                Action(stage, Kind.FORWARD, microbatch) for microbatch in own
            ]
        assert all(not slot.transfers for slot in row)
    assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.POSTED)


def test_round_robin_fills_and_then_never_waits() -> None:
    """A rank with two chunks computes two forwards per micro-batch."""
    schedule = forwards_only(one_pipe([*range(4)] * 2), 16)
    assert {len(row) for row in schedule.ranks} <= set(range(2 * 16, 2 * 16 + 8))


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_shards_of_the_output_layer_follow_the_last_stage_in_one_order(num_microbatches: int) -> None:
    layout = Layout((tuple(range(4)),), Vocabulary.ONE)
    schedule = forwards_only(layout, num_microbatches)
    shards = [[action for action in computed(schedule, rank) if action.kind is not Kind.FORWARD] for rank in range(4)]
    assert [[(action.kind, action.microbatch) for action in of_rank] for of_rank in shards] == [
        [(o.kind, o.microbatch) for o in shards[0]]
    ] * 4
    assert {action.stage for action in shards[3]} == {3}
    assert len(shards[0]) == 2 * num_microbatches
    assert not blocked_ranks(schedule, WaitLevel.ONE_QUEUE, Exchange.POSTED)


def computed(schedule: Schedule, rank: int) -> list[Action]:
    return [slot.compute for slot in schedule.ranks[rank] if slot.compute is not None]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_shards_of_the_embedding_come_before_the_first_stage(num_microbatches: int) -> None:
    schedule = forwards_only(Layout((tuple(range(4)),), Vocabulary.ONE, input_shards=True), num_microbatches)
    for rank in range(4):
        lookups = [action for action in computed(schedule, rank) if action.kind is Kind.INPUT_FORWARD]
        assert lookups == [Action(rank, Kind.INPUT_FORWARD, microbatch) for microbatch in range(num_microbatches)]
    first = computed(schedule, 0)
    for microbatch in range(num_microbatches):
        assert first.index(Action(0, Kind.INPUT_FORWARD, microbatch)) < first.index(Action(0, Kind.FORWARD, microbatch))
    assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.POSTED)
