"""Ranges of a rank's iteration, as torch's profiler records them."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.ranges import Ranges, name_of
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.schedule import Schedule
from bpipe.transport.config import TransferConfig
from tests.unit.runtime.loop import new_weight, run_iteration, schedule
from tests.unit.runtime.test_engine import CPU, LateTransport


def ranges_of(engine: Engine, plan: Schedule) -> list[str]:
    """Names of the ranges of one iteration, by their begin."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_iteration(engine, plan, new_weight())
    events = sorted(profiler.events() or [], key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("bpipe ")]


def test_every_action_of_an_iteration_is_a_range() -> None:
    plan = schedule()
    engine = Engine(
        plan, 0, LateTransport(), EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0))
    )
    found = ranges_of(engine, plan)
    assert [name for name in found if "forward" in name or "backward" in name] == [
        name_of(action) for slot in plan.ranks[0] for action in slot.computations
    ]
    assert sorted(name for name in found if "evict" in name or "load" in name) == sorted(
        name_of(action) for slot in plan.ranks[0] for action in slot.transfers
    )
    assert found[0] == "bpipe forward stage 0 micro-batch 0"
    assert "bpipe evict stage 0 micro-batch 1" in found


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


def test_two_that_run_at_once_are_one_range() -> None:
    ranges = Ranges(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ranges.begin(Action(1, Kind.FORWARD, 5), Action(1, Kind.BACKWARD, 2))
        ranges.end()
    (found,) = (event.name for event in profiler.events() or [] if event.name.startswith("bpipe "))
    assert found == "bpipe forward stage 1 micro-batch 5 with bpipe backward stage 1 micro-batch 2"


def test_a_slice_is_named_by_its_micro_batch() -> None:
    assert name_of(Action(1, Kind.BACKWARD_INPUT, 7), 4) == "bpipe dgrad stage 1 micro-batch 1 slice 3"
    assert name_of(Action(2, Kind.SHARD_FORWARD, 5)) == "bpipe output shard forward rank 2 micro-batch 5"


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len({name_of(Action(0, kind, 0)) for kind in Kind}) == len(Kind)
