"""Combined 1F1B on late devices: layers run in parts on two streams, two micro-batches at once, with a graph in pieces.

Takes a schedule whose forwards and backwards overlap, with the parts of `tests.gpu.parts`. Engine, streams, transports
and messages are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import ComputationHooks, Executor
from bpipe.runtime.stage import Messages, TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.schedule import Schedule
from tests.gpu.parts import LayerPlan, Steps, Tensors, one_piece, run_at_once
from tests.late.devices import device
from tests.late.model import LateModel
from tests.late.pipeline import LatePipeline, Rank
from tests.unit.runtime.pipeline import inputs_of


class InPieces(LateModel):
    """A model whose stages are one layer of parts. `streams(rank)` are those of its exchanges."""

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages)
        self._exchanges: dict[int, torch.Stream] = {}

    def streams(self, rank: int) -> list[torch.Stream]:
        return [stream for device, stream in self._exchanges.items() if device == rank]

    def end(self, stage: int, microbatch: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if stage + 1 < self._num_stages:
            return lambda output: output * 0.5
        return lambda output: (output * (microbatch + 1)).square().mean()

    def forward(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        """Return the expected result, computed in one piece."""
        (x,) = received or (self.received(microbatch, weight.device),)
        return self.end(stage, microbatch)(one_piece(x, weight))

    def received(self, microbatch: int, on: torch.device) -> torch.Tensor:
        return inputs_of(microbatch).to(on).requires_grad_()

    def plan(self, rank: int, stage: int, microbatch: int) -> LayerPlan:
        if rank not in self._exchanges:
            self._exchanges[rank] = torch.Stream(device(rank))
        weight = self._on_device[rank, stage]
        return LayerPlan(torch.accelerator.current_stream(), self._exchanges[rank], weight, self.end(stage, microbatch))


class AtOnce(Executor):
    """An executor that runs two overlapping computations part by part, with one pair of engine calls around both."""

    def __init__(self, rank: PiecesRank, schedule: Schedule, stages: TorchStages, messages: Messages) -> None:
        super().__init__(schedule, rank.rank, stages, messages)
        self._of = rank
        self._together = {cell.compute: cell.overlapped for cell in schedule.ranks[rank.rank] if cell.overlapped}
        self._waiting: tuple[Action, Tensors] | None = None
        self._plans: dict[tuple[int, int], LayerPlan] = {}

    def _run(self, action: Action, calls: ComputationHooks | None) -> None:
        needed = self._dependencies.operand_of(action)
        received = () if needed < 0 else self._take(needed, action)
        if action in self._together:
            self._waiting = action, received
            return
        waiting, self._waiting = self._waiting, None
        engine = self._of.engine
        forward = waiting or ((action, received) if action.kind is Kind.FORWARD else None)
        backward = (action, received) if action.kind is not Kind.FORWARD else None
        first, overlapping = (forward or backward or (action,))[0], backward[0] if forward and backward else None
        if engine is not None:
            engine.before(first, overlapping)
        outputs, inputs, plan = self._compute_both(forward, backward)
        if engine is not None:
            if plan is None:
                engine.after(first)
            else:
                engine.after(first, outputs, inputs, plan.pieces())
            engine.sent(first)

    def _compute_both(
        self, forward: tuple[Action, Tensors] | None, backward: tuple[Action, Tensors] | None
    ) -> tuple[Tensors, Tensors, LayerPlan | None]:
        model = self._of.model
        backwards: Steps = []
        forwards: Steps = []
        forward_plan = backward_plan = None
        inputs: Tensors = ()
        gradients: list[torch.Tensor] = []
        if forward is not None:
            action, tensors = forward
            forward_plan = model.plan(self.rank, action.stage, action.microbatch)
            for tensor in tensors:
                tensor.requires_grad_()
            inputs = tensors or (model.received(action.microbatch, device(self.rank)),)
            forward_plan.begin()
            forwards = forward_plan.forwards(inputs[0])
            self._plans[action.stage, action.microbatch] = forward_plan
        if backward is not None:
            action, tensors = backward
            backward_plan = self._plans.pop((action.stage, action.microbatch))
            backward_plan.begin()
            backwards = backward_plan.backwards(tensors[0] if tensors else None, gradients.append)
        run_at_once(backwards, forwards)
        for plan in (forward_plan, backward_plan):
            if plan is not None:
                plan.end()
        outputs: Tensors = ()
        if forward_plan is not None and forward is not None:
            assert forward_plan.loss.output is not None
            outputs = (forward_plan.loss.output,)
            self._keep(forward[0], outputs)
        if backward is not None:
            self._keep(backward[0], tuple(gradients))
        return outputs, inputs, forward_plan

    def _keep(self, action: Action, tensors: Tensors) -> None:
        value = self._dependencies.value_of(action)
        if value >= 0 and self._dependencies.route(value).takers:
            self._values[value] = tuple(tensor.detach() for tensor in tensors)


class LoopEnds:
    """The engine's calls per iteration; `AtOnce` makes the calls per computation."""

    def __init__(self, engine: Engine) -> None:
        self.begin, self.communicated, self.end = engine.begin, engine.communicated, engine.end

    def before(self, op: Action) -> None:
        """Do nothing: `AtOnce` makes this call."""

    def after(self, op: Action, outputs: Sequence[Any] = (), inputs: Sequence[Any] = ()) -> None:
        """Do nothing: `AtOnce` makes this call."""

    def sent(self, op: Action) -> None:
        """Do nothing: `AtOnce` makes this call."""


class PiecesRank(Rank):
    @property
    def model(self) -> InPieces:
        model = self._pipeline.model
        assert isinstance(model, InPieces)
        return model

    def calls(self) -> ComputationHooks | None:
        return None if self.engine is None else LoopEnds(self.engine)

    def executor(self, stages: TorchStages, messages: Messages) -> Executor:
        return AtOnce(self, self._pipeline.schedule, stages, messages)


class PiecesPipeline(LatePipeline):
    """A pipeline of parts; with `noted`, the engine knows the streams of exchanges."""

    def __init__(self, schedule: Schedule, kind: str, engines: bool = True, noted: bool = True, verify: bool = False):
        model = InPieces(schedule.num_stages)
        streams = model.streams if noted else lambda rank: []
        super().__init__(schedule, kind, engines, verify=verify, model=model, beside=streams, at_once=True)

    def rank_of(self, rank: int) -> Rank:
        return PiecesRank(self, rank)
