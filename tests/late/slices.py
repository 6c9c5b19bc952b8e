"""A small model for late devices whose micro-batches are cut into slices; each attends to the keys of earlier ones.

Kept keys and values and their gradients are handled by the trainer's own code. `differing`: scores are saved, so later
slices save more; otherwise attention is recomputed.
"""

from collections.abc import Mapping

import torch

from bpipe.runtime.stage import Part, Tensors, TorchStages
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.slices.attention import KeptKeys
from tests.late.devices import device
from tests.late.model import LateModel, Place
from tests.unit.runtime.pipeline import ROWS, inputs_of
from tests.unit.runtime.slices import Attend, SlicedStages, new_keys, probabilities


class SlicedModel(LateModel):
    """A model whose stages are layers of attention. `keys` has a rank's keys once it has stages."""

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
        gradients = super().expected(schedule, iterations)
        assert all(keys.nbytes == 0 for keys in self.keys.values()), "keys of a finished micro-batch are still kept"
        return gradients

    def parts(self, schedule: Schedule) -> list[list[torch.Tensor]]:
        """Return what each slice adds to each stage's gradient, computed on the CPU micro-batch by micro-batch."""
        weights = [torch.nn.Parameter(weight) for weight in self.weights]
        stages = self._stages(dict(enumerate(weights)), self._new_keys())
        parts: list[list[torch.Tensor]] = [[] for _ in range(schedule.num_microbatches)]
        for first in range(0, schedule.num_microbatches, self._slices):
            numbers = range(first, first + self._slices)
            for number in numbers:
                tensors: Tensors = ()
                for stage in range(len(weights)):
                    received = tuple(tensor.detach() for tensor in tensors)
                    tensors = stages.forward(Action(stage, Kind.FORWARD, number), received)
            for number in reversed(numbers):
                gradients: Tensors = ()
                for stage in reversed(range(len(weights))):
                    gradients = stages.backward(Action(stage, Kind.BACKWARD, number), gradients)
                    gradient, weights[stage].grad = weights[stage].grad, None
                    assert gradient is not None
                    parts[number].insert(0, gradient)
        return parts

    def _new_keys(self) -> KeptKeys:
        return new_keys(ROWS, self._slices)

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
        if self._differing:
            output = x + probabilities(query, joined, mask) @ values
        else:
            output = x + Attend.apply(query, joined, values, mask)
        return output if now.stage + 1 < self._num_stages else (output * (number + 1)).square().mean()
