"""The deadlock checker and late groups, held to each other over a grid of plans: of each both say whether somebody
waits for ever.

Births of communicators are judged and run, too, where a loop's are not made before it. Beside plans as they are
balanced stand the same with transfers started earlier or later on the hosts' side, of which many stand still.

Where a rank waits for each transfer where it starts, that is more than hardware queues ask for, and the run here waits
so. Of fewer waits, and of lengths in front, the checker says more than what happens: there nobody may stand still whom
it lets go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.check.case import Case, ScheduleError
from bpipe.check.deadlock import WaitLevel, blocked_ranks
from bpipe.check.rules import RULES, check_no_deadlock, check_other_ends
from bpipe.generate.families import FAMILIES
from bpipe.ir.action import Action, Kind
from bpipe.ir.program import Exchange
from bpipe.ir.schedule import Schedule
from bpipe.lower.lower import lower
from bpipe.report.memory import without_transfers
from bpipe.transport.distributed import Distributed, Works
from tests.late.devices import Draw
from tests.late.loops import LateLoop
from tests.late.pipeline import LatePipeline
from tests.support.hand_made import far_ahead, host_first

EXCHANGES = {name: {family.exchange, Exchange.POSTED} for name, family in FAMILIES.items()}
EXCHANGES["interleaved-1f1b"].add(Exchange.MEGATRON_TURNS)
# What starts so many slots later on the hosts' side, or earlier.
MOVES = ((Kind.HOST, -2), (Kind.HOST, 3), (Kind.RETURN, -1), (Kind.RETURN, 2))


@dataclass(frozen=True)
class Run:
    """How a plan runs: over what activations move, how many hardware queues there are, and what else waits.

    `blocks`: a host waits for each kernel that it launches. `exactly`: what waits there is what the checker takes to
    wait, no less.
    """

    kind: str = "two-sided"
    connections: int = 0
    waits: WaitLevel = WaitLevel.ASYNCHRONOUS
    births: bool = False
    differing: bool = False
    at_issue: bool = False

    @property
    def blocks(self) -> bool:
        return self.waits is WaitLevel.BLOCKING_LAUNCHES

    @property
    def exactly(self) -> bool:
        waits = self.at_issue or self.blocks
        return not self.differing and self.kind != "peer" and waits == (self.waits >= WaitLevel.AT_ISSUE)


@contextmanager
def waiting_at_issue() -> Iterator[None]:
    """Each transfer is waited for where it starts, by the host, too."""

    def over(move: Any) -> Any:
        def moved(self: Distributed, tensors: Any) -> Works:
            works: Works = move(self, tensors)
            works.wait()
            torch.accelerator.current_stream().synchronize()
            return works

        return moved

    with (
        patch.object(Distributed, "_send", over(Distributed._send)),
        patch.object(Distributed, "_receive", over(Distributed._receive)),
    ):
        yield


def stands_still(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Whether late devices do. Raises what else goes wrong."""
    if exchange is Exchange.POSTED:
        pipeline = LatePipeline(schedule, run.kind, differing=run.differing)
    else:
        after, inside = run.waits >= WaitLevel.AFTER_EXCHANGES, run.waits >= WaitLevel.IN_EVERY_OPERATION
        synchronizing = (after, inside) if run.exactly else (False, False)
        pipeline = LateLoop(schedule, run.kind, exchange, run.births, *synchronizing, run.differing)
    try:
        with waiting_at_issue() if run.at_issue else nullcontext():
            pipeline.run(Draw(1, connections=run.connections, launch_blocks=run.blocks), 2)
    except RuntimeError as error:
        if "nobody can go on" not in str(error.__cause__):
            raise
        return True
    return False


def may_stand_still(schedule: Schedule, exchange: Exchange, run: Run) -> bool:
    """Whether the checker says so. What a rank keeps in its own node's memory waits for nobody."""
    judged = without_transfers(schedule) if run.kind == "host" else schedule
    return bool(blocked_ranks(judged, run.waits, exchange, run.births, run.differing))


def moved(schedule: Schedule, kind: Kind, by: int) -> Schedule | None:
    """Start everything of a kind so many slots later. None: a rule refuses it, but for that of deadlocks and that which
    wants both ends of a transfer in one slot."""
    ranks = []
    for row in schedule.ranks:
        transfers: list[list[Action]] = [[] for _ in row]
        for slot, cell in enumerate(row):
            for action in cell.transfers:
                transfers[min(max(slot + by * (action.kind is kind), 0), len(row) - 1)].append(action)
        ranks.append(tuple(replace(cell, transfers=tuple(there)) for cell, there in zip(row, transfers, strict=True)))
    found = replace(schedule, ranks=tuple(ranks))
    case = Case(found, Exchange.POSTED)
    try:
        for rule in RULES:
            if rule not in (check_no_deadlock, check_other_ends):
                rule(case)
    except ScheduleError:
        return None
    return found


def runs(exchange: Exchange, everything: bool) -> Iterator[Run]:
    """How to run a plan, `everything` or a share of it."""
    yield Run(births=True)
    yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, at_issue=True)
    yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, differing=True)
    yield Run(waits=WaitLevel.BLOCKING_LAUNCHES)
    if not everything:
        return
    yield Run()
    yield Run(waits=WaitLevel.AT_ISSUE, at_issue=True)
    yield Run(differing=True)
    for connections in (1, 2, 8):
        yield Run(waits=WaitLevel.ONE_QUEUE, connections=connections)
        yield Run("host", waits=WaitLevel.ONE_QUEUE, connections=connections)
    yield Run("peer", births=True)
    yield Run("host")
    yield Run("host", waits=WaitLevel.BLOCKING_LAUNCHES)
    if exchange is not Exchange.POSTED:
        yield Run(waits=WaitLevel.AFTER_EXCHANGES)
        yield Run(waits=WaitLevel.IN_EVERY_OPERATION)
        yield Run(waits=WaitLevel.AFTER_EXCHANGES, births=True)
        yield Run(waits=WaitLevel.ONE_QUEUE, connections=1, births=True, at_issue=True)


def disagreements(
    schedule: Schedule, exchange: Exchange, everything: bool, moved: bool = False
) -> tuple[list[str], int]:
    """Every run of which the checker says something else than what happens; and how many stood still.

    `moved`: a HOST may come long after its EVICT. The checker lets the first of each buffer wait where it starts, and a
    two-sided one waits where its memory is taken: there nobody may stand still whom it lets go.
    """
    wrong, still = [], 0
    for run in runs(exchange, everything):
        stands, judged = stands_still(schedule, exchange, run), may_stand_still(schedule, exchange, run)
        still += stands
        exactly = run.exactly and (not moved or run.waits >= WaitLevel.AT_ISSUE)
        if stands != judged if exactly else stands > judged:
            wrong.append(f"{exchange.name}, {run}: {'stands still' if stands else 'goes on'}")
    return wrong, still


def plan_of(name: str, p: int, m: int, exchange: Exchange, hosts: str = "pair") -> Schedule | None:
    """A plan, None where this exchange has none. Of a family that holds alike on all ranks nothing moves."""
    try:
        return build(
            ScheduleConfig(name, p, m, FAMILIES[name].min_chunks, BalanceConfig(hosts=hosts), exchange=exchange)
        )
    except (ScheduleError, ValueError):
        return None


def moves_anything(schedule: Schedule) -> bool:
    return any(cell.transfers for row in schedule.ranks for cell in row)


SHARE = (("1f1b", 8), ("interleaved-1f1b", 4), ("v-half", 4), ("chimera", 4), ("zb-h1", 4))


@pytest.mark.parametrize(("name", "p"), SHARE)
def test_both_say_the_same(name: str, p: int) -> None:
    for exchange in sorted(EXCHANGES[name], key=lambda one: one.value):
        schedule = plan_of(name, p, p if p == 8 else 2 * p, exchange)
        assert schedule is not None
        assert disagreements(schedule, exchange, everything=False)[0] == []


def test_both_say_the_same_of_births() -> None:
    """With 8 stages Megatron's 1F1B stands still unless its communicator is made before, over whatever tells sizes;
    with 4 it does not."""
    for p, stands in ((4, False), (8, True)):
        schedule = plan_of("1f1b", p, 8, Exchange.MEGATRON_1F1B)
        assert schedule is not None
        for kind in ("two-sided", "peer"):
            for births in (False, True):
                run = Run(kind, births=births)
                found = (
                    stands_still(schedule, Exchange.MEGATRON_1F1B, run),
                    may_stand_still(schedule, Exchange.MEGATRON_1F1B, run),
                )
                assert found == (stands and births, stands and births), run
        # Where a rank's own node takes what leaves nobody waits to hear of it.
        assert not stands_still(schedule, Exchange.MEGATRON_1F1B, Run("host", births=True))


def test_both_say_the_same_of_plans_that_stand_still() -> None:
    for schedule, run, stands in (
        (far_ahead(), Run(), False),
        (far_ahead(), Run(waits=WaitLevel.ONE_QUEUE, connections=1), True),
        (host_first(), Run(), False),
        (host_first(), Run(differing=True), True),
        (host_first(), Run(waits=WaitLevel.AT_ISSUE, at_issue=True), True),
    ):
        assert (stands_still(schedule, Exchange.POSTED, run), may_stand_still(schedule, Exchange.POSTED, run)) == (
            stands,
            stands,
        ), run


def test_a_rank_that_idles_takes_two_messages_of_one_neighbour() -> None:
    """Of six stages or more, in as many micro-batches again: by the program a rank that waits for its next forward is
    sent two gradients meanwhile. The stand-in for Megatron's loop took one, and fell over every such plan of the slow
    grid."""
    exchange = Exchange.MEGATRON_INTERLEAVED
    schedule = plan_of("interleaved-1f1b", 6, 12, exchange)
    assert schedule is not None
    instructions = [str(each) for each in lower(schedule, exchange)[0].instructions]
    assert "post 7B2>6B2, post 7B3>6B3" in ", ".join(instructions)
    assert disagreements(schedule, exchange, everything=False)[0] == []


def test_launches_that_block_hold_our_own_loop_and_not_megatrons() -> None:
    """A host that waits for a receive which it posts ahead never comes to what its sender waits for. The trainer
    refuses such a plan with CUDA_LAUNCH_BLOCKING=1."""
    for exchange, stands in ((Exchange.POSTED, True), (Exchange.MEGATRON_1F1B, False)):
        schedule = plan_of("1f1b", 4, 8, exchange)
        assert schedule is not None
        for kind in ("two-sided", "host"):
            run = Run(kind, waits=WaitLevel.BLOCKING_LAUNCHES)
            assert stands_still(schedule, exchange, run) is stands, run
            assert may_stand_still(schedule, exchange, run) is stands, run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_say_the_same_over_the_grid(name: str) -> None:
    wrong: list[str] = []
    for p, m in ((4, 4), (4, 8), (6, 12), (8, 8), (8, 16)):
        for exchange in sorted(EXCHANGES[name], key=lambda one: one.value):
            for hosts in ("pair", "pool"):
                schedule = plan_of(name, p, m, exchange, hosts)
                if schedule is not None and (hosts == "pair" or moves_anything(schedule)):
                    wrong += [
                        f"p={p} m={m} {hosts} {each}" for each in disagreements(schedule, exchange, everything=True)[0]
                    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_say_the_same_of_plans_that_were_moved(name: str) -> None:
    """Some of these stand still. Of others the engine says that they fill a host buffer that is not empty yet."""
    wrong: list[str] = []
    plans = ran = still = 0
    for p, m in ((4, 8), (6, 12)):
        for exchange in sorted(EXCHANGES[name], key=lambda one: one.value):
            schedule = plan_of(name, p, m, exchange)
            if schedule is None or not moves_anything(schedule):
                continue
            plans += 1
            for kind, by in MOVES:
                other = moved(schedule, kind, by)
                if other is None:
                    continue
                try:
                    found, stood = disagreements(other, exchange, everything=True, moved=True)
                except RuntimeError as error:
                    if "the program uses it twice" not in str(error):
                        raise
                    continue
                ran, still = ran + 1, still + stood
                wrong += [f"p={p} m={m} {kind.name} {by:+} {each}" for each in found]
    print(f"{name}: {plans} plans, {ran} moved, {still} runs of these stood still")
    assert wrong == []
    assert bool(ran) == bool(still) == bool(plans)
