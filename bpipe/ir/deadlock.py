"""Run a schedule's messages with senders and receivers that wait for each other. In: a Schedule. Out: where it gets stuck, if it does.

Every rank's order of operations is derived from the schedule: `steps` gives the computations and the transfers that start around each;
between two computations the rank sends what the first made and receives what the second needs.

- With one stage a rank it receives as late as it can, just before the computation, and an exchange with one neighbour in both directions
  is one operation; towards different neighbours it first sends, then receives. For 1F1B these are Megatron's own calls.
- With several stages a rank the ring of neighbours would block itself that way. There it receives, in one operation with what it sends,
  all that its neighbours send until its next computation, as Megatron's interleaved loop does.

A message passes when both ends have arrived at it, and until then an end that waits for it goes no further. Every receive names its
sender, so one execution that completes means that all do, and fewer waits never block more. `Waits` says how much else waits for transfers.
Knows no tensors, no seconds.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule
from bpipe.passes.steps import Step, steps

_FORWARD, _BACKWARD, _INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT
_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD


class Waits(enum.IntEnum):
    """When a rank waits for the transfers it has started, beyond what their data needs."""

    ASYNCHRONOUS = 0
    AFTER_EXCHANGES = 1  # the device is synchronised after every exchange with a neighbouring stage, Megatron's batch_p2p_sync
    IN_EVERY_OPERATION = 2  # and inside every computation, as some communication libraries and allocators do


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: it waits for `message` around the computation at `slot` and its other end is on `peer`."""

    rank: int
    slot: int
    message: str
    peer: int


def blocked_ranks(schedule: Schedule, waits: Waits = Waits.IN_EVERY_OPERATION) -> tuple[Blocked, ...]:
    """Every rank that never finishes; empty for a schedule that cannot deadlock."""
    messages = _Messages(schedule)
    programs = [_Program(schedule, rank, messages, waits) for rank in range(schedule.num_ranks)]
    positions = _execute([program.operations for program in programs], messages.total)
    return tuple(
        programs[rank].blocked_at(position) for rank, position in enumerate(positions) if position < len(programs[rank].operations)
    )


def _execute(programs: list[list[int]], num_messages: int) -> list[int]:
    """Where each rank's program ends up. A program is a list of operations: n >= 0 arrives at message n, ~n waits until both have."""
    arrived = bytearray(num_messages)
    positions = [0] * len(programs)
    waiting: dict[int, int] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        operations, position = programs[rank], positions[rank]
        while position < len(operations):
            operation = operations[position]
            if operation >= 0:
                arrived[operation] += 1
                if arrived[operation] == 2 and operation in waiting:
                    runnable.append(waiting.pop(operation))
            elif arrived[~operation] < 2:
                waiting[~operation] = rank
                break
            position += 1
        positions[rank] = position
    return positions


class _Messages:
    """Number every message: a forward's output, a backward's gradient, and the n-th transfer from one rank to another."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.num_microbatches = schedule.num_microbatches
        self.first_gradient = schedule.num_stages * schedule.num_microbatches
        self.total = 2 * self.first_gradient
        self.transfers: dict[tuple[int, int, int], int] = {}
        self._made_at: dict[int, int] = {}

    def output(self, action: Action) -> int | None:
        """The message that carries what a computation made, None where it stays on its rank."""
        stage_to_rank, stage = self.schedule.stage_to_rank, action.stage
        if action.kind is _FORWARD:
            to = stage + 1
            key = stage * self.num_microbatches + action.microbatch
        elif action.kind is _BACKWARD or action.kind is _INPUT:
            to = stage - 1
            key = self.first_gradient + stage * self.num_microbatches + action.microbatch
        else:
            return None
        if not 0 <= to < len(stage_to_rank) or stage_to_rank[to] == stage_to_rank[stage]:
            return None
        return key

    def input(self, action: Action) -> int | None:
        """The message a computation needs, None where it needs none from another rank."""
        stage_to_rank, stage = self.schedule.stage_to_rank, action.stage
        if action.kind is _FORWARD:
            source = stage - 1
            key = source * self.num_microbatches + action.microbatch
        elif action.kind is _BACKWARD or action.kind is _INPUT:
            source = stage + 1
            key = self.first_gradient + source * self.num_microbatches + action.microbatch
        else:
            return None
        if not 0 <= source < len(stage_to_rank) or stage_to_rank[source] == stage_to_rank[stage]:
            return None
        return key

    def transfer(self, sender: int, receiver: int, nth: int) -> int:
        """The n-th transfer from one rank to the other: transfers of one direction pass in the order in which each end starts them."""
        key = (sender, receiver, nth)
        if key not in self.transfers:
            self.transfers[key] = self.total
            self.total += 1
        return self.transfers[key]

    def made_at(self) -> dict[int, int]:
        """The slot that makes each message."""
        if not self._made_at:
            for row in self.schedule.ranks:
                for slot, cell in enumerate(row):
                    output = None if cell.compute is None else self.output(cell.compute)
                    if output is not None:
                        self._made_at[output] = slot
        return self._made_at

    def peer(self, rank: int, message: int) -> int:
        """The rank at the other end."""
        if message >= 2 * self.first_gradient:
            sender, receiver, _ = next(key for key, value in self.transfers.items() if value == message)
            return sender if rank == receiver else receiver
        is_gradient, key = divmod(message, self.first_gradient)
        stage = key // self.num_microbatches
        ends = {self.schedule.stage_to_rank[stage], self.schedule.stage_to_rank[stage + (-1 if is_gradient else 1)]}
        return min(ends - {rank})

    def name(self, message: int) -> str:
        """The message in words."""
        if message >= 2 * self.first_gradient:
            sender, receiver, nth = next(key for key, value in self.transfers.items() if value == message)
            return f"transfer {nth} from rank {sender} to rank {receiver}"
        is_gradient, key = divmod(message, self.first_gradient)
        stage, microbatch = divmod(key, self.num_microbatches)
        return f"the {'gradient' if is_gradient else 'output'} of {stage}{'B' if is_gradient else 'F'}{microbatch}"


class _Program:
    """One rank's operations, in order, and the slot each belongs to."""

    def __init__(self, schedule: Schedule, rank: int, messages: _Messages, waits: Waits) -> None:
        self.rank, self.messages, self.waits = rank, messages, waits
        self.partner = -1 if schedule.partners is None else schedule.partners[rank]
        self.operations: list[int] = []
        self.outstanding: list[int] = []
        self.sent = self.received = 0
        self.hosted: dict[tuple[int, int], int] = {}
        self.loading: dict[tuple[int, int], int] = {}
        self.slots = [-1, *(slot for slot, cell in enumerate(schedule.ranks[rank]) if cell.compute is not None)]
        self.starts: list[int] = []
        program = steps(schedule, rank)
        arrivals = _arrivals(schedule, rank, self.slots, messages) if schedule.num_chunks > 1 else None
        for index, step in enumerate(program):
            self.starts.append(len(self.operations))
            if arrivals is None:
                self._exchange_late(program[index - 1].compute if index else None, step.compute)
            self._step(step)
            if arrivals is not None:
                output = None if step.compute is None else messages.output(step.compute)
                self._exchange(arrivals[index] if output is None else [output, *arrivals[index]])
        if arrivals is None:
            self._exchange_late(program[-1].compute, None)
        self._wait_all()

    def _exchange_late(self, over: Action | None, coming: Action | None) -> None:
        output = None if over is None else self.messages.output(over)
        needed = None if coming is None else self.messages.input(coming)
        if output is not None and needed is not None and self.messages.peer(self.rank, output) == self.messages.peer(self.rank, needed):
            self._exchange([output, needed])
            return
        if output is not None:
            self._exchange([output])
        if needed is not None:
            self._exchange([needed])

    def _exchange(self, messages: list[int]) -> None:
        if messages:
            self.operations += messages
            self.operations += [~message for message in messages]
            if self.waits >= Waits.AFTER_EXCHANGES:
                self._wait_all()

    def _step(self, step: Step) -> None:
        evicting = [self._start(action) for action in step.before]
        compute = step.compute
        if compute is not None:
            if self.loading and compute.kind is not _FORWARD and (compute.stage, compute.microbatch) in self.loading:
                self.operations.append(~self.loading.pop((compute.stage, compute.microbatch)))
            if self.waits >= Waits.IN_EVERY_OPERATION:
                self._wait_all()
        # What was evicted beside a computation is freed right after it.
        self.operations += [~message for message, action in zip(evicting, step.before, strict=True) if action.kind is _EVICT]
        for action in step.after:
            self._start(action)

    def _start(self, action: Action) -> int:
        """Arrive at a transfer. A RETURN first waits for what its HOST brings; a LOAD is waited for by its backward."""
        key = (action.stage, action.microbatch)
        if action.kind is _EVICT or action.kind is _RETURN:
            message = self.messages.transfer(self.rank, self.partner, self.sent)
            self.sent += 1
            if action.kind is _RETURN and key in self.hosted:
                self.operations.append(~self.hosted.pop(key))
        else:
            message = self.messages.transfer(self.partner, self.rank, self.received)
            self.received += 1
            (self.hosted if action.kind is _HOST else self.loading)[key] = message
        self.operations.append(message)
        self.outstanding.append(message)
        return message

    def _wait_all(self) -> None:
        if self.outstanding:
            self.operations += [~message for message in self.outstanding]
            self.outstanding.clear()

    def blocked_at(self, position: int) -> Blocked:
        """Where the rank stands when it stops at `position`."""
        slot = self.slots[bisect_right(self.starts, position) - 1]
        message = ~self.operations[position]
        return Blocked(self.rank, max(slot, 0), self.messages.name(message), self.messages.peer(self.rank, message))


def _arrivals(schedule: Schedule, rank: int, slots: list[int], messages: _Messages) -> list[list[int]]:
    """For each of the rank's computations (the start of the loop first), the messages its neighbours make until the next."""
    arrivals: list[list[int]] = [[] for _ in slots]
    made_at = messages.made_at()
    for slot in slots[1:]:
        compute = schedule.ranks[rank][slot].compute
        needed = None if compute is None else messages.input(compute)
        if needed is not None and needed in made_at:
            arrivals[bisect_right(slots, made_at[needed]) - 1].append(needed)
    return arrivals
