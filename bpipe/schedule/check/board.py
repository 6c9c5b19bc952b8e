"""Note what has passed while programs are run: messages, transfers, sizes that ranks tell, communicators.

In: a Schedule and an `Exchange`. Out: numbers of all that may be waited for, and who may go on when an end arrives.
Knows no level of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import Dependencies
from bpipe.schedule.host_buffers import Residency, host_buffers, hosts_of, links_of, num_measured
from bpipe.schedule.hosts import Host, Pair
from bpipe.schedule.program import Exchange, Op, Program
from bpipe.schedule.schedule import Schedule

_RUN, _SENDING = int(Op.RUN), bytes([Op.SEND])


class Walk(Protocol):
    """A rank or a stream that may wait: `run` yields what it waits for."""

    run: Iterator[int]


class Board:
    """Record of what has passed: messages by their value, then the n-th transfer from one rank to another, and the sizes that
    ranks have told.

    `missing[number]` ends have not arrived yet; `waiting[number]` go on when the last has.
    """

    def __init__(self, schedule: Schedule, exchange: Exchange, births: bool, differing: bool, lends: bool) -> None:
        self.schedule = schedule
        self.differing, self.lends = differing, lends
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
        self.transfers: dict[Pair, list[int]] = {}
        # By evictor and host: by what leaves the one for the other, in order, of how many stages it has told it the
        # sizes by then; and the numbers of these.
        self.told_by: dict[Pair, dict[Residency, int]] = {}
        self.told: dict[Pair, list[int]] = {}
        # By host: what it takes, in order, and which of that may make a buffer grow: none of that stage of that rank
        # was in it before.
        self.hosted: dict[int, dict[Residency, bool]] = {}
        # By evictor and host: the word with which it begins.
        self.words: dict[Pair, int] = {link: self._expect(1) for link in sorted(links_of(schedule))}
        self.waiting: dict[int, list[Walk]] = {}
        self.runnable: list[Walk] = []

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
        """Return what a rank tells, its number, by the place in its program where it has run, and passed on, the first
        forward of a stage that leaves."""
        rank, ops = program.rank, program.ops
        stages_to: dict[Host, set[int]] = {}
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
            self.told_by[rank, host.rank] = num_measured(self.schedule, rank, host)
            self.told[rank, host.rank] = [number for stage, number in by_stage.items() if stage in stages]
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
        """Return what a rank hosts, in the order in which it comes, and whether the buffer it goes to may have to grow for
        it."""
        if host not in self.hosted:
            seen: set[tuple[int, int, int]] = set()
            of_host = self.hosted[host] = {}
            for residency, buffer in host_buffers(self.schedule, host).items():
                key = (buffer, residency.stage, self.schedule.layout.rank_of(residency.stage, residency.microbatch))
                of_host[residency] = key not in seen
                seen.add(key)
        return self.hosted[host]
