"""Judge a plan by the deadlock checker and run it on a late group, to see whether both say that somebody waits for ever.

In: a schedule, an exchange, and how it runs: by our own loop, by Megatron's exchanges, or by torch's runtime. Out: what
the checker says, and what happens. Births of communicators are judged and run, too, where a loop's are not made before
it.

The checker's ranks do all that a program says in order, as the hosts of a CPU do: they wait for each message. A
device's host waits for few things, its streams for the rest, so it comes to a transfer that waits for it although a
message which stands in front has not come. So there are two kinds of runs. Where hosts wait as the checker's ranks do,
both say the same, of every plan (`Run.exactly`). Where streams do, the checker may say more, and nobody may stand still
whom it lets go; of plans as they are balanced, both ends of a transfer in one slot, both say the same there, too.

What both leave out is room for what leaves: whether the first EVICT into a buffer waits until its HOST has lent memory
is up to the transport. The checker is asked so for `peer` alone; without being told it takes every host to lend.
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
    # Torch's runtime has one pipe.
    EXCHANGES[_name] |= {Exchange.TORCH} if _family.num_pipes == 1 else set()
# What starts so many slots later on the hosts' side, or earlier.
MOVES = ((Kind.HOST, -2), (Kind.HOST, 3), (Kind.RETURN, -1), (Kind.RETURN, 2))


@dataclass(frozen=True)
class Run:
    """How a plan runs: over what activations move, how many hardware queues there are, and what else waits.

    `at_issue`: a rank waits for each transfer where it starts, which is more than hardware queues ask for. `hosts_wait`:
    a host waits for each message, and for transfers where `waits` says so.
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
        """A host waits for each kernel that it launches."""
        return self.waits is WaitLevel.BLOCKING_LAUNCHES

    def exactly(self, in_one_slot: bool) -> bool:
        """Return whether what waits there is what the checker takes to wait, no less. `in_one_slot`: both ends of each
        transfer stand so."""
        if self.hosts_wait:
            return True
        if self.differing or self.kind == "peer":
            return False
        waits = self.at_issue or self.blocks
        return waits == (self.waits >= WaitLevel.AT_ISSUE) and (in_one_slot or waits)


class _Waits:
    """What a rank's host waits for beyond what its program does: a thread's."""

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


def stands_still(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Return whether late devices do. Raises what else goes wrong."""
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


def may_stand_still(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Return whether the checker says so. What a rank keeps in its own node's memory waits for nobody."""
    judged = without_transfers(schedule) if run.kind == "host" else schedule
    lends = run.kind == "peer"
    return bool(blocked_ranks(judged, run.waits, exchange, run.births, run.differing, lends=lends))


def moved(schedule: Schedule, kind: Kind, by: int) -> Schedule | None:
    """Start everything of a kind so many slots later. None: a rule refuses it, but for that of deadlocks and that which
    wants both ends of a transfer in one slot."""
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
    """Yield how to run a plan, `everything` or a share of it."""
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
    """Return every run of which the checker says something else than what happens, and how many stood still.

    `in_one_slot` as of `Run.exactly`. Of a plan with transfers elsewhere an engine may say that it fills a host buffer
    that is not empty yet: that run ends there and says nothing.
    """
    wrong, still = [], 0
    for run in runs(exchange, everything):
        try:
            stands = stands_still(schedule, exchange, run)
        except RuntimeError as error:
            if in_one_slot or "the program uses it twice" not in str(error):
                raise
            continue
        judged = may_stand_still(schedule, exchange, run)
        still += stands
        if stands != judged if run.exactly(in_one_slot) else stands > judged:
            wrong.append(f"{exchange.name}, {run}: {'stands still' if stands else 'goes on'}")
    return wrong, still


def plan_of(name: str, p: int, m: int, exchange: Exchange, hosts: str = "pair") -> Schedule | None:
    """Return a plan of a family, None where this exchange has none. Where all ranks hold alike and nothing would move,
    each of the first half holds one less, beside one of the second half."""
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
