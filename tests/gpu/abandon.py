"""Whether a rank lets go at once when something failed, although its device is still busy and may stay so for ever.

In: a device. Out: for the rank that evicts and for the one that lends, whether `abandon` came back while a kernel went
on behind transfers that had been issued. A kernel of NCCL's whose partner is gone never ends: a host that waits for the
device before it raises shows no error, and frees memory that the partner's copies still use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.build import BalanceConfig, ScheduleConfig, build
from bpipe.ir.action import Action, Kind
from bpipe.ir.steps import steps
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.streams import lanes, synchronize
from bpipe.transport.base import Done, Pending, Transport
from bpipe.transport.control import Subject
from bpipe.transport.one_sided import OneSidedCopies, Peer
from tests.gpu.accelerators import Accelerator, Held
from tests.gpu.common import FULL, MODERATE, SMALL, Result, in_host_memory, lender_on
from tests.gpu.one_stage import SmallStage, loop_of

TIMEOUT_S = 60.0
# What dropping references may take at most. Waiting for the device takes as long as it is busy.
AT_ONCE_S = 0.5


@dataclass(frozen=True)
class Sizes:
    busy_s: float
    stages: int = 8
    microbatches: int = 16
    rows: int = 512
    width: int = 512


SIZES = {FULL: Sizes(4.0), MODERATE: Sizes(2.0), SMALL: Sizes(0.0, rows=16, width=16)}


class Broken(Exception):
    """The error in the middle of a training."""


class Breaking:
    """An engine's calls, until an operation before which the device gets busy and after which the loop fails."""

    def __init__(self, engine: Engine, at: Action, on: Accelerator, busy_s: float) -> None:
        self._engine = engine
        self._at = at
        self._on = on
        self._busy_s = busy_s
        self.busy: Held | None = None
        self.begin, self.after, self.sent = engine.begin, engine.after, engine.sent

    def before(self, op: Action) -> None:
        if op == self._at:
            self.busy = self._on.busy(self._busy_s)
        # The transfers it starts stand behind what the device is busy with.
        self._engine.before(op)
        if op == self._at:
            raise Broken

    def communicated(self) -> None:
        raise AssertionError("the iteration should have failed")

    end = communicated


class OneWay:
    """A partner that said how long its storages are, and says nothing more."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def send(self, about: Subject, value: Any) -> Pending:
        return Done()

    def receive(self, about: Subject) -> Any:
        return [[0, self._lengths]]


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result()
    both = lanes(on.device, TIMEOUT_S)
    lent = Peer(OneWay([sizes.rows * sizes.width * 4]), lender_on(on.device))  # type: ignore[arg-type]
    ways = {
        "evictor, buffers in host memory": (0, OneSidedCopies(in_host_memory(on.device), *both)),
        "acceptor, buffers lent to a partner": (sizes.stages - 1, OneSidedCopies(lent, *both)),
    }
    for name, (rank, transport) in ways.items():
        _let_go(on, rank, transport, sizes, name, result)
    return result


def _let_go(on: Accelerator, rank: int, transport: Transport, sizes: Sizes, name: str, result: Result) -> None:
    plan = build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=BalanceConfig()))
    stage = SmallStage(on, sizes.rows, sizes.width, seed=rank)
    config = EngineConfig(f"stage {rank}", on.device, minimum_bytes=1, timeout_s=TIMEOUT_S)
    engine = Engine(plan, rank, transport, config)
    loop = loop_of(plan, rank, stage, stage.received)
    loop.run(engine)
    synchronize(on.device)
    # Where the first transfer of the second half starts: some are over, some are under way.
    busiest = [
        step.compute
        for step in steps(plan, rank)
        if step.compute and any(a.kind in (Kind.LOAD, Kind.HOST) for a in step.before)
    ]
    at = busiest[len(busiest) // 2]
    breaking = Breaking(engine, at, on, sizes.busy_s)
    try:
        loop.run(breaking)
    except Broken:
        begin = time.perf_counter()
        engine.abandon()
        taken_s = time.perf_counter() - begin
    assert breaking.busy is not None, f"{at} of stage {rank} did not come"
    is_over = breaking.busy.is_over()
    text = f"abandon after {taken_s * 1e3:.3g} ms at {at}; the device then: {'over' if is_over else 'still busy'}"
    result.check(name, taken_s < AT_ONCE_S and not is_over, text)
    breaking.busy.let_go()
    synchronize(on.device)
