"""All ranks of a schedule in one thread: every rank that need not wait runs its next instruction.

Computes the gradients of all stages' weights, and those of the same model in one piece. Messages are copied, and must
be posted in the order in which they are sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from bpipe.runtime.executor import Executor
from bpipe.runtime.stage import Tensors, TorchStages
from bpipe.schedule.program import Instruction, Message, Op
from bpipe.schedule.schedule import Schedule

ROWS, WIDTH = 4, 8
Edge = tuple[int, int]


class Post:
    """The messages in flight between all ranks, in order, for every directed edge."""

    def __init__(self) -> None:
        self.sent: dict[Edge, deque[tuple[Message, Tensors]]] = defaultdict(deque)
        self.posted: dict[Edge, deque[Message]] = defaultdict(deque)


class Mail:
    """One rank's messages."""

    def __init__(self, rank: int, post: Post) -> None:
        self._rank, self._post = rank, post

    def post(self, message: Message) -> None:
        self._post.posted[message.parties].append(message)

    def send(self, message: Message, tensors: Tensors) -> None:
        assert message.parties[0] == self._rank
        assert all(not tensor.requires_grad for tensor in tensors)
        self._post.sent[message.parties].append((message, tuple(tensor.clone() for tensor in tensors)))

    def wait(self, message: Message) -> Tensors:
        if message.parties[0] == self._rank:
            return ()
        sent, tensors = self._post.sent[message.parties].popleft()
        assert sent == self._post.posted[message.parties].popleft() == message
        return tensors

    def can(self, instruction: Instruction) -> bool:
        """Whether the instruction can run without waiting for another rank."""
        operand = instruction.operand
        return (
            instruction.op is not Op.WAIT or operand.parties[0] == self._rank or bool(self._post.sent[operand.parties])
        )  # type: ignore[union-attr]


def inputs_of(microbatch: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(microbatch))


class Model:
    """Each stage is one layer; the first generates its input, the last computes the micro-batch's loss."""

    def __init__(self, num_stages: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.weights = [
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2) for _ in range(num_stages)
        ]

    def part(self, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        (x,) = received or (inputs_of(microbatch),)
        output = torch.nn.functional.gelu(x @ self.weights[stage]) @ self.weights[stage].t()
        return output if stage + 1 < len(self.weights) else (output * (microbatch + 1)).square().mean()

    def parts(self, schedule: Schedule, rank: int) -> TorchStages:
        def part_of(stage: int) -> object:
            return lambda microbatch, *received: self.part(stage, microbatch, *received)

        return TorchStages({stage: part_of(stage) for stage in schedule.layout.stages_of(rank)})  # type: ignore[misc]

    def gradients(self) -> list[torch.Tensor]:
        gradients = []
        for weight in self.weights:
            assert weight.grad is not None
            gradients.append(weight.grad)
            weight.grad = None
        return gradients


def in_one_piece(
    num_stages: int, num_microbatches: int, iterations: int = 1, model: Model | None = None
) -> list[torch.Tensor]:
    """The gradients without a pipeline."""
    model = model or Model(num_stages)
    for microbatch in [*range(num_microbatches)] * iterations:
        tensors: Tensors = ()
        for stage in range(num_stages):
            tensors = (model.part(stage, microbatch, *tensors),)
        torch.autograd.backward(tensors)
    return model.gradients()


def take_turns(executors: Sequence[Executor], mails: Sequence[Mail]) -> None:
    """Run one iteration of all ranks."""
    walks = [executor.walk() for executor in executors]
    ahead = {rank: next(walk, None) for rank, walk in enumerate(walks)}
    while any(ahead.values()):
        going = [rank for rank, instruction in ahead.items() if instruction and mails[rank].can(instruction)]
        assert going, f"all wait: {', '.join(map(str, ahead.values()))}"
        for rank in going:
            ahead[rank] = next(walks[rank], None)


def in_a_pipeline(schedule: Schedule, iterations: int = 1) -> list[torch.Tensor]:
    model, post = Model(schedule.num_stages), Post()
    mails = [Mail(rank, post) for rank in range(schedule.num_ranks)]
    executors = [Executor(schedule, rank, model.parts(schedule, rank), mail) for rank, mail in enumerate(mails)]
    for _ in range(iterations):
        take_turns(executors, mails)
        assert not any(post.sent.values())
        assert not any(post.posted.values())
    return model.gradients()
