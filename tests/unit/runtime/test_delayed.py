"""Every hand-over of the protocol with its producer held back: a missing wait is wrong every time, not now and then.

Two engines in one process, the evictor's and its acceptor's, each in a thread of its own over real graphs, poisoned
memory, and real lanes. What is held goes on only when somebody waits for it. On a CPU whatever the computation has
issued is done, so what a transfer owes to the computation before it ([1] and [5]) cannot be seen here: see
`tests/late`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.schedule.schedule import Schedule
from bpipe.transport import one_sided
from bpipe.transport.base import Transport
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.held import TIMEOUT_S, HeldLane, HeldMemory, HeldTwoSided, Point, held_host_memory
from tests.unit.runtime.loop import gradient, schedule
from tests.unit.transport.loopback import alone, peers

CPU = torch.device("cpu")
POINTS: tuple[Point, ...] = ("free", "before", "midway")
# In the second a host buffer is filled again before the backward of what left it, so [8] has something to hold apart.
SIZES = [(4, 8), (6, 12)]
ITERATIONS = 2


def both(
    plan: Schedule,
    transports: tuple[Transport, Transport],
    computing: Callable[[], None] = lambda: None,
    minimum_bytes: int = 1,
) -> None:
    """Run the evictor's and the acceptor's engine beside each other and compare their gradients with those of plain
    loops."""
    ranks = 0, len(plan.ranks) - 1
    config = EngineConfig("a test", CPU, TransferConfig(minimum_bytes=minimum_bytes, timeout_s=TIMEOUT_S, poison=True))
    engines = [Engine(plan, rank, transport, config) for rank, transport in zip(ranks, transports, strict=True)]
    found: dict[int, torch.Tensor] = {}
    errors: list[Exception] = []

    def run(engine: Engine, rank: int) -> None:
        try:
            found[rank] = gradient(engine, plan, ITERATIONS, rank, computing)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(engines, ranks, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank did not end"
    if errors:
        raise errors[0]
    releasing = threading.Thread(target=engines[1].release)
    releasing.start()
    engines[0].release()
    releasing.join(TIMEOUT_S)
    for rank in ranks:
        assert torch.equal(found[rank], gradient(None, plan, ITERATIONS, rank)), f"rank {rank}"


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("inbound", POINTS)
@pytest.mark.parametrize("outbound", POINTS)
@pytest.mark.parametrize("kind", ["peer", "host"])
def test_one_sided_copies_that_come_as_late_as_they_may(
    kind: str, outbound: Point, inbound: Point, p: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = HeldLane("outbound", outbound), HeldLane("inbound", inbound)
    monkeypatch.setattr(one_sided, "own_memory", held_host_memory)
    transports = peers(*lanes, lender=HeldMemory) if kind == "peer" else alone(*lanes)
    try:
        both(schedule(p, m), transports)
    finally:
        for lane in lanes:
            lane.close()


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("late_receive", [False, True], ids=["early receive", "late receive"])
@pytest.mark.parametrize("late_send", [False, True], ids=["early send", "late send"])
def test_two_sided_transfers_that_come_as_late_as_they_may(late_send: bool, late_receive: bool, p: int, m: int) -> None:
    both(schedule(p, m), HeldTwoSided.pair(late_send, late_receive))


@pytest.mark.parametrize("kind", ["peer", "host", "two-sided"])
def test_both_ends_agree_that_nothing_moves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two-sided, one end's empty transfer would wait for the other's; one-sided, memory of no bytes would be made
    and waited for."""

    def refused(*arguments: object) -> object:
        raise AssertionError("no memory was to be made")

    lanes = HeldLane("outbound", "before"), HeldLane("inbound", "before")
    monkeypatch.setattr(one_sided, "own_memory", refused)
    monkeypatch.setattr(HeldMemory, "make", refused)
    made: dict[str, Callable[[], tuple[Transport, Transport]]] = {
        "peer": lambda: peers(*lanes, lender=HeldMemory),
        "host": lambda: alone(*lanes),
        "two-sided": lambda: HeldTwoSided.pair(True, True),
    }
    try:
        both(schedule(6, 12), made[kind](), minimum_bytes=1_000_000)
    finally:
        for lane in lanes:
            lane.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_computation_that_is_held_up(late: bool) -> None:
    """Transfers run ahead of it."""

    def rest() -> None:
        time.sleep(0.002)

    lanes = HeldLane("outbound", "free"), HeldLane("inbound", "free")
    try:
        both(schedule(6, 12), HeldTwoSided.pair(late, late) if late else peers(*lanes, lender=HeldMemory), rest)
    finally:
        for lane in lanes:
            lane.close()


def test_a_partner_that_lends_late() -> None:
    """The first put waits for the memory in the lane's thread; the evictor's loop goes on until it needs what the
    put frees."""
    asked = threading.Event()

    class Asked(HeldLane):
        def run(self, job, after=()):  # type: ignore[no-untyped-def]
            ticket = super().run(job, after)
            wait = ticket.wait

            def waiting() -> None:
                asked.set()
                wait()

            ticket.wait = waiting
            return ticket

    lanes = Asked("outbound", "free"), HeldLane("inbound", "free")
    try:
        both(schedule(6, 12), peers(*lanes, lender=lambda: HeldMemory(lambda: asked.wait(TIMEOUT_S))))
    finally:
        for lane in lanes:
            lane.close()
    assert asked.is_set()
