"""Activations that a forward allocated on a second stream, evicted and loaded.

Reports how many micro-batches compute something wrong: without an engine, with one that knows the stream
(`EngineConfig.beside`), and with one that does not. A storage that was loaded belongs to the compute stream's memory,
whichever stream allocated it first. Autograd frees it once the node that reads it has been issued, and a computation of
the compute stream may take the memory at once, while the other stream is still reading. Megatron's shared expert
overlap is of this kind. Wrong values are expected if the engine does not know the stream, and do not count as a
failure.

    forward   side: scaled = received * 1.5      compute: busy      side: hidden = sin(scaled), saved
    backward  side: late, then reads hidden      compute: busy takes memory and fills it      side: scaled's

Autograd makes compute wait for the side stream only when a gradient crosses over, after `busy`: both ends of the side's
half are on the side stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.schedule.memory import num_transfers
from bpipe.transport.streams import synchronize
from tests.gpu.accelerators import Accelerator, join, on_stream
from tests.gpu.common import FULL, MODERATE, SMALL, Result, drawn, repeats
from tests.gpu.one_stage import balanced, engine_of, loop_of, to_host

TAKEN = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes. `late_s` is how long the side stream's backward is delayed before it reads what was saved."""

    length: int
    iterations: int
    late_s: float
    stages: int = 8
    microbatches: int = 16


SIZES = {FULL: Sizes(4 << 20, 20, 5e-3), MODERATE: Sizes(4 << 20, 4, 5e-3), SMALL: Sizes(1 << 10, 4, 1e-4)}


class _Aside(torch.autograd.Function):
    """Runs on the side stream, also in the backward: autograd remembers the stream of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Stage) -> torch.Tensor:
        hidden = torch.sin(x)
        ctx.save_for_backward(hidden)
        ctx.stage = stage
        return hidden.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (hidden,) = ctx.saved_tensors
        ctx.stage.on.hold_back(ctx.stage.late_s)
        ctx.stage.seen.append(hidden.sum())
        return gradient * hidden, None


class _Busy(torch.autograd.Function):
    """Runs on the compute stream: its backward allocates memory of that size, fills it with NaN, and frees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # Several, because the allocator may return any free block of this size.
        [torch.full(ctx.shape, torch.nan, device=gradient.device) for _ in range(TAKEN)]
        return gradient.expand(ctx.shape)


class Stage:
    """A stage half of which runs on a second stream.

    Attributes:
        seen: What each backward of that half read, in order.
    """

    def __init__(self, on: Accelerator, sizes: Sizes) -> None:
        self.on = on
        self.late_s = sizes.late_s
        self.seen: list[torch.Tensor] = []
        self._length = sizes.length
        self.side = torch.Stream(on.device)

    def __call__(self, received: torch.Tensor) -> torch.Tensor:
        with on_stream(self.side):
            scaled = received * 1.5
        busy = _Busy.apply(received)
        # Made last, so its backward is issued first, then that of `busy`, and that of `scaled` at the end.
        with on_stream(self.side):
            aside = _Aside.apply(scaled, self)
        del scaled
        join(self.side)
        end: torch.Tensor = busy + aside
        return end

    def received(self, microbatch: int) -> torch.Tensor:
        return drawn((self._length,), 1000 + microbatch, self.on.device).requires_grad_()


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result()
    plan = balanced(sizes.stages, sizes.microbatches)
    stage = Stage(on, sizes)
    loop = loop_of(plan, 0, stage, stage.received)
    seen = _seen_of(on.device, loop, stage)
    stage.late_s = 0.0
    expected = seen(None)
    stage.late_s = sizes.late_s
    alone = sum(_wrong(seen(None), expected) for _ in range(2))
    result.check("without an engine", alone == 0, f"{alone} of {2 * len(expected)} micro-batches read something else")
    result.facts = {"alone": alone}
    for name, noted in (("noted", [stage.side]), ("not noted", [])):
        engine = engine_of(plan, 0, on.device, to_host(on.device), beside=functools.partial(list, noted))
        wrong = count = 0
        for _ in repeats(sizes.iterations, until, least=2):
            wrong += _wrong(seen(engine), expected)
            count += 1
        moved = count * num_transfers(plan, 0).evictions
        text = f"{wrong} of {moved} moved micro-batches read something else"
        result.facts |= {f"{name}: wrong": wrong, "moved": moved, "moved_bytes": engine.moved_bytes.get(0, 0)}
        if engine.moved_bytes.get(0, 0) < 4 * sizes.length:
            result.check(f"the side stream {name}", False, "what it saved was not moved: nothing was tried")
        elif noted:
            result.check("the side stream noted", wrong == 0, text)
        else:
            verdict = "this is what the note is for" if wrong else "not reproduced: nothing follows from that"
            result.row("the side stream not noted", f"{text}: {verdict}")
        engine.release()
    return result


def _seen_of(device: torch.device, loop: Executor, stage: Stage) -> Callable[[Engine | None], list[float]]:
    def seen(engine: Engine | None) -> list[float]:
        stage.seen.clear()
        loop.run(engine)
        synchronize(device)
        return [float(value) for value in stage.seen]

    return seen


def _wrong(seen: list[float], expected: list[float]) -> int:
    return sum(actual != expected_value for actual, expected_value in zip(seen, expected, strict=True))
