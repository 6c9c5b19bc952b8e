"""Run programs slowly and obviously: one instruction of one rank at a time, in any order.

`fault_of` returns what went wrong, or None. It shares no code with the deadlock check, the simulator or the executor. A
message or transfer passes when all its ends have reached it. Only their order distinguishes messages from one rank to
another, and collectives of one sort and sender.
"""

import random
from collections.abc import Sequence

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.program import Instruction, Message, Op, Transfer
from bpipe.schedule.schedule import Schedule

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Wrong(Exception):
    """An instruction did something that is not allowed."""


def fault_of(schedule: Schedule, programs: Sequence[Sequence[Instruction]], seed: int) -> str | None:
    """Run all programs to their end, with the next rank drawn at random; return what went wrong.

    None if every computation had what it needs and nothing is left over.
    """
    world = World(schedule)
    positions = [0] * len(programs)
    rng = random.Random(seed)
    try:
        while True:
            able = [
                rank
                for rank, program in enumerate(programs)
                if positions[rank] < len(program) and world.may(rank, program[positions[rank]])
            ]
            if not able:
                break
            rank = rng.choice(able)
            world.op(rank, programs[rank][positions[rank]])
            positions[rank] += 1
        stuck = [
            f"rank {rank} at {program[positions[rank]]}"
            for rank, program in enumerate(programs)
            if positions[rank] < len(program)
        ]
        if stuck:
            raise Wrong(f"stuck: {', '.join(stuck)}")
        world.finish()
    except Wrong as error:
        return str(error)
    return None


class World:
    """The state of all ranks."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.dependencies = schedule, Dependencies(schedule.layout, schedule.num_microbatches)
        self.buffers = [num_host_buffers(schedule, rank) for rank in range(schedule.num_ranks)]
        self.ran: list[set[Action]] = [set() for _ in schedule.ranks]
        # By rank: values whose messages have begun, and those that were waited for.
        self.begun: list[set[int]] = [set() for _ in schedule.ranks]
        self.waited: list[set[int]] = [set() for _ in schedule.ranks]
        # By channel, then by rank: the values, in order.
        self.channels: dict[object, dict[int, list[int]]] = {}
        # By direction, then by rank: transfers started, in order; and the number of each half, by its identity.
        self.moves: dict[tuple[int, int], dict[int, list[Transfer]]] = {}
        self.halves: dict[int, tuple[tuple[int, int], int]] = {}
        self.unfinished: list[dict[int, Transfer]] = [{} for _ in schedule.ranks]
        self.away: set[tuple[int, int]] = set()
        # For each eviction of a micro-batch: the forwards that its evictor has run before it sends the size.
        self.measured_by: dict[tuple[int, int], list[set[Action]]] = {}
        for row in schedule.ranks:
            first: dict[int, Action] = {}
            for cell in row:
                for action in cell.transfers:
                    if action.kind is Kind.EVICT:
                        self.measured_by.setdefault((action.stage, action.microbatch), []).append(set(first.values()))
                for action in cell.computations:
                    if action.kind is Kind.FORWARD:
                        first.setdefault(action.stage, action)
        self.hosted: list[set[tuple[int, int]]] = [set() for _ in schedule.ranks]
        self.arrived: list[set[tuple[int, int]]] = [set() for _ in schedule.ranks]

    def may(self, rank: int, instruction: Instruction) -> bool:
        """Whether the instruction can run without waiting."""
        op, operand = instruction
        if op is Op.WAIT:
            assert isinstance(operand, Message)
            return all(operand.value in self.begun[party] for party in operand.parties)
        if op is Op.FINISH and id(operand) in self.halves:
            assert isinstance(operand, Transfer)
            direction, nth = self.halves[id(operand)]
            return all(len(self.moves[direction].get(end, ())) > nth for end in set(direction))
        if op is Op.START and isinstance(operand, Transfer) and operand.action.kind is Kind.HOST:
            # The host knows the sizes of all earlier stages, even of those that are never evicted, which is stricter
            # than necessary.
            return self.measured_by[operand.action.stage, operand.action.microbatch][0] <= self.ran[operand.sender]
        return True

    def op(self, rank: int, instruction: Instruction) -> None:
        op, operand = instruction
        if isinstance(operand, Action):
            self.compute(rank, operand)
        elif isinstance(operand, Transfer):
            (self.start if op is Op.START else self.arrive)(rank, operand)
        elif op is Op.WAIT:
            if operand.value not in self.begun[rank]:
                raise Wrong(f"rank {rank} waits for {operand} but has not begun it")
            self.waited[rank].add(operand.value)
        else:
            self.begin(rank, op, operand)

    def compute(self, rank: int, action: Action) -> None:
        value = self.dependencies.operand_of(action)
        if value != NOTHING:
            makers = self.dependencies.route(value).makers
            if set(makers) != {rank} and value not in self.waited[rank]:
                raise Wrong(f"{action} has not waited for {self.dependencies.describe(value)}")
            if any(not self.has_made(maker, value) for maker in makers):
                raise Wrong(f"{action} comes before {self.dependencies.describe(value)} is made")
        if action.kind in BACKWARDS:
            if Action(action.stage, Kind.FORWARD, action.microbatch) not in self.ran[rank]:
                raise Wrong(f"{action} comes before its forward")
            if (action.stage, action.microbatch) in self.away:
                raise Wrong(f"{action} comes before its load")
        self.ran[rank].add(action)

    def has_made(self, rank: int, value: int) -> bool:
        return any(self.dependencies.value_of(action) == value for action in self.ran[rank])

    def begin(self, rank: int, op: Op, message: Message) -> None:
        if message.value in self.begun[rank]:
            raise Wrong(f"rank {rank} begins {message} twice")
        is_maker = rank in self.dependencies.route(message.value).makers
        if is_maker != (op is Op.SEND) or (is_maker and not self.has_made(rank, message.value)):
            raise Wrong(f"rank {rank} cannot {op.name} {message}")
        self.begun[rank].add(message.value)
        sort = message.value // self.schedule.num_microbatches
        channel = (sort, self.dependencies.route(message.value).makers) if message.is_collective else message.parties
        ends = self.channels.setdefault(channel, {})
        ends.setdefault(rank, []).append(message.value)
        nth = len(ends[rank]) - 1
        if any(len(values) > nth and values[nth] != message.value for values in ends.values()):
            raise Wrong(f"{message} meets another message on its way")

    def start(self, rank: int, half: Transfer) -> None:
        direction, kind = (half.sender, half.receiver), half.action.kind
        key = half.action.stage, half.action.microbatch
        if kind is Kind.HOST:
            self.measured_by[key].pop(0)
        if kind is Kind.EVICT and (key in self.away or Action(key[0], Kind.FORWARD, key[1]) not in self.ran[rank]):
            raise Wrong(f"{half} has nothing to evict")
        if kind is Kind.RETURN and key not in self.arrived[rank]:
            raise Wrong(f"{half} returns what has not arrived")
        if kind is Kind.HOST and len(self.hosted[rank]) == self.buffers[rank]:
            raise Wrong(f"{half} has no empty buffer")
        if kind is Kind.EVICT:
            self.away.add(key)
        elif kind is Kind.HOST:
            self.hosted[rank].add(key)
        ends = self.moves.setdefault(direction, {})
        ends.setdefault(rank, []).append(half)
        nth = len(ends[rank]) - 1
        for transfers in ends.values():
            if len(transfers) > nth and (transfers[nth].action.stage, transfers[nth].action.microbatch) != key:
                raise Wrong(f"{half} meets {transfers[nth]}")
        self.halves[id(half)] = (direction, nth)
        self.unfinished[rank][id(half)] = half

    def arrive(self, rank: int, half: Transfer) -> None:
        if self.unfinished[rank].pop(id(half), None) is None:
            raise Wrong(f"rank {rank} waits for {half} but has not started it")
        key = (half.action.stage, half.action.microbatch)
        if half.action.kind is Kind.LOAD:
            self.away.remove(key)
        elif half.action.kind is Kind.HOST:
            self.arrived[rank].add(key)
        elif half.action.kind is Kind.RETURN:
            self.hosted[rank].remove(key)
            self.arrived[rank].remove(key)

    def finish(self) -> None:
        """Check that everything was computed and waited for."""
        for rank, row in enumerate(self.schedule.ranks):
            if self.ran[rank] != {action for cell in row for action in cell.computations}:
                raise Wrong(f"rank {rank} has not run all its computations")
            if self.begun[rank] != self.waited[rank] or self.unfinished[rank]:
                raise Wrong(f"rank {rank} has not waited for everything that it began")
