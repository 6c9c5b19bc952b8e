"""Confirmed sends: release what a rank has sent as soon as it must have arrived.

A sent value is kept until it is waited for, and a backend may not report by itself when it has arrived. A later message
of the receiver confirms a send, so waiting for that then takes no time and blocks nobody. So does a message that all
shards make together, if each had to receive the value before its part. Megatron's loops wait for each message at once.
The check and the simulation use programs as `lower` makes them, which wait for sends only at the end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from bpipe.schedule.action import Action
from bpipe.schedule.dependencies import Route
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule

_SEND, _WAIT = int(Op.SEND), int(Op.WAIT)

# By message: where a rank first waits for it, and where it sends it.
_Positions = tuple[dict[int, int], dict[int, int]]


def lower_as_run(schedule: Schedule, exchange: Exchange) -> tuple[Program, ...]:
    """Lower a schedule as it is run.

    In our executor's programs each confirmed send is waited for after its confirmation, the others at the end.
    """
    programs = lower(schedule, exchange)
    if exchange is not Exchange.POSTED:
        return programs
    answers = _answers(programs)
    if schedule.layout.shard_kinds:
        for program, together in zip(programs, _answered_together(programs), strict=True):
            for message, sent in together.items():
                answers[program.rank].setdefault(message, []).extend(sent)
    return tuple(_moved(program, answers[program.rank]) for program in programs)


def _answers(programs: Sequence[Program]) -> list[dict[int, list[int]]]:
    """Return, by rank, what it has sent, by the message that comes next from its receiver."""
    answers: list[dict[int, list[int]]] = [{} for _ in programs]
    for program in programs:
        rank, route = program.rank, program.messages.dependencies.route
        taken: dict[int, list[int]] = {}
        for op, operand in zip(program.ops, program.operands, strict=True):
            if op not in (_SEND, _WAIT) or not isinstance(operand, int):
                continue
            makers, takers = route(operand)
            if len(makers) != 1 or len(takers) != 1:
                # A collective.
                continue
            if op == _WAIT and takers[0] == rank:
                taken.setdefault(makers[0], []).append(operand)
            elif op == _SEND and takers[0] in taken:
                answers[takers[0]][operand] = taken.pop(takers[0])
    return answers


def _answered_together(programs: Sequence[Program]) -> list[dict[int, list[int]]]:
    """Return the same of values of several ranks, by a later message that needs all takers after their receipt."""
    positions = [_positions(program) for program in programs]
    answers: list[dict[int, list[int]]] = [{} for _ in programs]
    for program, (waited, sent) in zip(programs, positions, strict=True):
        rank, route = program.rank, program.messages.dependencies.route
        received = sorted((place, value) for value, place in waited.items() if rank in route(value).takers)
        for value, place in sent.items():
            makers, takers = route(value)
            between_two, waited_anyway = len(makers) == len(takers) == 1, len(makers) > 1 and rank in takers
            if between_two or waited_anyway:
                continue
            others = set(takers) - {rank}
            later = (message for _, message in received[bisect_right(received, (place, -1)) :])
            answer = next((message for message in later if _is_answer(message, value, others, positions, route)), None)
            if answer is not None:
                answers[rank].setdefault(answer, []).append(value)
    return answers


def _is_answer(
    message: int, value: int, takers: Set[int], positions: Sequence[_Positions], route: Callable[[int], Route]
) -> bool:
    """Whether all takers of the value have a part in the message, after receiving the value."""
    return takers <= set(route(message).makers) and all(
        positions[rank][0][value] < positions[rank][1].get(message, -1) for rank in takers
    )


def _positions(program: Program) -> _Positions:
    waited: dict[int, int] = {}
    sent: dict[int, int] = {}
    for place, (op, operand) in enumerate(zip(program.ops, program.operands, strict=True)):
        if isinstance(operand, int) and op in (_SEND, _WAIT):
            (sent if op == _SEND else waited).setdefault(operand, place)
    return waited, sent


def _moved(program: Program, answers: Mapping[int, Sequence[int]]) -> Program:
    ops = bytearray()
    operands: list[Action | int | Transfer] = []
    # New place of each instruction.
    places: list[int] = []
    kept: set[int] = set()
    released: set[int] = set()
    for op, operand in zip(program.ops, program.operands, strict=True):
        places.append(len(operands))
        if op == _WAIT and operand in released:
            continue
        ops.append(op)
        operands.append(operand)
        if op == _SEND and isinstance(operand, int):
            kept.add(operand)
        elif op == _WAIT and isinstance(operand, int):
            arrived = [value for value in answers.get(operand, ()) if value in kept]
            released.update(arrived)
            # Every rank waits for a collective where it is used and again at the end.
            kept.difference_update(arrived)
            ops += bytes([_WAIT] * len(arrived))
            operands += arrived
    places.append(len(operands))
    return replace(program, ops=bytes(ops), operands=operands, starts=[places[start] for start in program.starts])
