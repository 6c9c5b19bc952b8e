"""Pipelines whose vocabulary is sharded over all ranks, on late devices: collectives during messages and transfers.

The expected gradients are those of the same plan on CPU tensors in one thread, with sums in the order of late groups.
The collectives, the shards of both algorithms, and the lane parallel to the computation are real.
"""

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
import torch.distributed as dist

from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.executor import Executor
from bpipe.runtime.shards import EarlyShard, InputShard, OutputShard, embedded
from bpipe.runtime.stage import Messages, Part, Shards, TorchStages
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.schedule import Schedule
from bpipe.transport.collectives import INPUT_SORTS, SORTS, Collectives, SecondStep, SharedGroups
from bpipe.transport.distributed import new_group
from bpipe.transport.edges import Edges
from bpipe.transport.streams import beside
from tests.late.devices import TYPE, device
from tests.late.model import Extra, LateModel, Place, nothing
from tests.late.model import differing as differing_sizes
from tests.late.pipeline import TIMEOUT_S, LatePipeline, Rank, controls
from tests.unit.runtime.pipeline import ROWS, WIDTH, inputs_of, take_turns
from tests.unit.runtime.sharded import VOCABULARY, Rows, SharedMail, SharedPost

# Numbers of the vocabulary's weights in a rank's gradients, in place of a stage.
OUTPUT, INPUT = -1, -2


def sharded(p: int, m: int, vocabulary: Vocabulary, input_shards: bool = False) -> Schedule:
    config = ScheduleConfig("1f1b", p, m, vocabulary=vocabulary, input_shards=input_shards)
    return balance(build(config))


SHARDED: dict[str, Callable[[], Schedule]] = {
    # With fewer micro-batches only one is evicted, whose size cannot differ.
    "vocabulary 1": lambda: sharded(4, 10, Vocabulary.ONE),
    "vocabulary 2": lambda: sharded(4, 8, Vocabulary.TWO),
    "vocabulary 1, embedding": lambda: sharded(4, 10, Vocabulary.ONE, input_shards=True),
    "vocabulary 2, embedding": lambda: sharded(4, 8, Vocabulary.TWO, input_shards=True),
}


class Table:
    """A rank's rows of the embedding."""

    def __init__(self, weight: torch.nn.Parameter, first_row: int) -> None:
        self._weight, self._first_row = weight, first_row

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        return embedded(self._weight.detach(), tokens, self._first_row)

    def add_gradient(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        rows = tokens - self._first_row
        is_own = (rows >= 0) & (rows < len(self._weight))
        gradients = torch.zeros_like(self._weight).index_add_(
            0, rows.where(is_own, 0), gradient.where(is_own[:, None], 0)
        )
        torch.autograd.backward(self._weight, gradients)


class ShardedModel(LateModel):
    """A model whose stages are layers; the last makes the output layer's inputs, the first may take embedded tokens."""

    def __init__(self, schedule: Schedule, extra: Extra) -> None:
        super().__init__(schedule.num_stages, extra)
        self._schedule = schedule
        generator = torch.Generator().manual_seed(8)
        self._rows = {
            number: torch.randn(schedule.num_ranks * VOCABULARY, WIDTH, generator=generator) / 2
            for number in (OUTPUT, INPUT)
        }

    def on_device(self, schedule: Schedule, rank: int) -> TorchStages:
        return self.on(device(rank), rank, self._on_device)

    def on(self, where: torch.device, rank: int, weights: dict[Place, torch.nn.Parameter]) -> TorchStages:
        """Return a rank's stages, and store its weights in `weights`."""
        layout = self._schedule.layout
        for stage in layout.stages_of(rank):
            weights[rank, stage] = torch.nn.Parameter(self.weights[stage].to(where))
        for number in (OUTPUT, INPUT) if layout.input_shards else (OUTPUT,):
            rows = self._rows[number].chunk(self._schedule.num_ranks)[rank]
            weights[rank, number] = torch.nn.Parameter(rows.to(where, copy=True))

        def part_of(stage: int) -> Part:
            return lambda microbatch, *received: self._part(weights[rank, stage], stage, microbatch, *received)

        return TorchStages({stage: part_of(stage) for stage in layout.stages_of(rank)})

    def _part(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> object:
        (x,) = received or (inputs_of(microbatch).to(weight.device),)
        output = self.saving_more(torch.nn.functional.gelu(x @ weight) @ weight.t(), stage, microbatch)
        if stage + 1 < self._num_stages:
            return output
        drawn = torch.Generator().manual_seed(microbatch)
        labels = torch.randint(len(self._rows[OUTPUT]), (ROWS,), generator=drawn)
        return output, labels.to(weight.device), torch.linspace(0, 1 + microbatch, ROWS).to(weight.device)

    def shards(
        self, rank: int, weights: dict[Place, torch.nn.Parameter]
    ) -> tuple[OutputShard | EarlyShard, Shards | None]:
        """Return a rank's rows of the output layer, and of the embedding if it is sharded."""
        layout, weight, first = self._schedule.layout, weights[rank, OUTPUT], rank * VOCABULARY
        output: OutputShard | EarlyShard
        if layout.vocabulary is Vocabulary.TWO:
            output = EarlyShard(Rows(weight), first, len(self._rows[OUTPUT]))
        else:
            output = OutputShard(lambda x: x @ weight.t(), first, len(self._rows[OUTPUT]))
        if not layout.input_shards:
            return output, None
        inputs = InputShard(Table(weights[rank, INPUT], first))
        inputs.begin(
            [self._tokens(microbatch).to(weight.device) for microbatch in range(self._schedule.num_microbatches)]
        )
        return output, inputs

    def _tokens(self, microbatch: int) -> torch.Tensor:
        return torch.randint(len(self._rows[INPUT]), (ROWS,), generator=torch.Generator().manual_seed(100 + microbatch))

    def expected(self, schedule: Schedule, iterations: int) -> dict[Place, torch.Tensor]:
        """Run the same plan on CPU tensors, and return the gradients."""
        weights: dict[Place, torch.nn.Parameter] = {}
        ranks = range(schedule.num_ranks)
        stages = [self.on(torch.device("cpu"), rank, weights) for rank in ranks]
        shards = [self.shards(rank, weights) for rank in ranks]
        for _ in range(iterations):
            post = SharedPost()
            post.late = [shard.late for shard, _ in shards if isinstance(shard, EarlyShard)]
            mails = [MailInOrder(rank, post) for rank in ranks]
            executors = [Executor(schedule, rank, stages[rank], mail, *shards[rank]) for rank, mail in enumerate(mails)]
            take_turns(executors, mails)
        return {place: weight.grad for place, weight in weights.items() if weight.grad is not None}


class MailInOrder(SharedMail):
    """A mail whose sums are taken from the last rank down, as in late groups (csrc/exchange.cpp)."""

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(reversed(parts[:-1]), parts[-1])


class ShardRank(Rank):
    def messages(self, here: torch.device) -> Messages:
        edges, pipeline = super().messages(here), self._pipeline
        assert isinstance(edges, Edges)
        assert isinstance(pipeline, ShardedPipeline)
        self.shards = pipeline.model.shards(self.rank, pipeline.model._on_device)
        output, layout, all_ranks = self.shards[0], pipeline.schedule.layout, tuple(range(pipeline.schedule.num_ranks))
        sorts = (*SORTS, *INPUT_SORTS) if layout.input_shards else SORTS
        groups = {kind: new_group(all_ranks, TYPE, TIMEOUT_S, f"SHARDS_{kind.value}") for kind in sorts}
        for group in groups.values():
            dist.all_reduce(torch.zeros(1, device=here), group=group)
        hosts = {
            sum(pair) - self.rank: ends[self.rank]
            for pair, ends in pipeline.shard_controls.items()
            if self.rank in ends
        }
        shared = SharedGroups(all_ranks, groups, hosts)  # type: ignore[arg-type]
        second = SecondStep(output.late, beside(here, TIMEOUT_S)) if isinstance(output, EarlyShard) else None
        return Collectives(self.rank, shared, layout.rank_of_action, here, second, edges=edges)

    def executor(self, stages: TorchStages, messages: Messages) -> Executor:
        return Executor(self._pipeline.schedule, self.rank, stages, messages, *self.shards)


class ShardedPipeline(LatePipeline):
    model: ShardedModel

    def __init__(self, schedule: Schedule, kind: str, differing: bool = False) -> None:
        extra = differing_sizes if differing else nothing
        super().__init__(schedule, kind, model=ShardedModel(schedule, extra), differing=differing)
        self.shard_controls = {pair: controls(*pair) for pair in combinations(range(schedule.num_ranks), 2)}

    def rank_of(self, rank: int) -> Rank:
        return ShardRank(self, rank)
