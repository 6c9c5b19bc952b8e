"""Defects that a reading of the code found, as they were, each found by a run.

Elsewhere are: communicators that the first batch makes, with 8 stages (`test_grid.py`, `test_megatron.py`); queues that
streams share (`test_grid.py`, `test_sharded.py`); the watchdog that ends a probe (`test_processes.py`). A late device
cannot see host time, blocks of NCCL's kernels that compute units wait for, or what a formula made of the allocator's
counters (`test_learning.py` has its numbers).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bpipe.ir.program import Exchange
from bpipe.runtime.streams import Streams
from tests.late.devices import Draw, begin, device
from tests.late.model import LateModel
from tests.late.pipeline import LatePipeline
from tests.late.test_grid import Run, plan_of, stands_still
from tests.late.test_pipelines import wrong_bits


@pytest.mark.parametrize("births", [False, True])
def test_a_device_that_is_waited_for_before_the_first_message_stands_still_at_births(births: bool) -> None:
    """With 4 stages, as a first timer synchronizes it: the last rank waits for its first HOST before the message that
    makes the communicator. Made before the loop, it lets the rank go on."""
    schedule = plan_of("1f1b", 4, 8, Exchange.MEGATRON_1F1B)
    assert schedule is not None
    run = Run(births=births, at_issue=True)
    assert stands_still(schedule, Exchange.MEGATRON_1F1B, run) is births


def test_streams_of_each_program_are_those_of_others_after_sixteen() -> None:
    """Torch has 32 of a priority, so a process makes one pair of them, whatever it runs."""
    begin(Draw(1))
    made = [Streams(device()) for _ in range(17)]
    assert {made[0]._outbound, made[0]._inbound} == {made[16]._outbound, made[16]._inbound}
    assert len({stream for one in made[:16] for stream in (one._outbound, one._inbound)}) == 32


class Cleared(torch.autograd.Function):
    """Lets go of what it saved where that is read, which is once."""

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
        made = super().forward(weight, stage, microbatch, *received)
        return made if made.ndim == 0 else made + Cleared.apply(made.tanh()) / 64


@pytest.mark.parametrize("kind", ["two-sided", "peer"])
def test_what_is_let_go_of_where_it_is_read_is_not_read_ahead(kind: str) -> None:
    """Looking for what leaves unpacked it, and the backward ended the run."""
    schedule = plan_of("1f1b", 4, 8, Exchange.POSTED)
    assert schedule is not None
    pipeline = LatePipeline(schedule, kind, model=Clearing(schedule.num_stages))
    assert wrong_bits(pipeline, Draw(2)) == []
    assert any(rank.moved_bytes for rank in pipeline.ranks)
