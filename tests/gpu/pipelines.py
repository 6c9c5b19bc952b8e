"""Whole pipelines on one device, each rank on its own stream, with evictions to pinned host memory.

Reports for each schedule whether every gradient has the bits of the model in one piece, computed on the device, too.
Messages are copies that wait for an event. The effects of several devices and of a process group are tested with late
devices (`tests.late.pipeline`) and on a node of GPUs.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.runtime.executor import Executor
from bpipe.runtime.stage import Tensors, TorchStages
from bpipe.schedule.action import Kind
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.program import Instruction, Message, Op
from bpipe.schedule.schedule import Schedule
from bpipe.transport.streams import current, synchronize, used_here
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, drawn, repeats
from tests.gpu.one_stage import engine_of
from tests.gpu.streams import MODES, late_to_host
from tests.late.cases import SCHEDULES

# A rank and a stage: with two pipes, a stage is on two ranks.
Place = tuple[int, int]
Box = dict[int, tuple[Tensors, Any]]


@dataclass(frozen=True)
class Sizes:
    rows: int
    width: int
    iterations: int
    schedules: tuple[str, ...] = tuple(name for name in SCHEDULES if "slices" not in name)


SIZES = {
    FULL: Sizes(1024, 1024, 12),
    MODERATE: Sizes(512, 512, 8),
    SMALL: Sizes(4, 8, 4, ("v-half", "behind devices")),
}


class Mail:
    """One rank's messages."""

    def __init__(self, rank: int, box: Box) -> None:
        self._rank, self._box = rank, box

    def post(self, message: Message) -> None:
        """Do nothing: memory is allocated when the message arrives."""

    def send(self, message: Message, tensors: Tensors) -> None:
        self._box[message.value] = tensors, torch.accelerator.current_stream().record_event()

    def wait(self, message: Message) -> Tensors:
        if message.parties[0] == self._rank:
            return ()
        tensors, event = self._box.pop(message.value)
        torch.accelerator.current_stream().wait_event(event)
        used_here(*tensors)
        return tuple(tensor.clone() for tensor in tensors)

    def can(self, instruction: Instruction) -> bool:
        """Whether this instruction can run without waiting for another rank."""
        message = instruction.operand
        return (
            instruction.op is not Op.WAIT
            or not isinstance(message, Message)
            or message.parties[0] == self._rank
            or message.value in self._box
        )


class Model:
    """A model whose stages are layers; the first draws its input, and the last computes a loss of the micro-batch."""

    def __init__(self, num_stages: int, sizes: Sizes, on: Accelerator) -> None:
        shape = sizes.width, sizes.width
        self.weights = [drawn(shape, stage, on.device) / sizes.width**0.5 for stage in range(num_stages)]
        self._shape, self._on = (sizes.rows, sizes.width), on

    def forward(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        (x,) = received or (drawn(self._shape, 1000 + microbatch, self._on.device),)
        hidden = torch.nn.functional.gelu(x @ weight)
        self._on.before_forward()
        output = hidden @ weight.t()
        return output if stage + 1 < len(self.weights) else (output * (microbatch + 1)).square().mean()

    def alone(self, microbatch: int) -> list[torch.Tensor]:
        """Return the gradient of one micro-batch by stage."""
        weights = [torch.nn.Parameter(weight) for weight in self.weights]
        tensors: Tensors = ()
        for stage, weight in enumerate(weights):
            tensors = (self.forward(weight, stage, microbatch, *tensors),)
        torch.autograd.backward(tensors)
        return [weight.grad for weight in weights if weight.grad is not None]


def summed(schedule: Schedule, parts: Sequence[Sequence[torch.Tensor]], iterations: int) -> dict[Place, torch.Tensor]:
    """Return, by rank and stage, the sum of gradients in the order of that rank's backwards.

    Args:
        parts: Gradients by micro-batch and stage.
    """
    sums: dict[Place, torch.Tensor] = {}
    for rank, slots in [*enumerate(schedule.ranks)] * iterations:
        for action in (action for slot in slots for action in slot.computations):
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                place, part = (rank, action.stage), parts[action.microbatch][action.stage]
                sums[place] = sums[place] + part if place in sums else part
    return sums


class Rank:
    """One rank of the pipeline: its stream, its engine and its weights."""

    def __init__(self, schedule: Schedule, rank: int, model: Model, box: Box, on: Accelerator) -> None:
        self.stream, self.mail = torch.Stream(on.device), Mail(rank, box)
        stages = schedule.layout.stages_of(rank)
        with current(self.stream):
            self.weights = {(rank, stage): torch.nn.Parameter(model.weights[stage].clone()) for stage in stages}
            links = [link for link in links_of(schedule) if rank in link]
            transports = {sum(link) - rank: late_to_host(on) for link in links}
            self.engine = engine_of(schedule, rank, on.device, transports, poison=True)

        def part_of(stage: int) -> Any:
            return lambda *arguments: model.forward(self.weights[rank, stage], stage, *arguments)

        self._executor = Executor(schedule, rank, TorchStages({stage: part_of(stage) for stage in stages}), self.mail)

    def walk(self) -> Iterator[Instruction]:
        """Run one iteration, pausing before each instruction."""
        walk = self._executor.walk(self.engine)
        while True:
            with current(self.stream):
                instruction = next(walk, None)
            if instruction is None:
                return
            yield instruction


def take_turns(ranks: Sequence[Rank]) -> None:
    """Run one iteration of all ranks."""
    walks = [rank.walk() for rank in ranks]
    next_instructions = {rank: next(walk, None) for rank, walk in zip(ranks, walks, strict=True)}
    while any(next_instructions.values()):
        ready = [
            number
            for number, rank in enumerate(ranks)
            if (instruction := next_instructions[rank]) and rank.mail.can(instruction)
        ]
        assert ready, f"all wait: {', '.join(map(str, next_instructions.values()))}"
        for number in ready:
            next_instructions[ranks[number]] = next(walks[number], None)


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    result, begin = Result(), time.monotonic()
    for place, name in enumerate(sizes.schedules):
        schedule, box = SCHEDULES[name](), Box()
        on.come_late(False, False, 0)
        model = Model(schedule.num_stages, sizes, on)
        parts = [model.alone(microbatch) for microbatch in range(schedule.num_microbatches)]
        synchronize(on.device)
        ranks = [Rank(schedule, rank, model, box, on) for rank in range(schedule.num_ranks)]
        count = 0
        for number in repeats(
            sizes.iterations, begin + (until - begin) * (place + 1) / len(sizes.schedules), len(MODES)
        ):
            count += 1
            on.come_late(*MODES[number % len(MODES)], number)
            take_turns(ranks)
            synchronize(on.device)
        expected = summed(schedule, parts, count)
        gradients = {weight_place: weight.grad for rank in ranks for weight_place, weight in rank.weights.items()}
        wrong = [
            weight_place
            for weight_place, gradient in gradients.items()
            if gradient is None or not torch.equal(gradient, expected[weight_place])
        ]
        moved = sum(sum(rank.engine.moved_bytes.values()) for rank in ranks)
        text = f"{len(wrong)} of {len(gradients)} gradients differ after {count} iterations"
        result.check(name, not wrong and moved > 0, f"{text}, {moved} B move per micro-batch")
        for rank in ranks:
            rank.engine.release()
    return result
