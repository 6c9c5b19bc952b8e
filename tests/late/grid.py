"""Run plans on a late group, and check that the deadlock checker's verdict is right.

Takes a schedule, an exchange, and how it runs: by our own loop, by Megatron's exchanges, or by torch's runtime. The
making of communicators is included if a loop does not make them in advance.

The checker's ranks run a program in order and wait for each message, as hosts do with CPU tensors. A device's host
rarely waits, and its streams wait instead, so it reaches a transfer even if an earlier message has not arrived. So
there are two kinds of runs. If hosts wait as the checker's ranks do, both agree on every plan (`Run.exactly`). If
streams wait, the checker may report more deadlocks, but must report all that happen; both also agree there on plans as
they are balanced, with both ends of a transfer in one slot.

Whether the first EVICT into a buffer waits until its HOST has lent memory depends on the transport. The checker assumes
it only for `peer`; by default it assumes that every host lends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import schedules

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.record.report.memory import without_transfers
from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.rules import RULES, Case, ScheduleError, check_no_deadlock, check_other_ends
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.distributed import Distributed, Works
from bpipe.transport.edges import Edges
from tests.late.devices import Draw, extension
from tests.late.group import LateWork
from tests.late.loops import Exchanges, LateLoop
from tests.late.pipeline import LatePipeline
from tests.late.pipelined import TorchPipeline

EXCHANGES = {name: {family.exchange, Exchange.POSTED} for name, family in FAMILIES.items()}
EXCHANGES["interleaved-1f1b"].add(Exchange.MEGATRON_TURNS)
for _name, _family in FAMILIES.items():
    # Torch's runtime has only one pipe.
    EXCHANGES[_name] |= {Exchange.TORCH} if _family.num_pipes == 1 else set()
# Slots by which transfers on the hosts' side start later or earlier.
MOVES = ((Kind.HOST, -2), (Kind.HOST, 3), (Kind.RETURN, -1), (Kind.RETURN, 2))


@dataclass(frozen=True)
class Run:
    """How a plan runs: the transport, the number of hardware queues, and what else waits.

    `at_issue`: a rank waits for each transfer at its start, more than hardware queues require. `hosts_wait`: a
    host waits for each message, and for transfers according to `waits`.
    """

    kind: str = "two-sided"
    connections: int = 0
    waits: WaitLevel = WaitLevel.ASYNCHRONOUS
    births: bool = False
    differing: bool = False
    at_issue: bool = False
    hosts_wait: bool = False

    @property
    def blocks(self) -> bool:
        """Whether a host waits for each kernel that it launches."""
        return self.waits is WaitLevel.BLOCKING_LAUNCHES

    def exactly(self, in_one_slot: bool) -> bool:
        """Whether the same operations wait as in the checker.

        `in_one_slot`: whether both ends of each transfer are in one slot.
        """
        if self.hosts_wait:
            return True
        if self.differing or self.kind == "peer":
            return False
        waits = self.at_issue or self.blocks
        return waits == (self.waits >= WaitLevel.AT_ISSUE) and (in_one_slot or waits)


class _Waits:
    """Waits of a rank's host in addition to its program's, per thread."""

    def __init__(self, run: Run) -> None:
        self._run, self._here = run, threading.local()

    @contextmanager
    def added(self) -> Iterator[None]:
        replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (Distributed, "_send", self._starting),
            (Distributed, "_receive", self._starting),
        ]
        if self._run.hosts_wait:
            replaced += [(edges, "wait", self._taking) for edges in (Edges, Exchanges)]
            replaced += [(schedules, "_wait_batch_p2p", self._taking)]
            replaced += [(LateWork, "wait", self._blocking), (Engine, "before", self._computing)]
        with ExitStack() as stack:
            for owner, name, wrapped in replaced:
                stack.enter_context(patch.object(owner, name, wrapped(getattr(owner, name))))
            yield

    def _starting(self, move: Any) -> Any:
        def moved(transport: Distributed, tensors: Any) -> Works:
            works: Works = move(transport, tensors)
            self._under_way().extend(work._over for work in works._works)
            if self._run.at_issue or (self._run.hosts_wait and self._run.waits >= WaitLevel.AT_ISSUE):
                self._outstanding()
            return works

        return moved

    def _taking(self, wait: Any) -> Any:
        def waited(*arguments: Any) -> Any:
            self._here.takes = True
            try:
                tensors = wait(*arguments)
            finally:
                self._here.takes = False
            if self._run.waits >= WaitLevel.AFTER_EXCHANGES:
                self._outstanding()
            return tensors

        return waited

    def _blocking(self, wait: Any) -> Any:
        def waited(work: LateWork, timeout: Any = None) -> Any:
            over = wait(work, timeout)
            if getattr(self._here, "takes", False):
                extension().wait(work._over)
            return over

        return waited

    def _computing(self, before: Any) -> Any:
        def prepared(engine: Engine, *arguments: Any) -> None:
            before(engine, *arguments)
            if self._run.waits >= WaitLevel.IN_EVERY_OPERATION:
                self._outstanding()

        return prepared

    def _under_way(self) -> list[Any]:
        if not hasattr(self._here, "under_way"):
            self._here.under_way = []
        actions: list[Any] = self._here.under_way
        return actions

    def _outstanding(self) -> None:
        """Wait for every transfer that has started."""
        while under_way := self._under_way():
            extension().wait(under_way.pop(0))


def deadlocks(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Whether late devices deadlock. Raises other errors."""
    pipeline: LatePipeline
    if exchange is Exchange.POSTED:
        pipeline = LatePipeline(schedule, run.kind, differing=run.differing)
    elif exchange is Exchange.TORCH:
        pipeline = TorchPipeline(schedule, run.kind, differing=run.differing, judged=False)
    else:
        after, inside = run.waits >= WaitLevel.AFTER_EXCHANGES, run.waits >= WaitLevel.IN_EVERY_OPERATION
        synchronizing = (after, inside) if not run.hosts_wait and run.waits < WaitLevel.AT_ISSUE else (False, False)
        pipeline = LateLoop(schedule, run.kind, exchange, run.births, *synchronizing, run.differing)
    try:
        with _Waits(run).added():
            pipeline.run(Draw(1, connections=run.connections, launch_blocks=run.blocks), 2)
    except RuntimeError as error:
        if "nobody can go on" not in str(error.__cause__):
            raise
        return True
    return False


def may_deadlock(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Whether the checker reports a deadlock. Transfers to a node's own memory never wait."""
    judged = without_transfers(schedule) if run.kind == "host" else schedule
    lends = run.kind == "peer"
    return bool(blocked_ranks(judged, run.waits, exchange, run.births, run.differing, lends=lends))


def moved(schedule: Schedule, kind: Kind, by: int) -> Schedule | None:
    """Return the schedule with all actions of a kind `by` slots later, or None if a rule refuses it.

    The rules for deadlocks and for both ends of a transfer in one slot do not count.
    """
    ranks = []
    for row in schedule.ranks:
        transfers: list[list[Action]] = [[] for _ in row]
        for slot, cell in enumerate(row):
            for action in cell.transfers:
                transfers[min(max(slot + by * (action.kind is kind), 0), len(row) - 1)].append(action)
        ranks.append(
            tuple(
                replace(cell, transfers=tuple(cell_transfers))
                for cell, cell_transfers in zip(row, transfers, strict=True)
            )
        )
    changed = replace(schedule, ranks=tuple(ranks))
    case = Case(changed, Exchange.POSTED)
    try:
        for rule in RULES:
            if rule not in (check_no_deadlock, check_other_ends):
                rule(case)
    except ScheduleError:
        return None
    return changed


def runs(exchange: Exchange, everything: bool) -> Iterator[Run]:
    """Yield ways to run a plan: all of them with `everything`, otherwise some."""
    yield Run(births=True)
    yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, at_issue=True)
    yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, differing=True)
    yield Run(waits=WaitLevel.BLOCKING_LAUNCHES)
    yield Run(waits=WaitLevel.IN_EVERY_OPERATION, hosts_wait=True)
    if not everything:
        return
    yield Run()
    yield Run(waits=WaitLevel.AT_ISSUE, at_issue=True)
    yield Run(differing=True)
    for waits in (WaitLevel.ASYNCHRONOUS, WaitLevel.AFTER_EXCHANGES, WaitLevel.AT_ISSUE):
        yield Run(waits=waits, births=True, hosts_wait=True)
    yield Run("peer", births=True, hosts_wait=True)
    for connections in (1, 2, 8):
        yield Run(waits=WaitLevel.ONE_QUEUE, connections=connections)
        yield Run("host", waits=WaitLevel.ONE_QUEUE, connections=connections)
    yield Run("peer", births=True)
    yield Run("host")
    yield Run("host", waits=WaitLevel.BLOCKING_LAUNCHES)
    if exchange.is_megatron:
        yield Run(waits=WaitLevel.AFTER_EXCHANGES)
        yield Run(waits=WaitLevel.IN_EVERY_OPERATION)
        yield Run(waits=WaitLevel.AFTER_EXCHANGES, births=True)
        yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, births=True, at_issue=True)


def disagreements(
    schedule: Schedule, exchange: Exchange, everything: bool, in_one_slot: bool = True
) -> tuple[list[str], int]:
    """Return every run for which the checker is wrong, and the number of deadlocks.

    `in_one_slot` is that of `Run.exactly`. In a plan with moved transfers, an engine may report that it fills a host
    buffer that is not empty yet; that run says nothing about deadlocks.
    """
    wrong, num_deadlocks = [], 0
    for run in runs(exchange, everything):
        try:
            is_stuck = deadlocks(schedule, exchange, run)
        except RuntimeError as error:
            if in_one_slot or "the program uses it twice" not in str(error):
                raise
            continue
        judged = may_deadlock(schedule, exchange, run)
        num_deadlocks += is_stuck
        if is_stuck != judged if run.exactly(in_one_slot) else is_stuck > judged:
            wrong.append(f"{exchange.name}, {run}: {'deadlocks' if is_stuck else 'runs'}")
    return wrong, num_deadlocks


def plan_of(name: str, p: int, m: int, exchange: Exchange, hosts: str = "pair") -> Schedule | None:
    """Return a plan of a family, or None if it has none with this exchange.

    If all ranks hold the same and nothing would move, each rank of the first half holds one less, paired with the
    second half.
    """
    try:
        chunks = FAMILIES[name].min_chunks
        schedule = build(
            ScheduleConfig(name, p, m, num_chunks=chunks, balance=BalanceConfig(hosts=hosts), exchange=exchange)
        )
    except (ScheduleError, ValueError):
        return None
    if moves_anything(schedule) or hosts != "pair":
        return schedule
    plain = build(ScheduleConfig(name, p, m, num_chunks=chunks, exchange=exchange))
    peaks, half = [*map(int, peak_counts(plain))], p // 2
    bounds = [peaks[rank] - 1 if rank < half else 2 * peaks[rank] for rank in range(p)]
    return balance(plain, bounds, [(rank + half) % p for rank in range(p)])


def moves_anything(schedule: Schedule) -> bool:
    return any(cell.transfers for row in schedule.ranks for cell in row)
