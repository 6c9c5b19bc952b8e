"""Parts of a layer on their own stream, as in overlapped shared experts and combined 1F1B: transfers respect it."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from bpipe.runtime.evictor import ActivationsState
from bpipe.transport.streams import current
from tests.gpu.waits import without_compute, without_the_end_of
from tests.late.cases import SCHEDULES, balanced
from tests.late.devices import AS_LATE, COMPUTE_LAST, COPIES_LAST, DRAWN, STREAM_LAST, Draw
from tests.late.in_pieces import PiecesPipeline
from tests.late.model import LateModel
from tests.late.pipeline import LatePipeline, wrong_bits
from tests.unit.runtime.pipeline import inputs_of


class Overlapped(LateModel):
    """A stage computes two parts at once: the second on its own stream, which waits for its inputs and is waited for at the
    layer's end, forward and backward."""

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages)
        self._streams: dict[int, torch.Stream] = {}

    def streams(self, rank: int) -> list[torch.Stream]:
        return [stream for device, stream in self._streams.items() if device == rank]

    def forward(self, weight: torch.Tensor, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        # The first stage's input requires a gradient like any other, so what is computed from it has a backward.
        (x,) = received or (inputs_of(microbatch).to(weight.device).requires_grad_(),)
        # Computed first, so its backward is issued last and takes memory that the other's has just freed.
        main = (x * 2).tanh().sin().exp().tanh()
        if weight.device.type == "cpu":
            second = torch.nn.functional.gelu(x.sin().exp().tanh() @ weight)
        else:
            second = self._beside(weight, x)
        output = second @ weight.t() + main
        return output if stage + 1 < self._num_stages else (output * (microbatch + 1)).square().mean()

    def _beside(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        index = weight.device.index
        if index not in self._streams:
            self._streams[index] = torch.Stream(weight.device)
        stream = self._streams[index]
        stream.wait_event(torch.accelerator.current_stream().record_event())
        with current(stream):
            output = torch.nn.functional.gelu(x.sin().exp().tanh() @ weight)
        torch.accelerator.current_stream().wait_event(stream.record_event())
        return output


def draws() -> list[Draw]:
    lasts = [Draw(1, STREAM_LAST, stream) for stream in range(1, 6)]
    return [
        *(Draw(1, order) for order in (AS_LATE, COMPUTE_LAST, COPIES_LAST)),
        *lasts,
        *(Draw(seed, DRAWN) for seed in range(3)),
    ]


def is_right(draw: Draw, kind: str, engines: bool = True, noted: bool = True) -> bool:
    schedule = SCHEDULES["1f1b"]()
    model = Overlapped(schedule.num_stages)
    beside = model.streams if noted else lambda rank: []
    pipeline = LatePipeline(schedule, kind, engines, verify=engines, model=model, beside=beside)
    try:
        return wrong_bits(pipeline, draw) == []
    except RuntimeError as error:
        if "since the start" not in str(error):
            raise
        return False


@pytest.mark.parametrize("kind", ["two-sided", "peer"])
def test_what_another_stream_computes_moves_in_its_order(kind: str) -> None:
    assert all(is_right(draw, kind, engines=False) for draw in draws()[:3]), "the stand-in itself"
    for draw in draws():
        assert is_right(draw, kind), str(draw)


def test_a_stream_that_nobody_noted_reads_memory_that_is_another_s_by_now() -> None:
    """The test fails without the noted stream."""
    # Memory freed by other tests would be allocated in place of the memory that is read.
    gc.collect()
    assert not all(is_right(draw, "peer", noted=False) for draw in draws()[:4])


# Combined 1F1B in pairs, and with a bound that only the node's own memory can keep.
COMBINED = {
    "two-sided": lambda: balanced("combined-1f1b", 6, 12, 2),
    "peer": lambda: balanced("combined-1f1b", 4, 8, 2),
    "host": lambda: balanced("combined-1f1b", 4, 8, 2, bounds=(5,), hosts="host"),
}


def in_pieces_is_right(draw: Draw, kind: str, engines: bool = True, noted: bool = True, verify: bool = True) -> bool:
    pipeline = PiecesPipeline(COMBINED[kind](), kind, engines, noted, verify and engines)
    try:
        right = wrong_bits(pipeline, draw) == []
    except RuntimeError as error:
        if "since the start" not in str(error):
            raise
        return False
    assert not engines or any(rank.moved_bytes for rank in pipeline.ranks), "nothing has moved"
    return right


@pytest.mark.parametrize(
    "kind", ["peer", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("two-sided", "host"))]
)
def test_what_parts_of_layers_on_two_streams_saved_moves_in_its_order(kind: str) -> None:
    assert all(in_pieces_is_right(draw, kind, engines=False) for draw in draws()[:3]), "the stand-in itself"
    for draw in draws():
        assert in_pieces_is_right(draw, kind), str(draw)


@pytest.mark.parametrize(
    "taken_out",
    [
        lambda: without_compute("outbound"),
        lambda: without_the_end_of(ActivationsState.AWAY),
        lambda: without_compute("inbound"),
        lambda: without_the_end_of(ActivationsState.HERE),
    ],
    ids=["[1]", "[3]", "[5]", "[7]"],
)
def test_without_a_wait_what_parts_of_layers_saved_is_wrong(
    taken_out: Callable[[], AbstractContextManager[Any]],
) -> None:
    gc.collect()
    with taken_out():
        assert not all(in_pieces_is_right(draw, "host", verify=False) for draw in draws())


def test_parts_on_a_stream_that_nobody_noted_read_memory_that_is_another_s_by_now() -> None:
    gc.collect()
    assert not all(in_pieces_is_right(draw, "host", noted=False) for draw in draws())
