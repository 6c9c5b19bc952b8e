"""The engine's order of streams, in many iterations with late forwards or copies and poisoned, reused memory.

Reports whether every gradient has the bits of a run without an engine; and, with one wait of the protocol removed at a
time, how many iterations show it. The host buffers are in pinned host memory. Nothing is timed.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bpipe.runtime.engine import Engine
from bpipe.schedule.memory import num_transfers
from bpipe.transport.one_sided import HostMemory
from bpipe.transport.streams import CopyLane, Device, Job, Pending, StreamLane
from tests.gpu.accelerators import LATE, Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, repeats
from tests.gpu.one_stage import TIMEOUT_S, SmallStage, balanced, engine_of, loop_of
from tests.gpu.waits import WAITS, Wait

# What comes late in each iteration: forwards, copies.
MODES = ((True, False), (False, True), (True, True), (False, False))


@dataclass(frozen=True)
class Sizes:
    stages: int
    microbatches: int
    rows: int
    width: int
    iterations: int
    iterations_without_a_wait: int


SIZES = {
    FULL: Sizes(8, 16, 1024, 1024, 300, 20),
    MODERATE: Sizes(8, 16, 1024, 1024, 30, 6),
    SMALL: Sizes(8, 10, 32, 32, 8, 2),
}


class LateLane(StreamLane):
    """A lane whose copies may come late."""

    def __init__(self, lane: CopyLane, on: Accelerator) -> None:
        self._lane = lane
        self._on = on

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:
        def late() -> None:
            self._on.before_copy()
            job()

        return self._lane.run(late, after)

    def close(self, wait: bool = True) -> None:
        self._lane.close(wait)


def late_lanes(on: Accelerator, timeout_s: float) -> tuple[CopyLane, CopyLane]:
    outbound, inbound = (LateLane(lane, on) for lane in Device(on.device).lanes(timeout_s))
    return outbound, inbound


def late_to_host(on: Accelerator) -> HostMemory:
    """Return a transport into host memory, whose copies may come late."""
    return HostMemory(Device(on.device), *late_lanes(on, TIMEOUT_S))


class Stage0:
    """Stage 0 of the balanced schedule, its engine, and the expected gradient."""

    def __init__(self, on: Accelerator, sizes: Sizes) -> None:
        self._on = on
        self._stage = SmallStage(on, sizes.rows, sizes.width)
        self.plan = balanced(sizes.stages, sizes.microbatches)
        self._loop = loop_of(self.plan, 0, self._stage, self._stage.received)
        self.expected = self.gradient(None)
        self.engine = self._engine()

    def _engine(self) -> Engine:
        return engine_of(self.plan, 0, self._on.device, late_to_host(self._on), poison=True)

    def gradient(self, engine: Engine | None) -> torch.Tensor:
        return self._stage.gradient_of(self._loop, engine)

    def right(self) -> bool:
        """Run one iteration with the engine; return whether its gradient has the expected bits."""
        return torch.equal(self.gradient(self.engine), self.expected)

    def start_over(self) -> None:
        """Make a new engine after one whose waits were missing."""
        self.engine.release()
        self.engine = self._engine()


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result(ok=True)
    stage = Stage0(on, sizes)
    again = torch.equal(stage.gradient(None), stage.expected)
    result.check(
        "two runs without an engine", again, "the same bits" if again else "differing bits: nothing below can be judged"
    )
    transfers = num_transfers(stage.plan, 0)
    wrong = count = 0
    for number in repeats(sizes.iterations, until, least=len(MODES)):
        on.come_late(*MODES[number % len(MODES)], number)
        wrong += not stage.right()
        count += 1
    text = f"{wrong} of {count} iterations differ ({transfers.evictions} evictions and {transfers.loads} loads in each)"
    result.check("gradients with delays and poison", wrong == 0, text)
    result.facts = {"iterations": count, "differing": wrong, "without": {}}
    for wait in WAITS:
        _without(wait, stage, on, sizes, result)
    # The removed wait is back.
    stage.start_over()
    on.come_late(False, False, 0)
    whole = stage.right()
    result.check("with all waits again", whole, "the same bits" if whole else "differing bits")
    stage.engine.release()
    return result


def _without(wait: Wait, stage: Stage0, on: Accelerator, sizes: Sizes, result: Result) -> None:
    stage.start_over()
    caught, count = 0, sizes.iterations_without_a_wait
    with wait.taken_out():
        for number in range(count):
            on.come_late(not wait.late_copies, wait.late_copies, number)
            caught += not stage.right()
    name, text = f"without {wait.number} ({wait.what})", f"caught in {caught} of {count} iterations"
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections == "1" or (connections and on.name == LATE):
        # Streams that share a queue may be ordered by chance where the code orders nothing: if there is one queue, or
        # on a late device with no more queues than this.
        result.row(name, text)
    else:
        result.check(name, 2 * caught > count, text)
    result.facts["without"][wait.number] = caught
