"""Waits of lanes, records and host buffers in parallel to the computation, on late devices."""

import contextlib
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bpipe.runtime.partners import ReceivingAcceptor
from bpipe.runtime.recorder import Recorder
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import num_transfers
from bpipe.transport import streams
from bpipe.transport.streams import Done
from tests.gpu.accelerators import LATE, accelerator
from tests.gpu.common import SMALL
from tests.gpu.streams import SIZES, Stage0
from tests.late.cases import SCHEDULES
from tests.late.devices import Draw, begin, device, draws
from tests.late.pipeline import LatePipeline, wrong_bits


@pytest.mark.parametrize("kind", ["two-sided", "peer"])
def test_synchronous_transfers_are_ordered_too(kind: str) -> None:
    assert wrong_bits(LatePipeline(SCHEDULES["1f1b of 6"](), kind, synchronous=True), Draw(1)) == []


def test_copies_are_timed_only_where_an_iteration_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all streams share one queue, timing events delay what comes after them; each transfer had two unused ones."""
    marks = 0

    class Event(torch.Event):
        def __new__(cls, device: Any = None, enable_timing: bool = False, **named: Any) -> Any:
            nonlocal marks
            marks += enable_timing
            return super().__new__(cls, device, enable_timing=enable_timing, **named)

    stage = Stage0(accelerator(LATE), SIZES[SMALL])
    transfers = num_transfers(stage.plan, 0)
    monkeypatch.setattr(streams.torch, "Event", Event)
    for recorder, expected in ((None, 0), (MagicMock(), 2 * (transfers.evictions + transfers.loads))):
        # A recorder without a clock: the remaining timing events are those of the copies.
        marks, stage.engine.recorder = 0, recorder
        assert stage.right()
        assert marks == expected


def test_a_wait_beside_the_computation_holds_nothing_up() -> None:
    """The record's exposed time is the time that the computation waited."""
    begin(Draw(1))
    beside, recorder = streams.Streams(device()), Recorder(streams.Clock(device()))
    waited = {}
    for action, stream in (
        (Action(0, Kind.HOST, 1), beside.inbound()),
        (Action(0, Kind.EVICT, 1), contextlib.nullcontext()),
    ):
        recorder.started(action, host_buffer=0)
        with stream:
            recorder.waited(action, recorder.mark(), Done())
        waited[action.kind] = recorder._transfers[action].waited is not None
        assert recorder._transfers[action].end is not None
    assert waited == {Kind.HOST: False, Kind.EVICT: True}


def test_a_lane_of_its_own_starts_behind_what_the_computation_was_given() -> None:
    """A lane reads the computation's results; later work of the computation need not wait for it."""
    assert [str(draw) for draw in draws(6) if lane_is_wrong(draw)] == []


def lane_is_wrong(draw: Draw) -> bool:
    begin(draw)
    lane, tensor, seen = streams.beside(device(), 1.0), torch.zeros(8, device=device()), []
    tensor.fill_(1)
    done = lane.run(lambda: seen.append(tensor + 1))
    next_forward = tensor * 3
    done.wait()
    tensor.fill_(9)
    return (seen[0].tolist(), next_forward.tolist()) != ([2.0] * 8, [3.0] * 8)


def test_no_computation_of_an_acceptor_waits_for_a_host_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """[8] Only the stream of the next transfer that uses a host buffer waits for it; all of it waits at the end of an
    iteration."""
    settled: set[str] = set()
    settle, end = ReceivingAcceptor._settle, ReceivingAcceptor.end

    def watched(self: ReceivingAcceptor, buffer: Any) -> None:
        stream = torch.accelerator.current_stream().stream_id
        settled.add("at the end" if self in ending else "on compute's stream" if stream == 0 else "beside")
        settle(self, buffer)

    def watched_end(self: ReceivingAcceptor) -> None:
        ending.append(self)
        end(self)
        ending.remove(self)

    ending: list[ReceivingAcceptor] = []
    monkeypatch.setattr(ReceivingAcceptor, "_settle", watched)
    monkeypatch.setattr(ReceivingAcceptor, "end", watched_end)
    assert wrong_bits(LatePipeline(SCHEDULES["1f1b of 6"](), "two-sided"), Draw(1)) == []
    assert settled == {"at the end", "beside"}
