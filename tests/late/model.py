"""A small model for late devices, and its expected gradients.

The expected gradients are computed on a CPU, micro-batch by micro-batch in the order of a rank's backwards. They must
be equal to the bit, because kernels and their order are the same.
"""

from collections.abc import Callable

import torch

from bpipe.runtime.stage import TorchStages
from bpipe.schedule.schedule import Schedule
from tests.gpu.pipelines import Place, summed
from tests.late.devices import device
from tests.unit.runtime.pipeline import WIDTH, inputs_of

# By stage and micro-batch: how many further numbers the forward saves.
Extra = Callable[[int, int], int]


def nothing(stage: int, microbatch: int) -> int:
    return 0


def differing(stage: int, microbatch: int) -> int:
    return (0, 40, 300, 90, 1000)[(2 * microbatch + stage) % 5]


class LateModel:
    """A model whose stages are layers; the first draws its input, and the last computes a loss of the micro-batch."""

    def __init__(self, num_stages: int, extra: Extra = nothing) -> None:
        generator = torch.Generator().manual_seed(7)
        self._num_stages, self._extra = num_stages, extra
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator) / 2 for _ in range(num_stages)]
        self._on_device: dict[Place, torch.nn.Parameter] = {}

    def forward(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        (x,) = received or (inputs_of(microbatch).to(weight.device),)
        output = self.saving_more(torch.nn.functional.gelu(x @ weight) @ weight.t(), stage, microbatch)
        return output if stage + 1 < self._num_stages else (output * (microbatch + 1)).square().mean()

    def saving_more(self, output: torch.Tensor, stage: int, microbatch: int) -> torch.Tensor:
        """Change a stage's output by a computation that saves as many numbers as `Extra` says."""
        count = self._extra(stage, microbatch)
        if not count:
            return output
        more = torch.linspace(-1, 1 + microbatch, count).to(output.device)
        # Keep it small: growing values end as NaN, which is not equal to itself.
        return output * (1 + (more * output.mean().tanh()).mean() / 64)

    def on_device(self, schedule: Schedule, rank: int) -> TorchStages:
        for stage in schedule.layout.stages_of(rank):
            self._on_device[rank, stage] = torch.nn.Parameter(self.weights[stage].to(device(rank)))

        def part_of(stage: int) -> Callable[..., torch.Tensor]:
            return lambda microbatch, *received: self.forward(
                self._on_device[rank, stage], stage, microbatch, *received
            )

        return TorchStages({stage: part_of(stage) for stage in schedule.layout.stages_of(rank)})

    def gradients_on(self, rank: int) -> dict[Place, torch.Tensor]:
        """Return the gradients on the host, which waits for the device."""
        gradients = {}
        for place, weight in self._on_device.items():
            if place[0] == rank:
                assert weight.grad is not None
                gradients[place] = weight.grad.cpu()
        return gradients

    def expected(self, schedule: Schedule, iterations: int) -> dict[Place, torch.Tensor]:
        return summed(schedule, self.parts(schedule), iterations)

    def parts(self, schedule: Schedule) -> list[list[torch.Tensor]]:
        """Return each gradient by micro-batch and stage."""
        return [self._alone(microbatch) for microbatch in range(schedule.num_microbatches)]

    def _alone(self, microbatch: int) -> list[torch.Tensor]:
        """Return one micro-batch's gradient by stage."""
        weights = [torch.nn.Parameter(weight) for weight in self.weights]
        tensors: tuple[torch.Tensor, ...] = ()
        for stage, weight in enumerate(weights):
            tensors = (self.forward(weight, stage, microbatch, *tensors),)
        torch.autograd.backward(tensors)
        return [weight.grad for weight in weights if weight.grad is not None]
