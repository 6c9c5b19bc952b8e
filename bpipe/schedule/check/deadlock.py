"""Deadlock check: run programs whose senders and receivers wait for each other, and report where they get stuck.

`schedule.lowering.lower` says what every rank does and what its data waits for. A message or transfer passes when all
its ends have arrived at it; until then an end that waits for it goes no further. Every receive names its sender, so one
complete execution means that all complete, and fewer waits never block more. `WaitLevel` says how much else waits for
transfers.

The first iteration waits for more, and is the one run here:

- A HOST waits until the evictor has told the sizes of all stages of which it has run a forward before its EVICT.
- If hosts lend their memory (`lends`), the first EVICT of a stage into a host buffer waits until its HOST made room.
- If sizes differ, every later iteration begins with a message of each evictor to each of its hosts about the room it
  needs, for which these wait (`size_messages`). It is run as well, before the first computation.
- If both ends of a transfer take part, a HOST waits for its EVICT, which tells the lengths of storages (`differing`).

The first message of a sort tells its shape and passes through the hosts (`transport.edges`), in no queue. It is run
like those of every later iteration, which share one. One thread of a rank issues everything, in the program's order.

Torch's runtime (`Exchange.TORCH`) over NCCL has one stream for each two ranks, for their messages in both directions,
in the order in which each rank issues them: a message passes when both have come to it there, and later ones wait.

A communicator is made by the first exchange in it, unless it exists before (`births`). If messages pass in batches it
has all ranks, and each waits there until the last has come; if they pass one by one, it has two. Source:
`batch_isend_irecv` in torch.distributed, "if this API is the first collective call in the group, all ranks of the group
must participate".
"""

import enum
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bpipe.schedule.action import Kind
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.host_buffers import Residency, host_buffers, hosts_of, links_of, num_measured
from bpipe.schedule.hosts import Host, Pair
from bpipe.schedule.lowering.lower import lower
from bpipe.schedule.program import Exchange, Op, Program, Transfer
from bpipe.schedule.schedule import Schedule

_RUN, _SEND, _WAIT, _START = int(Op.RUN), int(Op.SEND), int(Op.WAIT), int(Op.START)
_SENDING, _POSTING, _ANOTHER_WAIT = bytes([Op.SEND]), bytes([Op.POST]), bytes([_WAIT])
_OVER = -1


class WaitLevel(enum.IntEnum):
    """How much waits for transfers beyond what data needs. Each level includes those before it."""

    ASYNCHRONOUS = 0
    # The device is synchronised after every exchange with a neighbouring stage, Megatron's batch_p2p_sync.
    AFTER_EXCHANGES = 1
    # And inside every computation, as some communication libraries and allocators do.
    IN_EVERY_OPERATION = 2
    # And for every transfer when it is posted: --bpipe-sync-transfers, or a device that is synchronised or whose
    # streams share queues, in which an operation that cannot begin yet delays all that was issued after it.
    AT_ISSUE = 3
    # And, before a message starts, for the one before it to the same ranks: with CUDA_DEVICE_MAX_CONNECTIONS=1 all
    # streams share one queue. The statistics of all shards, gathered from S on, wait there as well.
    ONE_QUEUE = 4
    # And for every message when it is sent or posted, or a batch of them together: with CUDA_LAUNCH_BLOCKING=1 a host
    # waits for each kernel that it launches.
    BLOCKING_LAUNCHES = 5


@dataclass(frozen=True, slots=True)
class Blocked:
    """A rank that cannot go on: near the computation at `slot` it waits for `message`, whose other end is on `peer`."""

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

    Args:
        schedule: The schedule to run.
        waits: How much waits for transfers.
        exchange: Exchange order of messages.
        births: Whether communicators are made by their first exchange.
        differing: Whether micro-batches differ in size and both ends of each transfer take part.
        programs: Programs that will run; by default those that `lower` makes.
        lends: Whether hosts may lend their memory, as over `peer`, which is not known before a run connects.
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
    stuck = ((number, walk) for number, walks in waiting.items() for walk in walks if isinstance(walk, _RankWalk))
    return tuple(sorted((walk.blocked_at(number) for number, walk in stuck), key=lambda blocked: blocked.rank))


def size_messages(links: Iterable[Pair], rank: int) -> list[tuple[bool, Pair]]:
    """Return the order in which a rank exchanges sizes as it begins: (whether it sends, the link) for each of its
    links.

    Ranks come in ascending order; with each, a rank sends before it receives. Every pair meets before any later pair,
    so no ring of waiting forms.
    """
    own = sorted(link for link in links if rank in link)
    return sorted(((link[0] == rank, link) for link in own), key=lambda word: (sum(word[1]) - rank, not word[0]))


class Board:
    """What has passed: messages by their value, then transfers, sizes that ranks have told, and communicators.

    `missing[number]` ends have not arrived yet; `waiting[number]` go on when the last has.
    """

    def __init__(self, schedule: Schedule, exchange: Exchange, births: bool, differing: bool, lends: bool) -> None:
        self.schedule = schedule
        self.differing, self.lends = differing, lends
        self.exchange = exchange
        # The communicators of our own loop are made before it runs.
        self.births = births and exchange is not Exchange.POSTED
        # Number of each communicator by its ranks, and the ranks that have come to it.
        self.communicators: dict[tuple[int, ...], int] = {}
        self.born_on: dict[int, set[int]] = {}
        self.dependencies = dependencies = Dependencies(schedule.layout, schedule.num_microbatches)
        self.missing = [2] * dependencies.num_values
        if dependencies.layout.shard_kinds:
            self.missing = [len(dependencies.route(value).parties) for value in range(dependencies.num_values)]
        # By sender and receiver, the numbers of their transfers, in order.
        self.transfers: dict[Pair, list[int]] = {}
        # By evictor and host: for each residency, in order, the number of stages whose sizes the host knows by then;
        # and the numbers of these messages.
        self.told_by: dict[Pair, dict[Residency, int]] = {}
        self.told: dict[Pair, list[int]] = {}
        # By host: its residencies, in order, and whether each may make a buffer grow, because it is the first of that
        # stage of that rank in it.
        self.hosted: dict[int, dict[Residency, bool]] = {}
        # By evictor and host: the message with which an iteration begins.
        self.words: dict[Pair, int] = {link: self._expect(1) for link in sorted(links_of(schedule))}
        # Ranks and streams, whose `run` yields what they wait for.
        self.waiting: dict[int, list[_RankWalk | _PairStream]] = {}
        self.runnable: list[_RankWalk | _PairStream] = []

    def arrive(self, number: int) -> None:
        self.missing[number] -= 1
        if not self.missing[number] and number in self.waiting:
            self.runnable += self.waiting.pop(number)

    def transfer(self, sender: int, receiver: int, nth: int) -> int:
        """Return the number of a transfer, given how many passed from its sender to its receiver before."""
        if sender == receiver:
            # A transfer to the rank's own host memory has no other end.
            return self._expect(1)
        numbers = self.transfers.setdefault((sender, receiver), [])
        if nth == len(numbers):
            numbers.append(self._expect(2))
        return numbers[nth]

    def parties(self, value: int) -> tuple[int, ...]:
        """Return the ranks with a part in a message, ascending."""
        return tuple(sorted(self.dependencies.route(value).parties))

    def _expect(self, ends: int) -> int:
        self.missing.append(ends)
        return len(self.missing) - 1

    def telling(self, program: Program) -> dict[int, int]:
        """Return the numbers of the sizes that a rank tells, by place: after the first forward of each evicted
        stage."""
        rank, ops = program.rank, program.ops
        stages_to: dict[Host, set[int]] = {}
        for residency, host in hosts_of(self.schedule, rank).items():
            stages_to.setdefault(host, set()).add(residency.stage)
        left = set().union(*stages_to.values())
        places = {}
        by_stage: dict[int, int] = {}
        # Our own loop and torch's send first (`Engine.sent`).
        sends_first = self.exchange in (Exchange.POSTED, Exchange.TORCH)
        operand: Any
        for index, operand in enumerate(program.operands) if left else ():
            if ops[index] != _RUN or operand.kind is not Kind.FORWARD or operand.stage not in left:
                continue
            left.remove(operand.stage)
            after = index + 1
            while sends_first and ops[after : after + 1] == _SENDING:
                after += 1
            places[after] = by_stage[operand.stage] = self._expect(1)
            if not left:
                break
        for host, stages in stages_to.items():
            self.told_by[rank, host.rank] = num_measured(self.schedule, rank, host)
            self.told[rank, host.rank] = [number for stage, number in by_stage.items() if stage in stages]
        return places

    def making(self, program: Program) -> dict[int, list[int]]:
        """Return the communicators that a rank makes, by the instruction with its first message in each."""
        places: dict[int, list[int]] = {}
        seen: set[tuple[int, ...]] = set()
        everybody = tuple(range(self.schedule.num_ranks))
        for index, operand in enumerate(program.operands) if self.births else ():
            if not isinstance(operand, int):
                continue
            ranks = everybody if self.exchange.is_batched else self.parties(operand)
            if ranks not in seen:
                seen.add(ranks)
                if ranks not in self.communicators:
                    self.communicators[ranks] = self._expect(len(ranks))
                places.setdefault(index, []).append(self.communicators[ranks])
                if self.exchange.is_batched:
                    break
        return places

    def growing(self, host: int) -> dict[Residency, bool]:
        """Return a host's residencies in order, and whether the buffer of each may have to grow for it."""
        if host not in self.hosted:
            seen: set[tuple[int, int, int]] = set()
            grows = self.hosted[host] = {}
            for residency, buffer in host_buffers(self.schedule, host).items():
                key = (buffer, residency.stage, self.schedule.layout.rank_of(*residency.key))
                grows[residency] = key not in seen
                seen.add(key)
        return self.hosted[host]


class _PairStream:
    """One rank's stream for messages to and from another: each begins when the one before it is over."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.issued: deque[int] = deque()
        self.run: Iterator[int] = iter(())

    def issue(self, value: int) -> None:
        """Append a message to those that were issued."""
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
    """One rank on its way through its program, with the waits of a level; `run` yields what it waits for."""

    def __init__(self, program: Program, board: Board, waits: WaitLevel) -> None:
        self.program, self.board, self.waits = program, board, waits
        # Transfers that the rank has not waited for yet, and the number of each by the identity of its half.
        self.outstanding: list[int] = []
        # By sender and receiver, how many transfers have started here: both ends start them in the same order.
        self.num_started: Counter[Pair] = Counter()
        self.started: dict[int, int] = {}
        self.last_issued: dict[tuple[int, ...], int] = {}
        # Messages that share one call to the communication library with the next one.
        self.launched: list[int] = []
        # Operations below this one wait when they are launched.
        self.held = _WAIT if waits >= WaitLevel.ONE_QUEUE or board.exchange is Exchange.TORCH else 0
        # By two ranks, if their messages have a queue of their own.
        self.streams: dict[tuple[int, ...], _PairStream] = {}
        self.telling = board.telling(program)
        self.making = board.making(program)
        # Residencies that leave this rank, in the order of the program, and the number that have come to it.
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
        """Run the instructions from `begin` to before `end`."""
        board, outstanding, ops = self.board, self.outstanding, self.program.ops
        missing, waiting, runnable = board.missing, board.waiting, board.runnable
        after_exchanges = self.waits >= WaitLevel.AFTER_EXCHANGES
        in_operations = self.waits >= WaitLevel.IN_EVERY_OPERATION
        operand: Any
        for index, operand in enumerate(islice(self.program.operands, begin, end), begin):
            op = ops[index]
            if op == _WAIT:
                if missing[operand]:
                    self.index = index
                    yield operand
                if outstanding and after_exchanges and ops[index + 1 : index + 2] != _ANOTHER_WAIT:
                    # The last message of an exchange.
                    self.index = index
                    yield from self._outstanding()
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
                yield from self._start(operand) if op == _START else self._until(self.started[id(operand)])

    def _launch(self, op: int, value: int) -> Iterator[int]:
        """Send or post a message for which queues or hosts wait."""
        if self.waits >= WaitLevel.ONE_QUEUE and (op == _SEND or self.board.exchange is Exchange.TORCH):
            yield from self._issued_before(value)
        self.launched.append(value)
        # Megatron's loops give all of an exchange to torch at once.
        following = self.program.ops[self.index + 1 : self.index + 2]
        if self.board.exchange.is_megatron and following in (_SENDING, _POSTING):
            return
        for batch in self._calls():
            for message in batch:
                yield from self._issue(message)
            for message in batch if self.waits >= WaitLevel.BLOCKING_LAUNCHES else ():
                yield from self._until(message)
        self.launched.clear()

    def _calls(self) -> Iterable[Sequence[int]]:
        """Return what was launched, by kernel: all in one, unless each two ranks exchange by themselves."""
        if self.board.exchange is not Exchange.MEGATRON_INTERLEAVED:
            return [self.launched]
        own, by_other = self.program.rank, dict[int, list[int]]()
        for value in self.launched:
            (other,) = {*self.board.dependencies.route(value).parties} - {own}
            by_other.setdefault(other, []).append(value)
        # An even rank begins with the next, an odd one with the one before: `_p2p_ops` of Megatron's p2p_communication.
        first = (own + (1 if own % 2 == 0 else -1)) % self.board.schedule.num_ranks
        return [by_other[other] for other in sorted(by_other, key=lambda other: other != first)]

    def _issue(self, value: int) -> Iterator[int]:
        if self.board.exchange is not Exchange.TORCH:
            self.board.arrive(value)
            # What a collective gathers is used at once, during the computation, to make what the last stage waits for.
            if value in self.board.dependencies.in_two_steps:
                yield from self._until(value)
            return
        parties = self.board.parties(value)
        if parties not in self.streams:
            self.streams[parties] = _PairStream(self.board)
        self.streams[parties].issue(value)

    def _issued_before(self, value: int) -> Iterator[int]:
        """Wait for the previous message in the same stream or queue; torch has one stream for both directions of two
        ranks."""
        in_one_stream = self.board.exchange is Exchange.TORCH
        parties = self.board.parties(value) if in_one_stream else self.board.dependencies.route(value).parties
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
        link = transfer.sender, transfer.receiver
        number = self.started[id(transfer)] = self.board.transfer(*link, self.num_started[link])
        self.num_started[link] += 1
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
            # Without the sizes of the stages measured by then there is no room.
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
        """Return where the rank gets stuck if it waits for this for ever."""
        return Blocked(self.program.rank, self.program.slot_of(self.index), *self._awaited(number))

    def _awaited(self, number: int) -> tuple[str, int]:
        """Return in words what the rank waits for, and the rank at its other end."""
        own, board = self.program.rank, self.board
        if number < board.dependencies.num_values:
            others = [rank for rank in board.dependencies.route(number).parties if rank != own]
            return board.dependencies.describe(number), others[0]
        for ranks, communicator in board.communicators.items():
            if number == communicator:
                everybody = len(ranks) == board.schedule.num_ranks
                whose = "all ranks" if everybody else f"ranks {ranks[0]} and {ranks[1]}"
                return f"the communicator of {whose} to be made", min(set(ranks) - board.born_on[communicator])
        for (sender, receiver), numbers in board.transfers.items():
            if number in numbers:
                message = f"transfer {numbers.index(number)} from rank {sender} to rank {receiver}"
                return message, sender if receiver == own else receiver
        for (evictor, host), word in board.words.items():
            if number == word:
                return f"the word that rank {evictor} starts with rank {host}", evictor
        evictor = next(rank for (rank, _), numbers in board.told.items() if number in numbers)
        return f"the sizes of what {self.program.operands[self.index]} carries", evictor
