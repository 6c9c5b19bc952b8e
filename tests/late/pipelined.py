"""torch.distributed.pipelining on late devices: torch's own runtime runs its action lists, with our engine around it.

Torch's schedules, stages and messages, `BalancedSchedule`, engine, streams and transports are real. Only the connection
of a pair is replaced: threads cannot open each other's memory as processes do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, cycle
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.pipelining import PipelineStage

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.schedule import Schedule
from bpipe.torch import BalancedSchedule
from bpipe.torch import schedule as torch_schedule
from bpipe.torch.orders import config_of
from bpipe.transport.config import TransferConfig
from bpipe.transport.connect import MeasuredLink
from bpipe.transport.one_sided import Transport
from tests.late.devices import Draw, device, extension
from tests.late.group import join
from tests.late.model import LateModel, Place, nothing
from tests.late.model import differing as differing_sizes
from tests.late.pipeline import KINDS, TIMEOUT_S, LatePipeline, Rank
from tests.unit.runtime.pipeline import ROWS, inputs_of
from tests.unit.torch.test_orders import stages_on

# The name of each transport in a link.
CARRIED_BY = {"two-sided": "nccl", "peer": "peer", "host": "host"}


class StageModule(torch.nn.Module):
    """One stage of `LateModel`. The schedule computes the loss."""

    def __init__(self, model: LateModel, stage: int, weight: torch.nn.Parameter, order: Sequence[int]) -> None:
        """`order`: the order of micro-batches in this stage's forwards, which torch does not pass."""
        super().__init__()
        self.weight = weight
        # Torch runs one forward before the first step, to see the output's shape.
        self._model, self._stage, self._numbers = model, stage, chain(order[:1], cycle(order))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extension().perhaps_yield()
        output = torch.nn.functional.gelu(x @ self.weight) @ self.weight.t()
        return self._model.saving_more(output, self._stage, next(self._numbers))


def loss_of(output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's loss; `number` has its number, counted from 1, for each row."""
    return (output * number).square().mean()


class ReadyConnection:
    """A connection whose transport already exists."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def transport(self, differing: bool) -> Transport:
        return self._transport


class TorchRank(Rank):
    """One rank whose program is run by torch's runtime."""

    def run(self, iterations: int) -> None:
        pipeline, schedule, here = self._pipeline, self._pipeline.schedule, device(self.rank)
        assert isinstance(pipeline, TorchPipeline)
        join(self.rank, schedule.num_ranks)
        pipeline.model.on_device(schedule, self.rank)
        self.connections = {place: ReadyConnection(transport) for place, transport in self._transports().items()}
        stages = [self._stage(stage, here) for stage in schedule.layout.stages_of(self.rank)]
        balanced = BalancedSchedule(
            stages,
            schedule.num_microbatches,
            loss_of,
            schedule=schedule,
            scale_grads=False,
            transfers=TransferConfig(
                minimum_bytes=1, timeout_s=TIMEOUT_S, poison=pipeline.poison, differing=pipeline.differing
            ),
        )
        self.engine = balanced.engine
        for _ in range(iterations):
            self._step(balanced, stages, here)
        if pipeline.replays:
            self.captures(lambda: self._step(balanced, stages, here), pipeline.replays)
        self.gradients = pipeline.model.gradients_on(self.rank)
        torch.accelerator.synchronize(here)
        self.moved_bytes = self.engine.moved_bytes
        self.engine.release()

    def _stage(self, stage: int, here: torch.device) -> PipelineStage:
        model, schedule = self._pipeline.model, self._pipeline.schedule
        row = (cell.compute for cell in schedule.ranks[self.rank])
        order = [
            action.microbatch
            for action in row
            if action is not None and (action.stage, action.kind) == (stage, Kind.FORWARD)
        ]
        module = StageModule(model, stage, model._on_device[self.rank, stage], order)
        return PipelineStage(module, stage, schedule.num_stages, here)

    def _step(self, balanced: BalancedSchedule, stages: list[PipelineStage], here: torch.device) -> None:
        numbers = range(self._pipeline.schedule.num_microbatches)
        inputs = torch.cat([inputs_of(microbatch) for microbatch in numbers]).to(here)
        of_row = torch.tensor([float(microbatch + 1) for microbatch in numbers]).repeat_interleave(ROWS)
        is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
        balanced.step(
            *([inputs] if is_first else []),
            target=of_row[:, None].to(here) if is_last else None,
            losses=[] if is_last else None,
        )


class TorchPipeline(LatePipeline):
    """All ranks. `differing`: micro-batches save different sizes. `judged`: a schedule that may deadlock is refused."""

    def __init__(
        self,
        schedule: Schedule,
        kind: str,
        poison: bool = False,
        differing: bool = False,
        judged: bool = True,
        replays: int = 0,
    ) -> None:
        model = LateModel(schedule.num_stages, differing_sizes if differing else nothing)
        super().__init__(schedule, kind, poison=poison, differing=differing, model=model, replays=replays)
        self._judged = judged

    def rank_of(self, rank: int) -> Rank:
        return TorchRank(self, rank)

    def measured_links(self) -> list[MeasuredLink]:
        return [MeasuredLink(link, "host" if link[0] == link[1] else CARRIED_BY[self.kind], {}) for link in self.links]

    def run(self, draw: Draw, iterations: int = 2) -> dict[Place, torch.Tensor]:
        with self._connected():
            return super().run(draw, iterations)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        def connected(group: Any, schedule: Schedule, transfers: TransferConfig, here: torch.device) -> Any:
            rank = self.ranks[here.index]
            assert isinstance(rank, TorchRank)
            return rank.connections, self.measured_links(), "", []

        with ExitStack() as stack:
            stack.enter_context(patch.object(torch_schedule, "connected", connected))
            if not self._judged:
                sizes = self.schedule.num_ranks, self.schedule.num_microbatches
                config = ScheduleConfig(self.schedule.name, *sizes, written="not checked")
                stack.enter_context(patch.object(torch_schedule, "config_of", lambda *_: config))
                stack.enter_context(patch.object(torch_schedule, "build", lambda config: self.schedule))
                stack.enter_context(patch.object(torch_schedule, "refuse_standstill", lambda *_: None))
            yield


def listed(name: str, chunks: int = 1, v_shaped: bool = False, p: int = 4, **how: Any) -> Callable[[], Schedule]:
    """Return a factory of torch's schedule of this name, or a family's, balanced over `p` ranks."""
    return lambda: build(config_of(name, stages_on(0, chunks, v_shaped, p), 2 * p, BalanceConfig(**how), None))


# If all ranks hold the same, evicted activations go to the node's own memory.
AWAY = {"hosts": "host"}
LISTED: dict[str, Callable[[], Schedule]] = {
    "torch's 1F1B": listed("1F1B"),
    # A host buffer is refilled before the backward of its previous content.
    "torch's 1F1B of 8": listed("1F1B", p=8),
    "torch's GPipe": listed("GPipe", **AWAY),
    "torch's Interleaved1F1B": listed("Interleaved1F1B", 2),
    "torch's LoopedBFS": listed("LoopedBFS", 2, **AWAY),
    "torch's InterleavedZeroBubble": listed("InterleavedZeroBubble", 2, **AWAY),
    "torch's ZBVZeroBubble": listed("ZBVZeroBubble", 2, True, **AWAY),
    "torch's DualPipeV": listed("DualPipeV", 2, True, **AWAY),
    "grouped under torch": listed("grouped-interleaved", 2),
    "split under torch": listed("1f1b-split"),
    "v-half under torch": listed("v-half", 2, True, **AWAY),
    "pool under torch": listed("interleaved-1f1b", 2, hosts="pool"),
    "behind devices under torch": listed("interleaved-1f1b", 2, hosts="all", bounds=(6,)),
}


def kinds_of(name: str) -> tuple[str, ...]:
    """Return the transports to test; a rank's own memory has only one."""
    own = all(low == high for low, high in links_of(LISTED[name]()))
    return ("host",) if own else KINDS
