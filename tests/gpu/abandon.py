"""Whether a rank stops at once after an error, even if its device is still busy and may stay busy forever.

For the rank that evicts and the one that lends, reports whether `abandon` returned while a kernel was still running
after transfers had been issued. An NCCL kernel whose partner is gone never ends: a host that waits for the device
before it raises shows no error, and frees memory that the partner's copies still use.
"""

import time
from dataclasses import dataclass

from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.program import steps
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import synchronize
from tests.gpu.accelerators import Accelerator, Held
from tests.gpu.common import FULL, MODERATE, SMALL, Result, lender_on
from tests.gpu.one_stage import SmallStage, balanced, engine_of, lending, loop_of, to_host

# Most seconds that dropping references may take. Waiting for the device would take as long as it is busy.
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
    """An error in the middle of a training."""


class Breaking:
    """An engine's calls until an operation before which the device gets busy, and after which the loop fails."""

    def __init__(self, engine: Engine, action: Action, on: Accelerator, busy_s: float) -> None:
        self._engine = engine
        self._at = action
        self._on = on
        self._busy_s = busy_s
        self.busy: Held | None = None
        self.begin, self.after, self.sent = engine.begin, engine.after, engine.sent

    def before(self, op: Action) -> None:
        if op == self._at:
            self.busy = self._on.busy(self._busy_s)
        # Its transfers queue up after the work that keeps the device busy.
        self._engine.before(op)
        if op == self._at:
            raise Broken

    def communicated(self) -> None:
        raise AssertionError("the iteration should have failed")

    end = communicated


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result, device = Result(), on.device
    ways: dict[str, tuple[int, Transport]] = {
        "evictor, buffers in host memory": (0, to_host(device)),
        "acceptor, buffers lent to a partner": (
            sizes.stages - 1,
            lending(lender_on(device), device, 0, [4 * sizes.rows * sizes.width]),
        ),
    }
    for name, (rank, transport) in ways.items():
        _let_go(on, rank, transport, sizes, name, result)
    return result


def _let_go(on: Accelerator, rank: int, transport: Transport, sizes: Sizes, name: str, result: Result) -> None:
    plan = balanced(sizes.stages, sizes.microbatches)
    stage = SmallStage(on, sizes.rows, sizes.width, seed=rank)
    engine = engine_of(plan, rank, on.device, transport)
    loop = loop_of(plan, rank, stage, stage.received)
    loop.run(engine)
    synchronize(on.device)
    # The first transfer of the second half: some transfers have ended, some are in progress.
    busiest = [
        step.compute
        for step in steps(plan, rank)
        if step.compute and any(a.kind in (Kind.LOAD, Kind.HOST) for a in step.before)
    ]
    action = busiest[len(busiest) // 2]
    breaking = Breaking(engine, action, on, sizes.busy_s)
    try:
        loop.run(breaking)
    except Broken:
        begin = time.perf_counter()
        engine.abandon()
        taken_s = time.perf_counter() - begin
    assert breaking.busy is not None, f"{action} of stage {rank} did not come"
    is_over = breaking.busy.is_over()
    text = f"abandon after {taken_s * 1e3:.3g} ms at {action}; the device then: {'idle' if is_over else 'still busy'}"
    result.check(name, taken_s < AT_ONCE_S and not is_over, text)
    breaking.busy.let_go()
    synchronize(on.device)
