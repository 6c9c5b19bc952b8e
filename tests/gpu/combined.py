"""Activations of layers that run in parts on two streams, for two micro-batches at once, evicted and loaded.

Reports how many micro-batches of combined 1F1B have another gradient than without an engine: with an engine that knows
the stream of exchanges (`EngineConfig.beside`), and with one that does not. The program is that of Megatron's
`--overlap-moe-expert-parallel-comm`: each backward runs together with a forward, part by part, and the parts' graphs
are not connected. The input from the previous stage and the gradient from the next one are random. Wrong gradients are
possible if the engine does not know the stream, and do not count as a failure.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.engine import Engine
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.streams import synchronize
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, drawn, repeats
from tests.gpu.one_stage import engine_of, to_host
from tests.gpu.parts import LayerPlan, Steps, run_at_once

_HALF = 0.5


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    iterations: int
    stages: int = 8
    microbatches: int = 16


SIZES = {FULL: Sizes(4096, 4096, 20), MODERATE: Sizes(2048, 1024, 4), SMALL: Sizes(16, 16, 2)}


class Chunks:
    """One rank's chunks, each a layer of parts."""

    def __init__(self, on: Accelerator, sizes: Sizes, schedule: Schedule) -> None:
        self._on, self._shape, self._row = on, (sizes.rows, sizes.width), schedule.ranks[0]
        self.exchange = torch.Stream(on.device)
        self._weights = {
            stage: torch.nn.Parameter(drawn((sizes.width, sizes.width), stage, on.device) / sizes.width**0.5)
            for stage in schedule.layout.stages_of(0)
        }
        self._gradient = drawn(self._shape, 999, on.device)

    def iterate(self, engine: Engine | None) -> list[torch.Tensor]:
        """Run an iteration; return a sum of each backward's gradients in order, and then of each weight's."""
        values: list[torch.Tensor] = []
        plans: dict[tuple[int, int], LayerPlan] = {}
        if engine is not None:
            engine.begin()
        for cell in self._row:
            if cell.compute is not None:
                self._together(cell.compute, cell.overlapped, plans, engine, values)
        if engine is not None:
            engine.end()
        for weight in self._weights.values():
            assert weight.grad is not None
            values.append(weight.grad.double().sum())
            weight.grad = None
        synchronize(self._on.device)
        return values

    def _together(
        self,
        first: Action,
        overlapping: Action | None,
        plans: dict[tuple[int, int], LayerPlan],
        engine: Engine | None,
        values: list[torch.Tensor],
    ) -> None:
        forward = first if first.kind is Kind.FORWARD else None
        backward = overlapping if forward is not None else first
        if engine is not None:
            engine.before(first, overlapping)
        forward_plan, received = None, drawn(self._shape, 1000 + first.microbatch, self._on.device).requires_grad_()
        forwards: Steps = []
        backwards: Steps = []
        if forward is not None:
            compute = torch.accelerator.current_stream()
            forward_plan = LayerPlan(
                compute, self.exchange, self._weights[forward.stage], lambda hidden: hidden * _HALF
            )
            forwards = forward_plan.forwards(received)
            plans[forward.stage, forward.microbatch] = forward_plan
        if backward is not None:
            backward_plan = plans.pop((backward.stage, backward.microbatch))
            backward_plan.begin()
            backwards = backward_plan.backwards(self._gradient, lambda gradient: values.append(gradient.double().sum()))
            run_at_once(backwards, forwards)
            backward_plan.end()
        else:
            run_at_once(backwards, forwards)
        forwards = backwards = []
        if forward_plan is not None:
            forward_plan.end()
        if engine is not None:
            if forward_plan is not None:
                engine.after(first, [forward_plan.loss.output], [received], forward_plan.pieces())
            else:
                engine.after(first)
            engine.sent(first)


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result = Result()
    plan = build(
        ScheduleConfig("combined-1f1b", sizes.stages, sizes.microbatches, num_chunks=2, balance=BalanceConfig())
    )
    chunks = Chunks(on, sizes, plan)
    expected = chunks.iterate(None)
    alone = _wrong(chunks.iterate(None), expected)
    result.check("without an engine", alone == 0, f"{alone} of {len(expected)} sums differ")
    for name, noted in (("noted", [chunks.exchange]), ("not noted", [])):
        engine = engine_of(plan, 0, on.device, to_host(on.device), beside=functools.partial(list, noted), at_once=True)
        wrong = sum(_wrong(values, expected) for values in _iterations(chunks, engine, sizes, until))
        moved = sum(engine.moved_bytes.values())
        result.facts |= {f"{name}: wrong": wrong, "moved_bytes": moved}
        text = f"{wrong} sums differ, with {num_transfers(plan, 0).evictions} evictions per iteration"
        if moved < sizes.rows * sizes.width * 4:
            result.check(f"the stream of exchanges {name}", False, "what parts saved was not moved: nothing was tried")
        elif noted:
            result.check("the stream of exchanges noted", wrong == 0, text)
        else:
            verdict = "this is what the note is for" if wrong else "not reproduced: nothing follows from that"
            result.row("the stream of exchanges not noted", f"{text}: {verdict}")
        engine.release()
    return result


def _iterations(chunks: Chunks, engine: Engine, sizes: Sizes, until: float) -> Iterator[list[torch.Tensor]]:
    for _ in repeats(sizes.iterations, until, least=2):
        yield chunks.iterate(engine)


def _wrong(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    return sum(float(value) != float(expected_value) for value, expected_value in zip(actual, expected, strict=True))
