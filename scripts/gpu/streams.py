"""The engine's order of streams, over hundreds of iterations in which forwards or copies are held back, memory is
poisoned and reused.

In: a device. Out: whether every gradient has the bits of a run without an engine; and, with one wait of the protocol
taken out at a time, how many iterations show it. The host buffers are in (pinned) host memory. Nothing here is timed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from bpipe.build import BalanceConfig, ScheduleConfig, build
from bpipe.ir.memory import num_transfers
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.evictor import Activations, ActivationsState, Evictor
from bpipe.runtime.streams import Streams, current, lanes, synchronize
from bpipe.transport.base import Done, Pending
from bpipe.transport.lanes import CopyLane, Job
from bpipe.transport.one_sided import OneSidedCopies
from gpu.common import FULL, MODERATE, REHEARSAL, Result, hold_back, in_host_memory, on_cuda, repeats, say
from gpu.one_stage import Delays, SmallStage, loop_of

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """`forward_s` and `copy_s`: how long a forward or a copy is held back where it is."""

    stages: int
    microbatches: int
    rows: int
    width: int
    iterations: int
    mutated_iterations: int
    forward_s: float
    copy_s: float


SIZES = {
    FULL: Sizes(8, 16, 1024, 1024, 300, 20, 4e-3, 3e-3),
    MODERATE: Sizes(8, 16, 1024, 1024, 30, 6, 4e-3, 3e-3),
    REHEARSAL: Sizes(8, 16, 32, 32, 6, 2, 1e-4, 5e-3),
}


class LateLane:
    """A lane whose copies are held back."""

    def __init__(self, lane: CopyLane, device: torch.device, delays: Delays) -> None:
        self._lane = lane
        self._device = device
        self._delays = delays

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:
        def late() -> None:
            hold_back(self._device, self._delays.copy_s)
            job()

        return self._lane.run(late, after)

    def close(self, wait: bool = True) -> None:
        self._lane.close(wait)


def late_lanes(device: torch.device, timeout_s: float, delays: Delays) -> tuple[CopyLane, CopyLane]:
    outbound, inbound = (LateLane(lane, device, delays) for lane in lanes(device, timeout_s))
    return outbound, inbound


# -- taking one wait out
# ----------------------------------------------------------------------------------------------------------------


def _bare(name: str) -> Callable[[Streams], contextlib.AbstractContextManager[None]]:
    """Return a side stream that is entered without waiting for compute."""

    @contextlib.contextmanager
    def enter(streams: Streams) -> Iterator[None]:
        with current(getattr(streams, name)):
            yield

    return enter


def _unwaited(state: ActivationsState) -> Callable[[Evictor, Activations, ActivationsState], None]:
    """`Evictor._finish`, without the wait that leads to this state."""
    finish = Evictor._finish

    def instead(evictor: Evictor, activations: Activations, wanted: ActivationsState) -> None:
        if wanted is state:
            activations.pending = Done()
        finish(evictor, activations, wanted)

    return instead


@dataclass(frozen=True)
class Mutation:
    """One wait taken out of the code.

    What makes it show: forwards held back, or copies. `on_cpu`: whether a CPU has this wait.
    """

    wait: str
    what: str
    target: Any
    attribute: str
    instead: Callable[[], Any]
    hold_copies: bool
    on_cpu: bool

    def applied(self) -> contextlib.AbstractContextManager[Any]:
        return patch.object(self.target, self.attribute, self.instead())


MUTATIONS = (
    Mutation(
        "[1]", "a put does not wait for the forward", Streams, "outbound", lambda: _bare("_outbound"), False, False
    ),
    # On a CPU the memory is really gone then: the copy would read what is nobody's, and may crash.
    Mutation(
        "[3]",
        "memory is freed before the put has ended",
        Evictor,
        "_finish",
        lambda: _unwaited(ActivationsState.AWAY),
        True,
        False,
    ),
    Mutation("[5]", "a get does not wait for compute", Streams, "inbound", lambda: _bare("_inbound"), False, False),
    Mutation(
        "[7]",
        "a backward does not wait for the get",
        Evictor,
        "_finish",
        lambda: _unwaited(ActivationsState.HERE),
        True,
        True,
    ),
)


# -- the step
# ----------------------------------------------------------------------------------------------------------------------


class Stage0:
    """Stage 0 of the balanced schedule, its engine, and the gradient it must have."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self.delays = Delays()
        self._device = device
        self._stage = SmallStage(device, sizes.rows, sizes.width, self.delays)
        self.plan = build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=BalanceConfig()))
        self._loop = loop_of(self.plan, 0, self._stage, self._stage.received)
        self._lanes = late_lanes(device, TIMEOUT_S, self.delays)
        self.expected = self.gradient(None)
        self.engine = self._engine()

    def _engine(self) -> Engine:
        transport = OneSidedCopies(in_host_memory(self._device), *self._lanes)
        config = EngineConfig("stage 0", self._device, minimum_bytes=1, timeout_s=TIMEOUT_S, poison=True)
        return Engine(self.plan, 0, transport, config)

    def gradient(self, engine: Engine | None) -> torch.Tensor:
        self._loop.run(engine)
        synchronize(self._device)
        return self._stage.gradient()

    def right(self) -> bool:
        """One iteration with the engine: whether its gradient has the expected bits."""
        return torch.equal(self.gradient(self.engine), self.expected)

    def start_over(self) -> None:
        """A new engine, after one whose waits were missing."""
        self.engine.release()
        self.engine = self._engine()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()


def run(device: torch.device, sizes: Sizes, until: float) -> Result:
    result = Result(ok=True)
    stage = Stage0(device, sizes)
    again = torch.equal(stage.gradient(None), stage.expected)
    result.check(
        "two runs without an engine", again, "the same bits" if again else "differing bits: nothing below can be judged"
    )
    transfers = num_transfers(stage.plan, 0)
    modes = [(sizes.forward_s, 0.0), (0.0, sizes.copy_s), (sizes.forward_s, sizes.copy_s), (0.0, 0.0)]
    wrong = count = 0
    for number in repeats(sizes.iterations, until, least=len(modes)):
        stage.delays.forward_s, stage.delays.copy_s = modes[number % len(modes)]
        wrong += not stage.right()
        count += 1
    text = f"{wrong} of {count} iterations differ ({transfers.evictions} evictions and {transfers.loads} loads in each)"
    result.check("gradients with delays and poison", wrong == 0, text)
    result.facts = {"iterations": count, "differing": wrong, "mutations": {}}
    for mutation in MUTATIONS:
        _try(mutation, stage, sizes, result)
    # What was mutated is whole again.
    stage.start_over()
    stage.delays.forward_s = stage.delays.copy_s = 0.0
    whole = stage.right()
    result.check("with all waits again", whole, "the same bits" if whole else "differing bits")
    stage.close()
    return result


def _try(mutation: Mutation, stage: Stage0, sizes: Sizes, result: Result) -> None:
    name = f"without {mutation.wait} ({mutation.what})"
    if not on_cuda(stage.expected.device) and not mutation.on_cpu:
        say(f"{name}: not on a CPU")
        return
    stage.start_over()
    stage.delays.forward_s = 0.0 if mutation.hold_copies else sizes.forward_s
    stage.delays.copy_s = sizes.copy_s if mutation.hold_copies else 0.0
    with mutation.applied():
        caught = sum(not stage.right() for _ in range(sizes.mutated_iterations))
    text = f"caught in {caught} of {sizes.mutated_iterations} iterations"
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        # One queue for all streams can order by chance what the code does not.
        result.row(name, text)
    else:
        result.check(name, 2 * caught > sizes.mutated_iterations, text)
    result.facts["mutations"][mutation.wait] = {"caught": caught, "iterations": sizes.mutated_iterations}
