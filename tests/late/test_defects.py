"""Defects that were found by reading the code, each reproduced by a run.

Others are elsewhere: communicators that the first batch makes, with 8 stages (`test_grid.py`, `test_megatron.py`);
queues that streams share (`test_grid.py`, `test_sharded.py`); a probe that a watchdog ends (`test_processes.py`).

A device without compute units cannot show one of them. A receive that is posted early occupies some units, and a kernel
with a block for each unit needs a second wave. That wave runs on the free units after the first and does not depend on
the receive, so it costs time, but changes neither bits nor the order of waits.
"""

import gc
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bpipe.runtime import evictor, graph
from bpipe.runtime.executor import Executor
from bpipe.schedule.memory import num_transfers
from bpipe.schedule.program import Exchange
from bpipe.transport.streams import Streams
from megatron.scheduling.loop.measurements import Besides, FirstMeasured, latest_by_place
from megatron.scheduling.replanning import ProcessMemory, measure_process
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw, begin, device
from tests.late.grid import Run, deadlocks, plan_of
from tests.late.model import LateModel
from tests.late.pipeline import LatePipeline, Rank, wrong_bits


@pytest.mark.parametrize("births", [False, True])
def test_a_device_that_is_waited_for_before_the_first_message_deadlocks_at_births(births: bool) -> None:
    """A first timer synchronizes: the last of 4 ranks waits for its first HOST before the message that makes the
    communicator. Making it before the loop avoids the deadlock."""
    schedule = plan_of("1f1b", 4, 8, Exchange.MEGATRON_1F1B)
    assert schedule is not None
    run = Run(births=births, at_issue=True)
    assert deadlocks(schedule, Exchange.MEGATRON_1F1B, run) is births


def test_streams_of_each_program_are_those_of_others_after_sixteen() -> None:
    """Torch has 32 streams of each priority, so a process makes one pair, whatever it runs."""
    begin(Draw(1))
    streams = [Streams(device()) for _ in range(17)]
    assert {streams[0]._outbound, streams[0]._inbound} == {streams[16]._outbound, streams[16]._inbound}
    assert len({stream for pair in streams[:16] for stream in (pair._outbound, pair._inbound)}) == 32


class Cleared(torch.autograd.Function):
    """A function that releases what it saved when it is read, which is possible once."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Clearing(LateModel):
    def forward(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        output = super().forward(weight, stage, microbatch, *received)
        return output if output.ndim == 0 else output + Cleared.apply(output.tanh()) / 64


def clearing(kind: str) -> LatePipeline:
    schedule = plan_of("1f1b", 4, 8, Exchange.POSTED)
    assert schedule is not None
    return LatePipeline(schedule, kind, model=Clearing(schedule.num_stages))


@pytest.mark.parametrize("kind", ["two-sided", "peer"])
def test_what_is_let_go_of_where_it_is_read_is_not_read_ahead(kind: str) -> None:
    """The search for movable tensors unpacked it, and the backward failed."""
    pipeline = clearing(kind)
    assert wrong_bits(pipeline, Draw(2)) == []
    assert any(rank.moved_bytes for rank in pipeline.ranks)


def test_what_is_read_ahead_ends_the_run_where_it_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_hides", lambda kind: False)
    monkeypatch.setattr(graph, "_saved_names", {})
    with pytest.raises(RuntimeError, match="clear_saved_tensors_on_access"):
        clearing("peer").run(Draw(2))


# A micro-batch evicts more than a device's rounding.
NUMBERS, PAGE_BYTES = 1 << 20, 2 << 20


class MeasuredRank(Rank):
    """A rank that measures its device at the end of an iteration, as `Learner` does before weights are updated."""

    def iterate(self, executor: Executor) -> None:
        super().iterate(executor)
        here, engine, meter = device(self.rank), self.engine, self.meter
        assert engine is not None
        torch.accelerator.synchronize(here)
        peaks = torch.accelerator.max_memory_allocated(here), torch.accelerator.max_memory_reserved(here)
        self.measured = FirstMeasured(
            *(
                latest_by_place(meter.each_bytes, 1),
                engine.moved_bytes,
                meter.after_input_bytes,
                meter.shard_bytes,
                meter.received_bytes,
            ),
            *(meter.peak_bytes, *peaks, engine.lent_bytes),
        )
        self.besides = Besides(self._weights(), self._weights(), 0, 0)
        self.learned, self.as_it_was = map(self.learn, (self.measured, replace(self.measured, lent_bytes=0)))

    def _weights(self) -> int:
        """Return the bytes of the rank's weights, which are also those of its gradients."""
        return sum(weight.nbytes for (rank, _), weight in self._pipeline.model._on_device.items() if rank == self.rank)

    def learn(self, measured: FirstMeasured) -> ProcessMemory:
        counters = ("mem_get_info", "get_memory_info"), ("memory_reserved",) * 2, ("max_memory_allocated",) * 2
        with ExitStack() as stack:
            for of_cuda, of_any in counters:
                stack.enter_context(patch.object(torch.cuda, of_cuda, getattr(torch.accelerator, of_any)))
            return measure_process(self.rank, measured, self.besides, self.besides, device(self.rank))


class MeasuredPipeline(LatePipeline):
    def rank_of(self, rank: int) -> Rank:
        return MeasuredRank(self, rank)

    def learned(self) -> list[MeasuredRank]:
        # Garbage of earlier tests would be freed during the run, and its segments would not be counted.
        gc.collect()
        self.run(Draw(1), 1)
        return [rank for rank in self.ranks if isinstance(rank, MeasuredRank)]


def test_memory_that_is_lent_is_not_somebody_elses_too() -> None:
    """A budget is learned from what a device holds besides micro-batches. Lent memory is not torch's; it was
    counted both there and in the micro-batches' peak."""
    schedule = plan_of("1f1b", 4, 8, Exchange.POSTED)
    assert schedule is not None
    for kind in ("two-sided", "peer"):
        ranks = MeasuredPipeline(schedule, kind, measures=True, extra=lambda stage, microbatch: NUMBERS).learned()
        assert any(rank.measured.lent_bytes for rank in ranks) == (kind == "peer")
        for rank in ranks:
            outside = [memory.fixed_bytes - rank.besides.now_bytes for memory in (rank.learned, rank.as_it_was)]
            assert 0 <= outside[0] < PAGE_BYTES
            assert outside[1] == outside[0] + rank.measured.lent_bytes
            assert not rank.measured.lent_bytes or outside[1] > PAGE_BYTES


def test_a_graph_is_walked_once_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk took the host 11 microseconds per node at each eviction, ahead of the next kernels. Late devices do not
    measure the host's time, so walks are counted."""
    walks: list[object] = []
    find = evictor.find
    monkeypatch.setattr(evictor, "find", lambda *arguments: walks.append(arguments) or find(*arguments))
    pipeline = LatePipeline(SCHEDULES["1f1b"](), "two-sided")
    assert wrong_bits(pipeline, Draw(1), 3) == []
    evicting = sum(bool(num_transfers(pipeline.schedule, rank).evictions) for rank in range(4))
    # One for the sizes, and one to remember the locations.
    assert len(walks) == 2 * evicting
