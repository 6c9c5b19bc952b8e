"""Let go of what a rank has sent as soon as it must have arrived. In: a Schedule and an `Exchange`. Out: its programs as they are run.

Whoever judges or simulates a schedule takes them as `passes.lower` makes them: what was sent is waited for at the end, where nobody waits.

What is sent is kept until it is waited for, and a backend may not say by itself when it has arrived. A message that its receiver sends only
behind taking it says so: to wait then takes no time, and blocks nobody. So does what all shards make together, of what each of them had to
take before its part. Megatron's loops wait for each message at once. Knows no tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from bpipe.ir.action import Action
from bpipe.ir.needs import Route
from bpipe.ir.program import Do, Exchange, Program, Transfer
from bpipe.ir.schedule import Schedule
from bpipe.passes.lower import lower

_SEND, _WAIT = int(Do.SEND), int(Do.WAIT)


# By message: where a rank first waits for it, and where it sends it.
_Positions = tuple[dict[int, int], dict[int, int]]


def as_run(schedule: Schedule, exchange: Exchange) -> tuple[Program, ...]:
    """Of our executor's, what is answered is waited for right behind its answer, and the rest at the end."""
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
    """By rank: what it has sent, by the message that comes from its receiver next."""
    answers: list[dict[int, list[int]]] = [{} for _ in programs]
    for program in programs:
        rank, route = program.rank, program.messages.needs.route
        taken: dict[int, list[int]] = {}
        for do, what in zip(program.dos, program.whats, strict=True):
            if do not in (_SEND, _WAIT) or not isinstance(what, int):
                continue
            makers, takers = route(what)
            if len(makers) != 1 or len(takers) != 1:
                # Everybody has a part in a collective.
                continue
            if do == _WAIT and takers[0] == rank:
                taken.setdefault(makers[0], []).append(what)
            elif do == _SEND and takers[0] in taken:
                answers[takers[0]][what] = taken.pop(takers[0])
    return answers


def _answered_together(programs: Sequence[Program]) -> list[dict[int, list[int]]]:
    """The same of what several ranks take, or make: by what comes later from all who take it, each of whom has taken it before its part."""
    positions = [_positions(program) for program in programs]
    answers: list[dict[int, list[int]]] = [{} for _ in programs]
    for program, (waited, sent) in zip(programs, positions, strict=True):
        rank, route = program.rank, program.messages.needs.route
        received = sorted((place, value) for value, place in waited.items() if rank in route(value).takers)
        for value, place in sent.items():
            makers, takers = route(value)
            between_two, waited_anyway = len(makers) == len(takers) == 1, len(makers) > 1 and rank in takers
            if between_two or waited_anyway:
                continue
            others = set(takers) - {rank}
            later = (message for _, message in received[bisect_right(received, (place, -1)) :])
            answer = next((one for one in later if _is_answer(one, value, others, positions, route)), None)
            if answer is not None:
                answers[rank].setdefault(answer, []).append(value)
    return answers


def _is_answer(message: int, value: int, takers: Set[int], positions: Sequence[_Positions], route: Callable[[int], Route]) -> bool:
    """Whether all who take the value have a part in the message, each behind taking it."""
    return takers <= set(route(message).makers) and all(positions[rank][0][value] < positions[rank][1].get(message, -1) for rank in takers)


def _positions(program: Program) -> _Positions:
    """Where a rank first waits for each message, and where it sends."""
    waited: dict[int, int] = {}
    sent: dict[int, int] = {}
    for place, (do, what) in enumerate(zip(program.dos, program.whats, strict=True)):
        if isinstance(what, int) and do in (_SEND, _WAIT):
            (sent if do == _SEND else waited).setdefault(what, place)
    return waited, sent


def _moved(program: Program, answers: Mapping[int, Sequence[int]]) -> Program:
    dos = bytearray()
    whats: list[Action | int | Transfer] = []
    # Where each instruction stands now.
    places: list[int] = []
    kept: set[int] = set()
    gone: set[int] = set()
    for do, what in zip(program.dos, program.whats, strict=True):
        places.append(len(whats))
        if do == _WAIT and what in gone:
            continue
        dos.append(do)
        whats.append(what)
        if do == _SEND and isinstance(what, int):
            kept.add(what)
        elif do == _WAIT and isinstance(what, int):
            arrived = [value for value in answers.get(what, ()) if value in kept]
            gone.update(arrived)
            # Everybody waits for a collective where it is used and again at the end.
            kept.difference_update(arrived)
            dos += bytes([_WAIT] * len(arrived))
            whats += arrived
    places.append(len(whats))
    return replace(program, dos=bytes(dos), whats=whats, starts=[places[start] for start in program.starts])
