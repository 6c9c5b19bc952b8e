"""All ranks of a schedule with shards of the output layer in one thread, collectives included.

Computes the gradients of all stages' weights and of the output layer, and every token's loss; and the same without
shards, by torch's own cross entropy. All ranks must send the collectives of each kind in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from bpipe.runtime.executor import Executor
from bpipe.runtime.shards import EarlyShard, OutputShard
from bpipe.runtime.stage import Tensors, TorchStages
from bpipe.schedule.action import SHARDS, Kind
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Instruction, Message, Op
from bpipe.schedule.schedule import Schedule
from tests.unit.runtime.pipeline import ROWS, WIDTH, Mail, Post, inputs_of, take_turns

# Rows per rank.
VOCABULARY = 6


class SharedPost(Post):
    """Also keeps the parts of collectives, by value and rank, and the order in which each rank sent its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, dict[int, Tensors]] = defaultdict(dict)
        self.orders: dict[Kind, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        # By rank, if a stage needs what was gathered, too: computes the rank's part of the gradient from it.
        self.late: list[Callable[[int, Tensors], Tensors]] = []


class SharedMail(Mail):
    """One rank's messages, including collectives."""

    _post: SharedPost

    def post(self, message: Message) -> None:
        if not message.is_collective:
            super().post(message)

    def send(self, message: Message, tensors: Tensors) -> None:
        if not message.is_collective:
            super().send(message, tensors)
            return
        assert self._rank not in self._post.parts[message.value], f"{message} is sent a second time"
        self._post.parts[message.value][self._rank] = tuple(tensor.clone() for tensor in tensors)
        self._post.orders[message.made_by[0].kind][self._rank].append(message.value)

    def wait(self, message: Message) -> Tensors:
        if not message.is_collective:
            return super().wait(message)
        parts = [tensors for _, tensors in sorted(self._post.parts[message.value].items())]
        if len(message.made_by) == 1:
            return tuple(tensor.clone() for tensor in parts[0])
        together = tuple(map(torch.stack, zip(*parts, strict=True)))
        # Shards need the gathered parts, and a stage needs their sum.
        stages = [action for action in message.needed_by if action.kind not in SHARDS]
        if len(stages) == len(message.needed_by):
            return tuple(self.total(value) for value in together)
        if [action.stage for action in stages] != [self._rank]:
            return together
        late = zip(*(make(stages[0].microbatch, together) for make in self._post.late), strict=True)
        return *together, *(self.total(value) for value in late)

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(tuple(parts)).sum(0)

    def can(self, instruction: Instruction) -> bool:
        operand = instruction.operand
        if instruction.op is Op.WAIT and isinstance(operand, Message) and operand.is_collective:
            return len(self._post.parts[operand.value]) == len(operand.made_by)
        return super().can(instruction)


class Rows:
    """A shard of the output matrix, which computes logits without autograd and its gradient by a product of its own."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.weight = weight

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled(), "nobody goes back through this"
        return x @ self.weight.t()

    def backward_weight(self, x: torch.Tensor, gradient: torch.Tensor) -> None:
        torch.autograd.backward(self.weight, gradient.t() @ x)


class ShardedModel:
    """Each stage is one layer; the first generates its input, the last returns what the output layer's losses need.

    The loss of a micro-batch is its tokens' losses times `token_gradients`.
    """

    def __init__(self, num_stages: int, num_shards: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def drawn(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 2)

        self.weights = [drawn(WIDTH, WIDTH) for _ in range(num_stages)]
        self.output = drawn(num_shards * VOCABULARY, WIDTH)
        self.shards = [torch.nn.Parameter(rows) for rows in self.output.detach().clone().chunk(num_shards)]
        self.losses: dict[int, torch.Tensor] = {}
        # Whether each token's label had the largest logit.
        self.largest: dict[int, torch.Tensor] = {}

    def labels(self, microbatch: int) -> torch.Tensor:
        return torch.randint(len(self.output), (ROWS,), generator=torch.Generator().manual_seed(microbatch))

    def token_gradients(self, microbatch: int) -> torch.Tensor:
        return torch.linspace(0, 1 + microbatch, ROWS, dtype=torch.float64)

    def stage(self, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        (x,) = received or (inputs_of(microbatch).double(),)
        return torch.nn.functional.gelu(x @ self.weights[stage]) @ self.weights[stage].t()

    def parts(self, schedule: Schedule, rank: int) -> TorchStages:
        def part(stage: int) -> object:
            if stage + 1 < schedule.num_stages:
                return lambda microbatch, *received: self.stage(stage, microbatch, *received)
            return lambda microbatch, *received: (
                self.stage(stage, microbatch, *received),
                self.labels(microbatch),
                self.token_gradients(microbatch),
            )

        return TorchStages({stage: part(stage) for stage in schedule.layout.stages_of(rank)})  # type: ignore[misc]

    def shard(self, rank: int, vocabulary: Vocabulary = Vocabulary.ONE) -> OutputShard | EarlyShard:
        report = self.told if rank == 0 else None
        if vocabulary is Vocabulary.TWO:
            return EarlyShard(Rows(self.shards[rank]), rank * VOCABULARY, len(self.output), report)
        weight = self.shards[rank]
        return OutputShard(lambda x: x @ weight.t(), rank * VOCABULARY, len(self.output), report)

    def told(self, microbatch: int, losses: torch.Tensor, largest: torch.Tensor) -> None:
        self.losses[microbatch], self.largest[microbatch] = losses, largest

    def gradients(self, shards: bool) -> list[torch.Tensor]:
        """The gradients of the stages, and of the whole output layer."""
        layers = self.shards if shards else [self.output]
        return [weight.grad for weight in self.weights] + [torch.cat([layer.grad for layer in layers])]  # type: ignore[misc]


def in_one_piece(num_stages: int, num_shards: int, num_microbatches: int) -> ShardedModel:
    """The gradients and losses without a pipeline."""
    model = ShardedModel(num_stages, num_shards)
    for microbatch in range(num_microbatches):
        tensors: Tensors = ()
        for stage in range(num_stages):
            tensors = (model.stage(stage, microbatch, *tensors),)
        logits = tensors[0] @ model.output.t()
        losses = torch.nn.functional.cross_entropy(logits, model.labels(microbatch), reduction="none")
        model.losses[microbatch] = losses.detach()
        model.largest[microbatch] = logits.argmax(-1) == model.labels(microbatch)
        (losses * model.token_gradients(microbatch)).sum().backward()  # type: ignore[no-untyped-call]
    return model


def in_shards(schedule: Schedule) -> ShardedModel:
    num_ranks = schedule.num_ranks
    model, post = ShardedModel(schedule.num_stages, num_ranks), SharedPost()
    mails = [SharedMail(rank, post) for rank in range(num_ranks)]
    shards = [model.shard(rank, schedule.layout.vocabulary) for rank in range(num_ranks)]
    post.late = [shard.late for shard in shards if isinstance(shard, EarlyShard)]
    executors = [
        Executor(schedule, rank, model.parts(schedule, rank), mail, shards[rank]) for rank, mail in enumerate(mails)
    ]
    take_turns(executors, mails)
    for by_rank in post.orders.values():
        assert len({tuple(order) for order in by_rank.values()}) == 1, (
            "ranks send one sort of collectives in several orders"
        )
    return model
