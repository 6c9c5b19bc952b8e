"""Run programs whose senders and receivers wait for each other.

In: a Schedule and an `Exchange`. Out: where it gets stuck, if it does.

`schedule.lowering.lower` says what every rank does and what its data waits for. A message or transfer passes when all its ends
have arrived at it, and until then an end that waits for it goes no further. Every receive names its sender, so one
execution that completes means that all do, and fewer waits never block more. `WaitLevel` says how much else waits for
transfers.

The first iteration waits for more, and is what is run here: a HOST until the evictor has told the sizes of all stages
of which it has run a forward when it comes to its EVICT, and, where hosts lend their memory (`lends`), the first EVICT
of a stage into a host buffer until its HOST has made room. Where sizes differ every later iteration begins with a word
of each evictor to each of its hosts, how large rooms have to be, for which these wait (`size_messages`): that is run as
well, before the first computation. And where both ends of a transfer take part a HOST waits until its evictor has come
to the EVICT and told how long its storages are (`differing`).

The first message of a sort tells its shape, and passes by way of the hosts (`transport.edges`): it stands in no queue.
It is run like those of every later iteration, which stand in one. One thread of a rank issues everything, in the order
of its program.

Torch's runtime (`Exchange.TORCH`) over NCCL has one stream for each two ranks, for their messages in both directions, in
the order in which each issues them: one passes when both have come to it there, and those behind it wait.

A communicator is made by the first exchange in it, unless it is there before (`births`). Where messages pass in batches
that is one of all ranks, and each waits there until the last has come; where they pass one by one, it is one of two.
Source: `batch_isend_irecv` in torch.distributed, "if this API is the first collective call in the group, all ranks of
the group must participate". Knows no tensors, no seconds.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bpipe.schedule.action import Kind
from bpipe.schedule.check.board import Board
from bpipe.schedule.host_buffers import hosts_of
from bpipe.schedule.hosts import Pair
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Numbering, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule

_RUN, _SEND, _WAIT, _START = int(Op.RUN), int(Op.SEND), int(Op.WAIT), int(Op.START)
_OVER = -1
_SENDING, _POSTING, _ANOTHER_WAIT = bytes([Op.SEND]), bytes([Op.POST]), bytes([_WAIT])


class WaitLevel(enum.IntEnum):
    """Levels of waiting for transfers beyond what their data needs. Each level includes those before it."""

    ASYNCHRONOUS = 0
    AFTER_EXCHANGES = (
        1  # the device is synchronised after every exchange with a neighbouring stage, Megatron's batch_p2p_sync
    )
    IN_EVERY_OPERATION = 2  # and inside every computation, as some communication libraries and allocators do
    # And for every transfer where it is posted: --bpipe-sync-transfers; or a device whose streams share queues, where
    # an operation at the head of one that its own stream does not let begin holds up whatever was issued after it, or
    # that somebody synchronises.
    AT_ISSUE = 3
    # And before a message starts, for the one before it to the same ranks: with CUDA_DEVICE_MAX_CONNECTIONS=1 all
    # streams share one queue. So does what takes up the statistics of all shards beside the computation, from S on.
    ONE_QUEUE = 4
    # And for every message where it is sent or posted, a batch of them together: with CUDA_LAUNCH_BLOCKING=1 a host
    # waits for each kernel that it launches.
    BLOCKING_LAUNCHES = 5


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: it waits for `message` around the computation at `slot` and its other end is on
    `peer`."""

    rank: int
    slot: int
    message: str
    peer: int


def blocked_ranks(
    schedule: Schedule,
    waits: WaitLevel = WaitLevel.IN_EVERY_OPERATION,
    exchange: Exchange = Exchange.POSTED,
    births: bool = False,
    differing: bool = False,
    programs: Sequence[Program] | None = None,
    lends: bool = True,
) -> tuple[Blocked, ...]:
    """Return every rank that never finishes; empty for a schedule that cannot deadlock.

    `births`: communicators are not there before. `differing`: micro-batches differ in size, and both ends of each
    transfer take part. `programs` are those that will run, by default what `lower` makes of the schedule. `lends`:
    hosts may lend their memory, as over `peer`; it is not known before a run connects.
    """
    board = Board(schedule, exchange, births, differing, lends)
    ranks = [_RankWalk(program, board, waits) for program in programs or lower(schedule, exchange)]
    runnable, waiting = board.runnable, board.waiting
    runnable += ranks
    while runnable:
        walk = runnable.pop()
        number = next(walk.run, _OVER)
        if number != _OVER:
            waiting.setdefault(number, []).append(walk)
    return tuple(
        sorted(
            (
                walk.blocked_at(number)
                for number, stuck in waiting.items()
                for walk in stuck
                if isinstance(walk, _RankWalk)
            ),
            key=lambda one: one.rank,
        )
    )


def size_messages(links: Iterable[Pair], rank: int) -> list[tuple[bool, Pair]]:
    """Return the order in which a rank sends and hears sizes as it begins: (whether it sends, the link) for each link
    it is part of.

    Ranks come in ascending order; with each, a rank sends before it hears. Every pair meets before any later pair, so
    no ring of waiting forms.
    """
    mine = sorted(link for link in links if rank in link)
    return sorted(((link[0] == rank, link) for link in mine), key=lambda word: (sum(word[1]) - rank, not word[0]))


class _PairStream:
    """One rank's stream for messages to and from another: each begins when the one before it is over."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.issued: deque[int] = deque()
        self.run: Iterator[int] = iter(())

    def issue(self, value: int) -> None:
        """Put a message behind those that were issued."""
        idle = not self.issued
        self.issued.append(value)
        if idle:
            self.run = self._run()
            self.board.runnable.append(self)

    def _run(self) -> Iterator[int]:
        while self.issued:
            value = self.issued[0]
            self.board.arrive(value)
            if self.board.missing[value]:
                yield value
            self.issued.popleft()


class _RankWalk:
    """One rank on its way through its program, with what `waits` adds.

    `run` yields what it waits for, and ends where it does.
    """

    def __init__(self, program: Program, board: Board, waits: WaitLevel) -> None:
        self.program, self.board, self.waits = program, board, waits
        # The transfers that nobody has waited for, and the number of each by its half.
        self.outstanding: list[int] = []
        self.halves = Numbering()
        self.started: dict[int, int] = {}
        self.last_issued: dict[tuple[int, ...], int] = {}
        # What goes in one call to the communication library with what comes next.
        self.launched: list[int] = []
        # Operations before this one wait where they are launched.
        self.held = _WAIT if waits >= WaitLevel.ONE_QUEUE or board.exchange is Exchange.TORCH else 0
        # By the two ranks, where their messages stand in a queue of their own.
        self.streams: dict[tuple[int, ...], _PairStream] = {}
        self.telling = board.telling(program)
        self.making = board.making(program)
        # What leaves this rank, in the order of the program, and how much has come to it.
        self.leaving = iter(hosts_of(board.schedule, program.rank))
        self.num_hosted = 0
        self.index = 0
        self.run = self._run()

    def _run(self) -> Iterator[int]:
        for tells, link in size_messages(self.board.words, self.program.rank):
            if tells:
                self.board.arrive(self.board.words[link])
            else:
                yield from self._until(self.board.words[link])
        begin = 0
        for end in sorted(self.telling.keys() | self.making.keys()):
            yield from self._part(begin, end)
            self.index = begin = end
            if end in self.telling:
                self.board.arrive(self.telling[end])
            for communicator in self.making.get(end, ()):
                self.board.born_on.setdefault(communicator, set()).add(self.program.rank)
                self.board.arrive(communicator)
                yield from self._until(communicator)
        yield from self._part(begin, len(self.program.ops))
        self.index = len(self.program.ops) - 1
        yield from self._outstanding()

    def _part(self, begin: int, end: int) -> Iterator[int]:
        """Return the instructions from `begin` to before `end`."""
        board, outstanding, ops = self.board, self.outstanding, self.program.ops
        missing, waiting, runnable = board.missing, board.waiting, board.runnable
        after_exchanges, in_operations = (
            self.waits >= WaitLevel.AFTER_EXCHANGES,
            self.waits >= WaitLevel.IN_EVERY_OPERATION,
        )
        operand: Any
        for index, operand in enumerate(islice(self.program.operands, begin, end), begin):
            op = ops[index]
            if op == _WAIT:
                if missing[operand]:
                    self.index = index
                    yield operand
                if outstanding and after_exchanges:
                    yield from self._exchanged(index)
            elif op == _RUN:
                if outstanding and in_operations:
                    self.index = index
                    yield from self._outstanding()
            elif op < self.held:
                self.index = index
                yield from self._launch(op, operand)
            elif op < _WAIT:
                missing[operand] = left = missing[operand] - 1
                if not left:
                    runnable += waiting.pop(operand, ())
            else:
                self.index = index
                yield from self._transfer(op, operand)

    def _exchanged(self, index: int) -> Iterator[int]:
        """Wait behind the last message of an exchange."""
        if self.program.ops[index + 1 : index + 2] != _ANOTHER_WAIT:
            self.index = index
            yield from self._outstanding()

    def _transfer(self, op: int, transfer: Transfer) -> Iterator[int]:
        return self._start(transfer) if op == _START else self._until(self.started[id(transfer)])

    def _launch(self, op: int, value: int) -> Iterator[int]:
        """Send or post a message where queues or hosts wait for it."""
        if self.waits >= WaitLevel.ONE_QUEUE and (op == _SEND or self.board.exchange is Exchange.TORCH):
            yield from self._issued_before(value)
        self.launched.append(value)
        # Megatron's loops give all of an exchange to torch at once.
        if self.board.exchange.is_megatron and self.program.ops[self.index + 1 : self.index + 2] in (
            _SENDING,
            _POSTING,
        ):
            return
        for together in self._calls():
            for each in together:
                yield from self._issue(each)
            for each in together if self.waits >= WaitLevel.BLOCKING_LAUNCHES else ():
                yield from self._until(each)
        self.launched.clear()

    def _calls(self) -> Iterable[Sequence[int]]:
        """Return what was launched, by kernel: one, but where each two ranks exchange by themselves. There an even rank
        begins with the next one, an odd one with the one before (`_p2p_ops` of Megatron's p2p_communication.py)."""
        if self.board.exchange is not Exchange.MEGATRON_INTERLEAVED:
            return [self.launched]
        by_other: dict[int, list[int]] = {}
        for value in self.launched:
            (other,) = {*self.board.dependencies.route(value).parties} - {self.program.rank}
            by_other.setdefault(other, []).append(value)
        own, size = self.program.rank, self.board.schedule.num_ranks
        first = (own + (1 if own % 2 == 0 else -1)) % size
        return [by_other[other] for other in sorted(by_other, key=lambda other: other != first)]

    def _issue(self, value: int) -> Iterator[int]:
        if self.board.exchange is not Exchange.TORCH:
            self.board.arrive(value)
            if value in self.board.in_two_steps:
                yield from self._until(value)
            return
        parties = tuple(sorted(self.board.dependencies.route(value).parties))
        if parties not in self.streams:
            self.streams[parties] = _PairStream(self.board)
        self.streams[parties].issue(value)

    def _issued_before(self, value: int) -> Iterator[int]:
        """Wait for what was issued last in the same stream: with one queue the next stands at its head until that has
        passed. Torch's runtime has one stream for both directions between two ranks."""
        parties = self.board.dependencies.route(value).parties
        if self.board.exchange is Exchange.TORCH:
            parties = tuple(sorted(parties))
        before = self.last_issued.get(parties)
        if before is not None:
            yield from self._until(before)
        self.last_issued[parties] = value

    def _start(self, transfer: Transfer) -> Iterator[int]:
        kind, grows, hears = transfer.action.kind, False, False
        if kind is Kind.HOST:
            self.num_hosted += 1
            hears = self.board.differing
            yield from self._sizes(transfer.sender)
        elif kind is Kind.EVICT:
            residency = next(self.leaving)
            lends = self.board.lends and transfer.receiver != self.program.rank
            grows = lends and self.board.growing(transfer.receiver).get(residency, False)
        number = self.started[id(transfer)] = self.board.transfer(self.halves.start(transfer))
        self.board.arrive(number)
        if grows or hears or self.waits >= WaitLevel.AT_ISSUE:
            yield from self._until(number)
        else:
            self.outstanding.append(number)

    def _sizes(self, evictor: int) -> Iterator[int]:
        """Wait for the sizes of what comes now; the last that an evictor tells come after all others."""
        board, link = self.board, (evictor, self.program.rank)
        told = board.told.get(link)
        if told and board.missing[told[-1]]:
            residency = next(islice(board.growing(self.program.rank), self.num_hosted - 1, None))
            # How many of its stages it has told of by then: without them there is no room.
            count = board.told_by[link].get(residency, 0)
            if count:
                yield from self._until(told[count - 1])

    def _until(self, number: int) -> Iterator[int]:
        if self.board.missing[number]:
            yield number

    def _outstanding(self) -> Iterator[int]:
        for number in self.outstanding:
            if self.board.missing[number]:
                yield number
        self.outstanding.clear()

    def blocked_at(self, number: int) -> Blocked:
        """Where the rank stands when it waits for this for ever."""
        own, slot, dependencies = self.program.rank, self.program.slot_of(self.index), self.board.dependencies
        if number < dependencies.num_values:
            others = [rank for rank in dependencies.route(number).parties if rank != own]
            return Blocked(own, slot, dependencies.describe(number), others[0])
        for ranks, communicator in self.board.communicators.items():
            if number == communicator:
                missing = set(ranks) - self.board.born_on[communicator]
                whose = (
                    "all ranks" if len(ranks) == self.board.schedule.num_ranks else f"ranks {ranks[0]} and {ranks[1]}"
                )
                return Blocked(own, slot, f"the communicator of {whose} to be made", min(missing))
        for (sender, receiver), numbers in self.board.transfers.items():
            if number in numbers:
                nth = numbers.index(number)
                return Blocked(
                    own,
                    slot,
                    f"transfer {nth} from rank {sender} to rank {receiver}",
                    sender if receiver == own else receiver,
                )
        for (evictor, host), word in self.board.words.items():
            if number == word:
                return Blocked(own, slot, f"the word that rank {evictor} starts with rank {host}", evictor)
        evictor = next(rank for (rank, _), numbers in self.board.told.items() if number in numbers)
        return Blocked(own, slot, f"the sizes of what {self.program.operands[self.index]} carries", evictor)
