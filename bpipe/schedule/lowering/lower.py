"""Lowering: what each rank does, messages included, as one `Program` per rank.

Computations and transfers are in the order of `schedule.steps`; what passes between ranks follows from
`schedule.dependencies`; the exchange order decides when it is sent, received and waited for. What data needs is always
waited for:

- A computation waits for its operands from other ranks, a backward for the load of its activations.
- The next computation, or a load before it, waits for what was evicted: it takes that memory.
- A RETURN waits for its HOST, a HOST for the RETURN that empties its buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from bpipe.schedule.action import READING, Action, Key, Kind
from bpipe.schedule.dependencies import NOTHING
from bpipe.schedule.host_buffers import Residencies, Residency, evicted_to, host_buffers
from bpipe.schedule.lowering.messages import ALL, NOBODY, Passing, turns_of
from bpipe.schedule.program import Exchange, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule
from bpipe.schedule.steps import Step, each_step

_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD
_RUN, _POST, _SEND, _WAIT, _START, _FINISH = map(int, Op)
# With one neighbour in both directions, to one, and from one.
_BOTH, _GIVE, _TAKE = bytes([_SEND, _POST, _WAIT, _WAIT]), bytes([_SEND, _WAIT]), bytes([_POST, _WAIT])


def lower(schedule: Schedule, exchange: Exchange) -> tuple[Program, ...]:
    """Lower a schedule to one program per rank.

    Args:
        schedule: The schedule to run.
        exchange: When ranks send, receive and wait.

    Returns:
        The instructions of each rank.

    Raises:
        ValueError: Megatron's loops cannot run it: values of more than two ranks or, with one stage per rank,
            computations
            that overlap.
    """
    if exchange is not Exchange.POSTED:
        _check_runnable(schedule, exchange)
    if exchange is Exchange.TORCH:
        return lower_received(schedule)
    passing = Passing(schedule)
    # One rank after the other, because the state of a lowering is as large as its result.
    ranks = (_Lowering(schedule, rank, passing) for rank in range(schedule.num_ranks))
    if exchange is Exchange.MEGATRON_1F1B:
        return tuple(lowering.between() for lowering in ranks)
    if exchange is Exchange.MEGATRON_INTERLEAVED:
        both = zip(ranks, passing.received_behind(), strict=True)
        return tuple(lowering.interleaved(received) for lowering, received in both)
    if exchange is Exchange.MEGATRON_TURNS:
        turns = turns_of(schedule)
        ends = zip(ranks, turns, passing.received_before(turns), strict=True)
        return tuple(lowering.in_turns(own, received) for lowering, own, received in ends)
    return tuple(lowering.posted(inbound) for lowering, inbound in zip(ranks, passing.inbound(), strict=True))


def lower_received(
    schedule: Schedule, received: Sequence[Sequence[Sequence[int]]] | None = None
) -> tuple[Program, ...]:
    """Lower a schedule for torch's runtime.

    Args:
        schedule: The schedule to run.
        received: `received[rank][k]` are the values posted after the rank's k-th cell, before the first if k is 0; by
            default where torch's own list has them.

    Returns:
        The instructions of each rank.
    """
    passing = Passing(schedule)
    ranks = (_Lowering(schedule, rank, passing) for rank in range(schedule.num_ranks))
    both = zip(ranks, passing.listed_by_torch() if received is None else received, strict=True)
    return tuple(lowering.listed(after) for lowering, after in both)


def _check_runnable(schedule: Schedule, exchange: Exchange) -> None:
    overlapped = next((cell for row in schedule.ranks for cell in row if cell.overlapped is not None), None)
    if overlapped is not None and exchange is Exchange.MEGATRON_1F1B:
        raise ValueError(
            f"{overlapped.compute} and {overlapped.overlapped} overlap, but the exchange {exchange.value} handles one "
            "computation at a time: choose another exchange, or a schedule without overlaps"
        )
    if schedule.layout.shard_kinds:
        raise ValueError(
            f"the exchanges of {exchange.value} are between two ranks, but shards of the vocabulary need "
            f"{Exchange.POSTED.value}"
        )


@functools.cache
def _exchanged(num_sent: int, num_received: int) -> bytes:
    """Return the operations that send and receive messages at once."""
    return bytes([_SEND] * num_sent + [_POST] * num_received + [_WAIT] * (num_sent + num_received))


class _Lowering:
    """The instructions of one rank while they are made, and those of its transfers not waited for yet."""

    def __init__(self, schedule: Schedule, rank: int, passing: Passing) -> None:
        self.rank, self.passing = rank, passing
        self.needed, self.needed_from = passing.needed[rank], passing.needed_from[rank]
        self.made, self.made_for = passing.made[rank], passing.made_for[rank]
        self.schedule, self.layout = schedule, schedule.layout
        self.evicted_to = evicted_to(schedule, rank)
        self.away: dict[Key, int] = {}
        row = schedule.ranks[rank]
        self.steps = each_step(schedule, rank)
        self.slots = [0, *(slot for slot, cell in enumerate(row) if cell.compute is not None), len(row) - 1]
        # By residency, made when the first is hosted here: half of the ranks host nothing.
        self.buffers: dict[Residency, int] = {}
        self.ops = bytearray()
        self.operands: list[Action | int | Transfer] = []
        self.starts: list[int] = []
        self.leaving: list[Transfer] = []
        self.loading: dict[Key, Transfer] = {}
        self.hosted: dict[Key, Transfer] = {}
        self.residencies = Residencies()
        # By host buffer: the RETURN that empties it.
        self.emptied: dict[int, Transfer] = {}

    def _program(self) -> Program:
        """Wait for what was given back, and return the program."""
        for transfer in self.emptied.values():
            self._add(_FINISH, transfer)
        return Program(self.rank, bytes(self.ops), self.operands, self.starts, self.slots, self.passing.messages)

    def between(self) -> Program:
        """Return the program of Megatron's loop for one stage per rank, which exchanges between two computations."""
        ops, operands, add_start = self.ops, self.operands, self.starts.append
        left, left_to = NOTHING, NOBODY
        # The loop's start and end compute nothing.
        ends = [*self.needed, NOTHING], [*self.needed_from, NOBODY], [*self.made, NOTHING], [*self.made_for, NOBODY]
        self.starts.append(0)
        self._step(next(self.steps))
        for step, value, source, made, made_for in zip(self.steps, *ends, strict=True):
            add_start(len(operands))
            if left_to == source:
                if source != NOBODY:
                    ops += _BOTH
                    operands += (left, value, left, value)
            else:
                if left_to != NOBODY:
                    ops += _GIVE
                    operands += (left, left)
                if source != NOBODY:
                    ops += _TAKE
                    operands += (value, value)
            self._step(step)
            left, left_to = made, made_for
        return self._program()

    def interleaved(self, received: Sequence[list[int]]) -> Program:
        """Return the program of Megatron's loop for several stages per rank, which exchanges after a computation."""
        ops, operands = self.ops, self.operands
        done = 0
        for step, inputs in zip(self.steps, [*received, []], strict=True):
            self.starts.append(len(operands))
            self._step(step)
            ends = range(done, done + len(step.computations))
            done = ends.stop
            outputs = [self.made[number] for number in ends if self.made_for[number] != NOBODY]
            if outputs or inputs:
                ops += _exchanged(len(outputs), len(inputs))
                both = [*outputs, *inputs]
                operands += both
                operands += both
        return self._program()

    def in_turns(self, turns: Sequence[int], received: Sequence[list[int]]) -> Program:
        """Return the program of the same loop without overlap, which exchanges between turns."""
        left: list[int] = []
        begun, done = -1, 0
        self.starts.append(0)
        self._step(next(self.steps))
        for step in self.steps:
            self.starts.append(len(self.operands))
            # The loop's end is a turn that computes nothing.
            turn = turns[done] if step.compute is not None else turns[-1] + 1
            if turn != begun:
                both = [*left, *received[turn]]
                self.ops += _exchanged(len(left), len(received[turn]))
                self.operands += both + both
                left, begun = [], turn
            self._step(step)
            ends = range(done, done + len(step.computations))
            left += [self.made[number] for number in ends if self.made_for[number] != NOBODY]
            done = ends.stop
        return self._program()

    def posted(self, inbound: dict[int, list[int]]) -> Program:
        """Return the program of our executor: on every channel receives are posted one ahead, in the sender's order."""
        row = self.schedule.ranks[self.rank]
        if any(cell.transfers or cell.overlapped for cell in row):
            return self._posted_with_transfers(inbound)
        return self._posted_alone([cell.compute for cell in row if cell.compute is not None], inbound)

    def listed(self, received: Sequence[Sequence[int]]) -> Program:
        """Return the program of torch's own runtime, with receives where its list has them."""
        sent: list[int] = []
        done = cell = 0
        for step in self.steps:
            self.starts.append(len(self.operands))
            if step.compute is None:
                self._step(step)
            else:
                cell += 1
                together = (done,) if step.overlapped is None else (done, done + 1)
                done += len(together)
                for number in together:
                    if self.needed_from[number] != NOBODY:
                        self._add(_WAIT, self.needed[number])
                outputs = [self.made[number] for number in together if self.made_for[number] != NOBODY]
                self._step(step, outputs)
                sent += outputs
            if len(self.starts) - 1 == cell:
                for value in received[cell]:
                    self._add(_POST, value)
        self.ops += bytes([_WAIT] * len(sent))
        self.operands += sent
        return self._program()

    def _posted_with_transfers(self, inbound: dict[int, list[int]]) -> Program:
        taken = dict.fromkeys(inbound, 0)
        early: set[int] = set()
        sent: list[int] = []
        done = 0
        for step in self.steps:
            self.starts.append(len(self.operands))
            if step.compute is None:
                self._step(step)
                if len(self.starts) == 1:
                    for messages in inbound.values():
                        self._add(_POST, messages[0])
                continue
            together = (done,) if step.overlapped is None else (done, done + 1)
            done += len(together)
            for number in together:
                if self.needed_from[number] != NOBODY:
                    self._take(self.needed[number], self.needed_from[number], inbound, taken, early)
            outputs = [self.made[number] for number in together if self.made_for[number] != NOBODY]
            self._step(step, outputs)
            sent += outputs
        self.ops += bytes([_WAIT] * len(sent))
        self.operands += sent
        return self._program()

    def _posted_alone(self, computations: Sequence[Action], inbound: dict[int, list[int]]) -> Program:
        """Return the program if nothing moves or overlaps, as in most schedules of a search."""
        taken = dict.fromkeys(inbound, 0)
        early: set[int] = set()
        sent: list[int] = []
        ops, operands, add_start = self.ops, self.operands, self.starts.append
        add_op, add_operand = ops.append, operands.append
        add_start(0)
        for messages in inbound.values():
            self._add(_POST, messages[0])
        ends = self.needed, self.needed_from, self.made, self.made_for
        for action, value, source, made, made_for in zip(computations, *ends, strict=True):
            add_start(len(operands))
            if source != NOBODY:
                self._take(value, source, inbound, taken, early)
            add_op(_RUN)
            add_operand(action)
            if made_for != NOBODY:
                add_op(_SEND)
                add_operand(made)
                sent.append(made)
        add_start(len(operands))
        ops += bytes([_WAIT] * len(sent))
        operands += sent
        return self._program()

    def _take(
        self, value: int, source: int, inbound: dict[int, list[int]], taken: dict[int, int], early: set[int]
    ) -> None:
        """Wait for a value, and before it for all earlier ones of its sender."""
        channel = source if source != ALL else self.passing.channel(value, source)
        messages = inbound.get(channel)
        if messages is None or (source == ALL and value not in messages):
            # The rank has a part in making it, and has sent that.
            assert source == ALL, "what a rank needs and does not make is on one of its channels"
            self._add(_WAIT, value)
            return
        if value in early:
            early.remove(value)
            return
        ops, operands, place = self.ops, self.operands, taken[channel]
        while True:
            passed = messages[place]
            place += 1
            ops.append(_WAIT)
            operands.append(passed)
            if place < len(messages):
                ops.append(_POST)
                operands.append(messages[place])
            if passed == value:
                break
            early.add(passed)
        taken[channel] = place

    def _add(self, op: int, operand: Action | int | Transfer) -> None:
        self.ops.append(op)
        self.operands.append(operand)

    def _step(self, step: Step, sent: Sequence[int] = ()) -> None:
        """Add the transfers and computations of a step, with `sent` directly after these."""
        compute, before, after, overlapped = step
        if self.leaving:
            self._finish_evictions()
        for action in before:
            self._start(action)
        if self.loading:
            self._finish_loads(step.computations)
        if compute is not None:
            self.ops.append(_RUN)
            self.operands.append(compute)
        if overlapped is not None:
            self._add(_RUN, overlapped)
        for value in sent:
            self.ops.append(_SEND)
            self.operands.append(value)
        for action in after:
            if action.kind is _LOAD:
                self._finish_evictions()
            self._start(action)

    def _finish_loads(self, needed_by: Sequence[Action]) -> None:
        for action in needed_by:
            if action.kind in READING and action.key in self.loading:
                self._add(_FINISH, self.loading.pop(action.key))

    def _finish_evictions(self) -> None:
        for transfer in self.leaving:
            self._add(_FINISH, transfer)
        self.leaving.clear()

    def _start(self, action: Action) -> None:
        kind, key = action.kind, action.key
        if kind is _EVICT:
            self.away[key] = next(self.evicted_to).rank
        other = self.away.get(key, self.rank) if kind is _EVICT or kind is _LOAD else self.layout.rank_of(*key)
        sends = kind is _EVICT or kind is _RETURN
        transfer = Transfer(action, self.rank, other) if sends else Transfer(action, other, self.rank)
        if kind is _HOST:
            emptied = self.emptied.pop(self._buffer(action), None)
            if emptied is not None:
                self._add(_FINISH, emptied)
            self.hosted[key] = transfer
        elif kind is _RETURN:
            # Rules refuse a schedule that gives back what it does not host, but the check may lower it before.
            if key in self.hosted:
                self._add(_FINISH, self.hosted.pop(key))
                self.emptied[self._buffer(action)] = transfer
        elif kind is _LOAD:
            self.loading[key] = transfer
        else:
            self.leaving.append(transfer)
        self._add(_START, transfer)

    def _buffer(self, action: Action) -> int:
        if not self.buffers:
            self.buffers = host_buffers(self.schedule, self.rank)
        return self.buffers[self.residencies.of(action)]
