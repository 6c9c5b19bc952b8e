"""Run programs whose senders and receivers wait for each other.

In: a Schedule and an `Exchange`. Out: where it gets stuck, if it does.

`lower.lower` says what every rank does and what its data waits for. A message or transfer passes when all its ends
have arrived at it, and until then an end that waits for it goes no further. Every receive names its sender, so one
execution that completes means that all do, and fewer waits never block more. `WaitLevel` says how much else waits for
transfers.

The first iteration waits for more, and is what is run here: a HOST until the evictor has told the sizes of all stages
of which it has run a forward when it comes to its EVICT, and the first EVICT of a stage into a host buffer until its
HOST has made room. Where sizes differ every later iteration begins with a word of each evictor to each of its hosts,
how large rooms have to be, for which these wait (`size_messages`): that is run as well, before the first computation.
And where both ends of a transfer take part a HOST waits until its evictor has come to the EVICT and told how long its
storages are (`differing`).

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

from bpipe.ir.action import Action, Kind
from bpipe.ir.dependencies import Dependencies
from bpipe.ir.host_buffers import Residency, host_buffers, hosts_of, links_of, num_measured
from bpipe.ir.program import Exchange, Numbering, Op, Program, Transfer
from bpipe.ir.schedule import Schedule
from bpipe.lower.lower import lower

_RUN, _SEND, _WAIT, _START = int(Op.RUN), int(Op.SEND), int(Op.WAIT), int(Op.START)
_OVER = -1
_SENDING, _ANOTHER_WAIT = bytes([Op.SEND]), bytes([_WAIT])


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
) -> tuple[Blocked, ...]:
    """Return every rank that never finishes; empty for a schedule that cannot deadlock.

    `births`: communicators are not there before. `differing`: micro-batches differ in size, and both ends of each
    transfer take part. `programs` are those that will run, by default what `lower` makes of the schedule.
    """
    board = _Board(schedule, exchange, births, differing)
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


def size_messages(links: Iterable[tuple[int, int]], rank: int) -> list[tuple[bool, tuple[int, int]]]:
    """Return the order in which a rank sends and hears sizes as it begins: (whether it sends, the link) for each link
    it is part of.

    Ranks come in ascending order; with each, a rank sends before it hears. Every pair meets before any later pair, so
    no ring of waiting forms.
    """
    mine = sorted(link for link in links if rank in link)
    return sorted(((link[0] == rank, link) for link in mine), key=lambda word: (sum(word[1]) - rank, not word[0]))


class _Board:
    """What has passed: messages by their value, then the n-th transfer from one rank to another, and the sizes that
    ranks have told.

    `missing[number]` ends have not arrived yet; `waiting[number]` go on when the last has.
    """

    def __init__(self, schedule: Schedule, exchange: Exchange, births: bool, differing: bool) -> None:
        self.schedule = schedule
        self.differing = differing
        self.exchange = exchange
        # Our own loop's communicators are made before it runs.
        self.births = births and exchange is not Exchange.POSTED
        # By the ranks of a communicator, its number; and who has come to each.
        self.communicators: dict[tuple[int, ...], int] = {}
        self.born_on: dict[int, set[int]] = {}
        self.dependencies = dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
        self.missing = [2] * dependencies.num_values
        if dependencies.layout.shard_kinds:
            self.missing = [len(dependencies.route(value).parties) for value in range(dependencies.num_values)]
        # What a collective gathers is taken up at once, beside the computation, to make what the last stage waits for.
        self.in_two_steps = dependencies.in_two_steps
        # By sender and receiver, the numbers of what passes so, in order.
        self.transfers: dict[tuple[int, int], list[int]] = {}
        # By evictor and host: by what leaves the one for the other, in order, of how many stages it has told it the
        # sizes by then; and the numbers of these.
        self.told_by: dict[tuple[int, int], dict[Residency, int]] = {}
        self.told: dict[tuple[int, int], list[int]] = {}
        # By host: what it takes, in order, and which of that may make a buffer grow: none of that stage of that rank
        # was in it before.
        self.hosted: dict[int, dict[Residency, bool]] = {}
        # By evictor and host: the word with which it begins.
        self.words: dict[tuple[int, int], int] = {link: self._expect(1) for link in sorted(links_of(schedule))}
        self.waiting: dict[int, list[_RankWalk | _PairStream]] = {}
        self.runnable: list[_RankWalk | _PairStream] = []

    def arrive(self, number: int) -> None:
        self.missing[number] -= 1
        if not self.missing[number] and number in self.waiting:
            self.runnable += self.waiting.pop(number)

    def transfer(self, key: tuple[int, int, int]) -> int:
        """Return the number of a transfer: its sender, its receiver and how many passed between them before."""
        sender, receiver, nth = key
        if sender == receiver:
            # What a rank keeps in its own host memory has no other end.
            return self._expect(1)
        numbers = self.transfers.setdefault((sender, receiver), [])
        if nth == len(numbers):
            numbers.append(self._expect(2))
        return numbers[nth]

    def _expect(self, ends: int) -> int:
        self.missing.append(ends)
        return len(self.missing) - 1

    def telling(self, program: Program) -> dict[int, int]:
        """Where in its program a rank has run, and passed on, the first forward of a stage that leaves: what it
        tells there, its number."""
        rank, ops = program.rank, program.ops
        stages_to: dict[int, set[int]] = {}
        for residency, host in hosts_of(self.schedule, rank).items():
            stages_to.setdefault(host, set()).add(residency.stage)
        left = set().union(*stages_to.values())
        places = {}
        by_stage: dict[int, int] = {}
        # Our own loop and torch's send first (`Engine.sent`).
        sends_first = self.exchange in (Exchange.POSTED, Exchange.TORCH)
        for index, operand in enumerate(program.operands) if left else ():
            if (
                ops[index] == _RUN
                and isinstance(operand, Action)
                and operand.kind is Kind.FORWARD
                and operand.stage in left
            ):
                left.remove(operand.stage)
                behind = index + 1
                while sends_first and ops[behind : behind + 1] == _SENDING:
                    behind += 1
                places[behind] = by_stage[operand.stage] = self._expect(1)
            if not left:
                break
        for host, stages in stages_to.items():
            self.told_by[rank, host] = num_measured(self.schedule, rank, host)
            self.told[rank, host] = [number for stage, number in by_stage.items() if stage in stages]
        return places

    def making(self, program: Program) -> dict[int, list[int]]:
        """Return the instructions at which a rank makes communicators with others, and the numbers of these: its
        first messages in each."""
        places: dict[int, list[int]] = {}
        seen: set[tuple[int, ...]] = set()
        everybody = tuple(range(self.schedule.num_ranks))
        for index, operand in enumerate(program.operands) if self.births else ():
            if isinstance(operand, int):
                ranks = (
                    everybody if self.exchange.is_batched else tuple(sorted(self.dependencies.route(operand).parties))
                )
                if ranks not in seen:
                    seen.add(ranks)
                    if ranks not in self.communicators:
                        self.communicators[ranks] = self._expect(len(ranks))
                    places.setdefault(index, []).append(self.communicators[ranks])
                    if self.exchange.is_batched:
                        break
        return places

    def growing(self, host: int) -> dict[Residency, bool]:
        """What a rank hosts, in the order in which it comes, and whether the buffer it goes to may have to grow for
        it."""
        if host not in self.hosted:
            seen: set[tuple[int, int, int]] = set()
            of_host = self.hosted[host] = {}
            for residency, buffer in host_buffers(self.schedule, host).items():
                key = (buffer, residency.stage, self.schedule.layout.rank_of(residency.stage, residency.microbatch))
                of_host[residency] = key not in seen
                seen.add(key)
        return self.hosted[host]


class _PairStream:
    """One rank's stream for messages to and from another: each begins when the one before it is over."""

    def __init__(self, board: _Board) -> None:
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

    def __init__(self, program: Program, board: _Board, waits: WaitLevel) -> None:
        self.program, self.board, self.waits = program, board, waits
        # The transfers that nobody has waited for, and the number of each by its half.
        self.outstanding: list[int] = []
        self.halves = Numbering()
        self.started: dict[int, int] = {}
        self.last_sent: dict[tuple[int, ...], int] = {}
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
        board, outstanding, ops, started = self.board, self.outstanding, self.program.ops, self.started
        missing, waiting, runnable = board.missing, board.waiting, board.runnable
        after_exchanges, in_operations = (
            self.waits >= WaitLevel.AFTER_EXCHANGES,
            self.waits >= WaitLevel.IN_EVERY_OPERATION,
        )
        one_queue, in_streams = self.waits >= WaitLevel.ONE_QUEUE, board.exchange is Exchange.TORCH
        operand: Any
        for index, operand in enumerate(islice(self.program.operands, begin, end), begin):
            op = ops[index]
            if op == _WAIT:
                if missing[operand]:
                    self.index = index
                    yield operand
                if outstanding and after_exchanges and ops[index + 1 : index + 2] != _ANOTHER_WAIT:
                    self.index = index
                    yield from self._outstanding()
            elif op == _RUN:
                if outstanding and in_operations:
                    self.index = index
                    yield from self._outstanding()
            elif op < _WAIT:
                if one_queue and op == _SEND:
                    self.index = index
                    yield from self._sent_before(operand)
                if in_streams:
                    self._issue(operand)
                    continue
                missing[operand] = left = missing[operand] - 1
                if not left and operand in waiting:
                    runnable += waiting.pop(operand)
                elif left and one_queue and operand in board.in_two_steps:
                    self.index = index
                    yield operand
            else:
                self.index = index
                yield from self._start(operand) if op == _START else self._until(started[id(operand)])

    def _issue(self, value: int) -> None:
        parties = tuple(sorted(self.board.dependencies.route(value).parties))
        if parties not in self.streams:
            self.streams[parties] = _PairStream(self.board)
        self.streams[parties].issue(value)

    def _sent_before(self, value: int) -> Iterator[int]:
        """What was sent to the same ranks last: with one queue the next stands at its head until that has been
        received."""
        parties = self.board.dependencies.route(value).parties
        before = self.last_sent.get(parties)
        if before is not None:
            yield from self._until(before)
        self.last_sent[parties] = value

    def _start(self, transfer: Transfer) -> Iterator[int]:
        kind, grows, hears = transfer.action.kind, False, False
        if kind is Kind.HOST:
            self.num_hosted += 1
            hears = self.board.differing
            yield from self._sizes(transfer.sender)
        elif kind is Kind.EVICT:
            residency = next(self.leaving)
            grows = transfer.receiver != self.program.rank and self.board.growing(transfer.receiver).get(
                residency, False
            )
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
                return Blocked(own, slot, f"the word with which rank {evictor} begins for rank {host}", evictor)
        evictor = next(rank for (rank, _), numbers in self.board.told.items() if number in numbers)
        return Blocked(own, slot, f"the sizes of what {self.program.operands[self.index]} brings", evictor)
