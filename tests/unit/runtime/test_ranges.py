"""Ranges of a rank's iteration, as torch's profiler records them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.ranges import name_of
from bpipe.schedule.action import Action, Kind
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import new_weight, run_iteration, schedule
from tests.unit.runtime.test_engine import CPU


def test_a_range_ends_with_the_error_of_its_computation() -> None:
    """Everything behind it would stand within it."""
    plan = schedule(balance="none")
    engine = Engine(plan, 0, None, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))

    def failing(weight: torch.nn.Parameter, received: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such token")

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ValueError, match="no such token"):
            run_iteration(engine, plan, new_weight(), forward=failing)
        engine.abandon()
        torch.ones(2).sum()
    events = profiler.events() or []
    (forward,) = (event for event in events if event.name.startswith("bpipe "))
    after = max(event.time_range.start for event in events if event.name == "aten::sum")
    assert forward.time_range.end < after


def test_a_slice_is_named_by_its_micro_batch() -> None:
    assert name_of(Action(1, Kind.BACKWARD_INPUT, 7), 4) == "bpipe dgrad stage 1 micro-batch 1 slice 3"
    assert name_of(Action(2, Kind.SHARD_FORWARD, 5)) == "bpipe output shard forward rank 2 micro-batch 5"
