"""A small model for late devices whose micro-batches are cut into slices: each attends to the keys of those before it.

In: a schedule of slices. Out: as `tests.late.model`. What keeps keys and values, and collects their gradients, is the
trainer's own code. `differing`: scores are saved, so a later slice saves more; else attention computes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule
from bpipe.runtime.stage import Part, Tensors, TorchStages
from megatron.scheduling.slices.cutting import Cutting
from megatron.scheduling.slices.kept import KeptKeys
from tests.late.devices import device
from tests.late.model import LateModel, Place
from tests.unit.runtime.pipeline import ROWS, WIDTH, inputs_of


def _scores(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (query @ keys.t() / WIDTH**0.5).masked_fill(mask, -1e9).softmax(dim=-1)


class _Attend(torch.autograd.Function):
    """Attention that saves what it was given, and no scores."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(query, keys, values)
        ctx.mask = mask
        return _scores(query, keys, mask) @ values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        saved = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            query, keys, values = saved
            made = _scores(query, keys, ctx.mask) @ values
        return (*torch.autograd.grad(made, saved, gradients), None)


class SlicedStages(TorchStages):
    """The stages of a rank; says which slice is computed, and frees keys behind the first one's backward."""

    def __init__(self, parts: Mapping[int, Part], keys: KeptKeys) -> None:
        super().__init__(parts)
        self._keys = keys

    def forward(self, action: Action, received: Tensors) -> Tensors:
        with self._keys.cutting.at(action.microbatch, action.stage):
            return super().forward(action, received)

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._keys.cutting.at(action.microbatch, action.stage) as now:
            made = super().backward(action, gradients)
        if now.number == 0:
            self._keys.free(now.stage, now.microbatch)
        return made


class SlicedModel(LateModel):
    """A stage is a layer of attention. `keys` of a rank are there once it has stages."""

    def __init__(self, schedule: Schedule, differing: bool) -> None:
        super().__init__(schedule.num_stages)
        self._slices, self._differing = schedule.layout.slices, differing
        self.keys: dict[int, KeptKeys] = {}

    def on_device(self, schedule: Schedule, rank: int) -> TorchStages:
        weights = {}
        for stage in schedule.layout.stages_of(rank):
            weights[stage] = torch.nn.Parameter(self.weights[stage].to(device(rank)))
            self._on_device[rank, stage] = weights[stage]
        self.keys[rank] = self._new_keys()
        return self._stages(weights, self.keys[rank])

    def expected(self, schedule: Schedule, iterations: int) -> dict[Place, torch.Tensor]:
        found = super().expected(schedule, iterations)
        assert all(keys.nbytes == 0 for keys in self.keys.values()), "keys are kept of a micro-batch that is over"
        return found

    def parts(self, schedule: Schedule) -> list[list[torch.Tensor]]:
        """By number of a slice and stage, what it adds: on the CPU, micro-batch by micro-batch."""
        weights = [torch.nn.Parameter(weight) for weight in self.weights]
        stages = self._stages(dict(enumerate(weights)), self._new_keys())
        found: list[list[torch.Tensor]] = [[] for _ in range(schedule.num_microbatches)]
        for first in range(0, schedule.num_microbatches, self._slices):
            numbers = range(first, first + self._slices)
            for number in numbers:
                made: Tensors = ()
                for stage in range(len(weights)):
                    received = tuple(tensor.detach() for tensor in made)
                    made = stages.forward(Action(stage, Kind.FORWARD, number), received)
            for number in reversed(numbers):
                gradients: Tensors = ()
                for stage in reversed(range(len(weights))):
                    gradients = stages.backward(Action(stage, Kind.BACKWARD, number), gradients)
                    gradient, weights[stage].grad = weights[stage].grad, None
                    assert gradient is not None
                    found[number].insert(0, gradient)
        return found

    def _new_keys(self) -> KeptKeys:
        return KeptKeys(Cutting([ROWS * number for number in range(self._slices + 1)]))

    def _stages(self, weights: Mapping[int, torch.nn.Parameter], keys: KeptKeys) -> TorchStages:
        layers = {stage: torch.nn.Identity() for stage in weights}

        def part_of(stage: int) -> Part:
            return lambda number, *received: self._attend(weights[stage], layers[stage], keys, number, *received)

        return SlicedStages({stage: part_of(stage) for stage in weights}, keys)

    def _attend(
        self,
        weight: torch.Tensor,
        layer: torch.nn.Module,
        keys: KeptKeys,
        number: int,
        *received: torch.Tensor,
    ) -> torch.Tensor:
        now = keys.cutting.now
        assert now is not None
        (x,) = received or (inputs_of(number).to(weight.device),)
        joined, values = keys.join(layer, torch.nn.functional.gelu(x @ weight), x @ weight.t())
        mask = keys.mask(weight.device)[0, 0]
        query = x @ weight
        made = _scores(query, joined, mask) @ values if self._differing else _Attend.apply(query, joined, values, mask)
        made = x + made
        return made if now.stage + 1 < self._num_stages else (made * (number + 1)).square().mean()
