"""Run programs whose senders and receivers wait for each other. In: a Schedule and an `Exchange`. Out: where it gets stuck, if it does.

`passes.lower` says what every rank does and what its data waits for. A message or transfer passes when all its ends have arrived at it, and
until then an end that waits for it goes no further. Every receive names its sender, so one execution that completes means that all do,
and fewer waits never block more. `Waits` says how much else waits for transfers.
Knows no tensors, no seconds.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from bpipe.ir.needs import Needs
from bpipe.ir.program import Do, Exchange, Program, Transfer
from bpipe.ir.schedule import Schedule
from bpipe.passes.lower import lower

_WAIT, _FINISH = int(Do.WAIT), int(Do.FINISH)
_ANOTHER_WAIT = bytes([_WAIT])


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


def blocked_ranks(schedule: Schedule, waits: Waits = Waits.IN_EVERY_OPERATION, exchange: Exchange = Exchange.POSTED) -> tuple[Blocked, ...]:
    """Every rank that never finishes; empty for a schedule that cannot deadlock."""
    needs = Needs(schedule.layout, schedule.num_microbatches)
    ends = _Ends(needs)
    ranks = [_Operations(program, ends, waits) for program in lower(schedule, exchange)]
    positions = _execute([rank.operations for rank in ranks], ends.expected)
    stuck = [(rank, position) for rank, position in zip(ranks, positions, strict=True) if position < len(rank.operations)]
    return tuple(rank.blocked_at(position, needs) for rank, position in stuck)


def _execute(programs: list[list[int]], expected: Sequence[int]) -> list[int]:
    """Where each rank's program ends up, a list of operations: n >= 0 arrives at message n, ~n waits until all `expected[n]` have."""
    missing = list(expected)
    positions = [0] * len(programs)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        operations, position = programs[rank], positions[rank]
        while position < len(operations):
            operation = operations[position]
            if operation >= 0:
                missing[operation] -= 1
                if not missing[operation] and operation in waiting:
                    runnable += waiting.pop(operation)
            elif missing[~operation]:
                waiting.setdefault(~operation, []).append(rank)
                break
            position += 1
        positions[rank] = position
    return positions


class _Ends:
    """Number what passes: messages by their value, then the n-th transfer from one rank to another. `expected[n]`: how many ends it has."""

    def __init__(self, needs: Needs) -> None:
        self.expected = [2] * needs.num_values
        if needs.layout.shard_kinds:
            self.expected = [len(needs.route(value).parties) for value in range(needs.num_values)]
        self.transfers: dict[tuple[int, int, int], int] = {}

    def transfer(self, transfer: Transfer, nth: int) -> int:
        """Transfers of one direction pass in the order in which each end starts them."""
        if transfer.sender == transfer.receiver:
            # What a rank keeps in its own host memory has no other end.
            self.expected.append(1)
            return len(self.expected) - 1
        key = (transfer.sender, transfer.receiver, nth)
        if key not in self.transfers:
            self.transfers[key] = len(self.expected)
            self.expected.append(2)
        return self.transfers[key]


class _Operations:
    """One rank's program as operations, with what `waits` adds."""

    def __init__(self, program: Program, ends: _Ends, waits: Waits) -> None:
        self.program, self.ends, self.waits = program, ends, waits
        self.operations: list[int] = []
        self.outstanding: list[int] = []
        # By other rank and whether this one sends: the transfers so far and the last of them. By half, told apart as values
        # (what leaves a second time is the same to read): its number.
        self.num_started: dict[tuple[int, bool], int] = {}
        self.last: dict[tuple[int, bool], int] = {}
        self.started: dict[int, int] = {}
        # By instruction: its first operation.
        self.starts: list[int] = []
        operations, outstanding = self.operations, self.outstanding
        after_exchanges, in_operations = waits >= Waits.AFTER_EXCHANGES, waits >= Waits.IN_EVERY_OPERATION
        for index, (do, what) in enumerate(zip(program.dos, program.whats, strict=True)):
            self.starts.append(len(operations))
            if isinstance(what, int):
                operations.append(~what if do == _WAIT else what)
                if outstanding and do == _WAIT and after_exchanges and program.dos[index + 1 : index + 2] != _ANOTHER_WAIT:
                    self._wait_all()
            elif isinstance(what, Transfer):
                self._transfer(do, what)
            elif outstanding and in_operations:
                self._wait_all()
        self._wait_all()

    def _transfer(self, do: int, transfer: Transfer) -> None:
        if do == _FINISH:
            self.operations.append(~self.started[id(transfer)])
            return
        outbound = transfer.is_outbound
        way = (transfer.receiver if outbound else transfer.sender, outbound)
        nth = self.num_started.get(way, 0)
        number = self.ends.transfer(transfer, nth)
        self.num_started[way] = nth + 1
        if self.waits >= Waits.ONE_QUEUE and way in self.last:
            self.operations.append(~self.last[way])
        self.last[way] = self.started[id(transfer)] = number
        self.operations.append(number)
        if self.waits >= Waits.AT_ISSUE:
            self.operations.append(~number)
        else:
            self.outstanding.append(number)

    def _wait_all(self) -> None:
        self.operations += [~number for number in self.outstanding]
        self.outstanding.clear()

    def blocked_at(self, position: int, needs: Needs) -> Blocked:
        """Where the rank stands when it stops at `position`."""
        slot = self.program.slot_of(bisect_right(self.starts, position) - 1)
        number = ~self.operations[position]
        if number < needs.num_values:
            others = [rank for rank in needs.route(number).parties if rank != self.program.rank]
            return Blocked(self.program.rank, slot, needs.words(number), others[0])
        sender, receiver, nth = next(key for key, value in self.ends.transfers.items() if value == number)
        other = sender if receiver == self.program.rank else receiver
        return Blocked(self.program.rank, slot, f"transfer {nth} from rank {sender} to rank {receiver}", other)
