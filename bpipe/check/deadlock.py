"""Run a schedule's messages with senders and receivers that wait for each other. In: a Schedule. Out: where it gets stuck, if it does.

Every rank's order of operations is derived from the schedule: `steps` gives the computations and the transfers that start around each;
between two computations the rank sends what the first made and receives what the second needs.

- With one stage a rank it receives as late as it can, just before the computation, and an exchange with one neighbour in both directions
  is one operation; towards different neighbours it first sends, then receives. For 1F1B these are Megatron's own calls.
- With several stages a rank the ring of neighbours would block itself that way. There, and where computations overlap, it receives, in one
  operation with what it sends, all that its neighbours send until its next computation, as Megatron's interleaved loop does.
- What stands behind its last computation starts when the last exchange is over.

A message passes when both ends have arrived at it, and until then an end that waits for it goes no further. Every receive names its
sender, so one execution that completes means that all do, and fewer waits never block more. What the data needs is always waited for: a
computation for what it receives and loads and for what was evicted before it, a RETURN for its HOST, a HOST for its slot's RETURN.
`Waits` says how much else waits for transfers.
Knows no tensors, no seconds.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.ir.action import Action, Kind
from bpipe.ir.host_buffers import Hosting, host_buffers
from bpipe.ir.schedule import Schedule
from bpipe.ir.steps import Step, steps

_FORWARD, _BACKWARD, _INPUT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT
_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD

NOBODY = -1


class Waits(enum.IntEnum):
    """When a rank waits for the transfers it has started, beyond what their data needs. Each includes those before it."""

    ASYNCHRONOUS = 0
    AFTER_EXCHANGES = 1  # the device is synchronised after every exchange with a neighbouring stage, Megatron's batch_p2p_sync
    IN_EVERY_OPERATION = 2  # and inside every computation, as some communication libraries and allocators do
    # And before a transfer starts, for the one before it in its direction: with CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a device share
    # one queue, and an operation at its head that its own stream does not let begin holds up whatever was issued after it.
    ONE_QUEUE = 3
    AT_ISSUE = 4  # and for every transfer where it is posted: --bpipe-sync-transfers, or a timer around it that synchronises the device


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
    # What overlaps is torch's, and its messages block nobody.
    late = schedule.num_chunks == 1 and not any(cell.overlapped is not None for row in schedule.ranks for cell in row)
    exchanges = None if late else messages.early_exchanges()
    programs = [_Program(schedule, rank, messages, exchanges, waits) for rank in range(schedule.num_ranks)]
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
        owner = schedule.stage_to_rank
        # The rank of the next stage, NOBODY where there is none or it is the same rank: then nothing is sent.
        self.rank_after = [NOBODY if one == other else other for one, other in zip(owner, (*owner[1:], NOBODY), strict=True)]
        self.rank_before = [NOBODY if one == other else other for one, other in zip(owner, (NOBODY, *owner[:-1]), strict=True)]

    def ends(self, action: Action) -> tuple[int, int, int, int]:
        """The message that carries what a computation made and the rank it goes to, and the one it needs and whence. NOBODY: no message."""
        kind, stage = action.kind, action.stage
        key = stage * self.num_microbatches + action.microbatch
        if kind is _FORWARD:
            return key, self.rank_after[stage], key - self.num_microbatches, self.rank_before[stage]
        if kind is _BACKWARD or kind is _INPUT:
            key += self.first_gradient
            return key, self.rank_before[stage], key + self.num_microbatches, self.rank_after[stage]
        return NOBODY, NOBODY, NOBODY, NOBODY

    def transfer(self, sender: int, receiver: int, nth: int) -> int:
        """The n-th transfer from one rank to the other: transfers of one direction pass in the order in which each end starts them."""
        key = (sender, receiver, nth)
        if key not in self.transfers:
            self.transfers[key] = self.total
            self.total += 1
        return self.transfers[key]

    def early_exchanges(self) -> list[list[list[int]]]:
        """By rank, for its loop's start, each of its computations and the end: the messages it sends and receives right after.

        It sends what the computation made, and receives what is made for it from then until its next computation.
        """
        ranks = self.schedule.ranks
        exchanges: list[list[list[int]]] = [[[]] for _ in ranks]
        for column in zip(*ranks, strict=True):
            made: list[tuple[int, int]] = []
            for rank, cell in enumerate(column):
                if cell.compute is not None:
                    sent: list[int] = []
                    for action in cell.computations:
                        message, to, _, _ = self.ends(action)
                        if to != NOBODY:
                            sent.append(message)
                            made.append((message, to))
                    exchanges[rank].append(sent)
            for message, to in made:
                exchanges[to][-1].append(message)
        return [[*of_rank, []] for of_rank in exchanges]

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

    def __init__(self, schedule: Schedule, rank: int, messages: _Messages, exchanges: list[list[list[int]]] | None, waits: Waits) -> None:
        self.rank, self.messages, self.waits = rank, messages, waits
        self.partner = -1 if schedule.partners is None else schedule.partners[rank]
        self.operations: list[int] = []
        self.outstanding: list[int] = []
        # By direction, outwards and homewards: the transfers so far, and the last of them.
        self.num_started = [0, 0]
        self.last = [NOBODY, NOBODY]
        self.host_buffers = host_buffers(schedule, rank)
        self.stays: dict[tuple[int, int], int] = {}
        self.returned: dict[int, int] = {}
        self.hosted: dict[tuple[int, int], int] = {}
        self.loading: dict[tuple[int, int], int] = {}
        self.leaving: list[int] = []
        row = schedule.ranks[rank]
        self.slots = [-1, *(slot for slot, cell in enumerate(row) if cell.compute is not None), len(row) - 1]
        self.starts: list[int] = []
        if exchanges is None:
            self._receive_late(steps(schedule, rank))
        else:
            self._receive_early(steps(schedule, rank), exchanges[rank])
        self._wait_all()

    def _receive_late(self, program: Sequence[Step]) -> None:
        """Between two computations: send what the first made, receive what the second needs, at once if one neighbour is both."""
        output, to = NOBODY, NOBODY
        for step in program:
            self.starts.append(len(self.operations))
            made, made_to, needed, source = NOBODY, NOBODY, NOBODY, NOBODY
            if step.compute is not None:
                made, made_to, needed, source = self.messages.ends(step.compute)
            if to == source:
                if to != NOBODY:
                    self._exchange((output, needed))
            else:
                if to != NOBODY:
                    self._exchange((output,))
                if source != NOBODY:
                    self._exchange((needed,))
            self._step(step)
            output, to = made, made_to

    def _receive_early(self, program: Sequence[Step], exchanges: Sequence[list[int]]) -> None:
        for step, exchanged in zip(program, exchanges, strict=True):
            self.starts.append(len(self.operations))
            self._step(step)
            if exchanged:
                self._exchange(exchanged)

    def _exchange(self, messages: Sequence[int]) -> None:
        self.operations += messages
        self.operations += [~message for message in messages]
        if self.outstanding and self.waits >= Waits.AFTER_EXCHANGES:
            self._wait_all()

    def _step(self, step: Step) -> None:
        if not (step.before or step.after or self.outstanding):
            return
        self._finish_evictions()
        for action in step.before:
            self._start(action)
        for compute in step.computations if self.loading else ():
            if compute.kind is not _FORWARD and (compute.stage, compute.microbatch) in self.loading:
                self.operations.append(~self.loading.pop((compute.stage, compute.microbatch)))
        if step.compute is not None and self.waits >= Waits.IN_EVERY_OPERATION:
            self._wait_all()
        if any(action.kind is _LOAD for action in step.after):
            self._finish_evictions()
        for action in step.after:
            self._start(action)

    def _finish_evictions(self) -> None:
        """The next computation, or a load before it, takes the memory of what was evicted."""
        self.operations += [~message for message in self.leaving]
        self.leaving.clear()

    def _start(self, action: Action) -> None:
        """Arrive at a transfer, after what it waits for. A LOAD is waited for by its backward."""
        kind, key = action.kind, (action.stage, action.microbatch)
        homeward = kind is _HOST or kind is _LOAD
        ends = (self.partner, self.rank) if homeward else (self.rank, self.partner)
        message = self.messages.transfer(*ends, self.num_started[homeward])
        self.num_started[homeward] += 1
        if self.waits >= Waits.ONE_QUEUE and self.last[homeward] != NOBODY:
            self.operations.append(~self.last[homeward])
        self.last[homeward] = message
        if kind is _HOST:
            self._host(key, message)
        elif kind is _RETURN and key in self.hosted:
            self.operations.append(~self.hosted.pop(key))
            self.returned[self._slot(key)] = message
        elif kind is _LOAD:
            self.loading[key] = message
        elif kind is _EVICT:
            self.leaving.append(message)
        self.operations.append(message)
        if self.waits >= Waits.AT_ISSUE:
            self.operations.append(~message)
        else:
            self.outstanding.append(message)

    def _host(self, key: tuple[int, int], message: int) -> None:
        """A slot is filled once what it held has left."""
        self.stays[key] = self.stays.get(key, -1) + 1
        emptied = self.returned.pop(self._slot(key), NOBODY)
        if emptied != NOBODY:
            self.operations.append(~emptied)
        self.hosted[key] = message

    def _slot(self, key: tuple[int, int]) -> int:
        return self.host_buffers[Hosting(*key, self.stays[key])]

    def _wait_all(self) -> None:
        if self.outstanding:
            self.operations += [~message for message in self.outstanding]
            self.outstanding.clear()

    def blocked_at(self, position: int) -> Blocked:
        """Where the rank stands when it stops at `position`."""
        slot = self.slots[bisect_right(self.starts, position) - 1]
        message = ~self.operations[position]
        return Blocked(self.rank, max(slot, 0), self.messages.name(message), self.messages.peer(self.rank, message))
