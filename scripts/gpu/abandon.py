"""Whether a rank lets go at once when something failed, although its device is still busy and may stay so for ever.

In: a device. Out: for the rank that evicts and for the one that lends, how long `abandon` kept the host while a kernel
went on counting behind transfers that had been issued. A kernel of NCCL's whose partner is gone never ends: a host that
waits for the device before it raises shows no error, and frees memory that the partner's copies still use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.build import BalanceConfig, ScheduleConfig, build
from bpipe.ir.action import Action, Kind
from bpipe.ir.steps import steps
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.streams import lanes, synchronize
from bpipe.transport.base import Done, Pending, Transport
from bpipe.transport.control import Subject
from bpipe.transport.one_sided import OneSidedCopies, Peer
from gpu.common import FULL, MODERATE, REHEARSAL, Result, hold_back, in_host_memory, lender_on, on_cuda
from gpu.one_stage import Delays, SmallStage, loop_of

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


SIZES = {FULL: Sizes(4.0), MODERATE: Sizes(2.0), REHEARSAL: Sizes(0.01, rows=16, width=16)}


class Broken(Exception):
    """The error in the middle of a training."""


class Breaking:
    """An engine's calls, until an operation after which the device stays busy and the loop fails."""

    def __init__(self, engine: Engine, at: Action, device: torch.device, busy_s: float) -> None:
        self._engine = engine
        self._at = at
        self._device = device
        self._busy_s = busy_s
        self.busy: torch.cuda.Event | None = None

    def begin(self) -> None:
        self._engine.begin()

    def before(self, op: Action) -> None:
        if op == self._at:
            hold_back(self._device, self._busy_s)
            if on_cuda(self._device):
                self.busy = torch.cuda.Event()
                self.busy.record()
        # The transfers it starts stand behind what the device is busy with.
        self._engine.before(op)
        if op == self._at:
            raise Broken

    def after(
        self, op: Action, outputs: Sequence[torch.Tensor | None] = (), inputs: Sequence[torch.Tensor | None] = ()
    ) -> None:
        self._engine.after(op, outputs, inputs)

    def sent(self, op: Action) -> None:
        self._engine.sent(op)

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


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    result = Result()
    lender = lender_on(device)
    both = lanes(device, TIMEOUT_S)
    lent = Peer(OneWay([sizes.rows * sizes.width * 4]), lender)  # type: ignore[arg-type]
    ways = {
        "evictor, buffers in host memory": (0, OneSidedCopies(in_host_memory(device), *both)),
        "acceptor, buffers lent to a partner": (sizes.stages - 1, OneSidedCopies(lent, *both)),
    }
    for name, (rank, transport) in ways.items():
        _let_go(device, rank, transport, sizes, name, result)
    for lane in both:
        lane.close()
    return result


def _let_go(device: torch.device, rank: int, transport: Transport, sizes: Sizes, name: str, result: Result) -> None:
    plan = build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=BalanceConfig()))
    stage = SmallStage(device, sizes.rows, sizes.width, Delays(), seed=rank)
    engine = Engine(plan, rank, transport, EngineConfig(f"stage {rank}", device, minimum_bytes=1, timeout_s=TIMEOUT_S))
    loop = loop_of(plan, rank, stage, stage.received)
    loop.run(engine)
    synchronize(device)
    # Where the first transfer of the second half starts: some are over, some are under way.
    busiest = [
        step.compute
        for step in steps(plan, rank)
        if step.compute and any(a.kind in (Kind.LOAD, Kind.HOST) for a in step.before)
    ]
    at = busiest[len(busiest) // 2]
    breaking = Breaking(engine, at, device, sizes.busy_s)
    try:
        loop.run(breaking)
    except Broken:
        begin = time.perf_counter()
        engine.abandon()
        taken_s = time.perf_counter() - begin
    else:
        raise AssertionError(f"{at} of stage {rank} did not come")
    still = (
        "a CPU is never busy" if breaking.busy is None else "no longer busy" if breaking.busy.query() else "still busy"
    )
    busy = breaking.busy is None or still == "still busy"
    text = f"abandon after {taken_s * 1e3:.3g} ms at {at}; the device then: {still}"
    result.check(name, taken_s < AT_ONCE_S and busy, text)
    synchronize(device)
