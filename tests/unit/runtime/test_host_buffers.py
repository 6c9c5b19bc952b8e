"""Host buffers: preallocated once, apart from one another, and refusing every step but the next."""

from __future__ import annotations

import pytest
import torch

from bpipe.ir.action import Action, Kind
from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.host_buffers import HostBuffers, HostBufferState
from bpipe.transport.layout import ALIGNMENT_BYTES

CPU = torch.device("cpu")
HOST, RETURN = Action(0, Kind.HOST, 5), Action(0, Kind.RETURN, 5)


def test_buffers_do_not_overlap() -> None:
    held = HostBuffers([{0}] * 3, {0: [100, 700, 512]}, CPU)
    value = 0
    for buffer in held.buffers:
        for tensor in buffer.tensors(0):
            value += 1
            tensor.fill_(value)
    seen = [int(v) for buffer in held.buffers for tensor in buffer.tensors(0) for v in tensor.unique()]
    assert seen == list(range(1, 10))
    assert [tensor.numel() for tensor in held.buffers[0].tensors(0)] == [100, 700, 512]


def test_memory_is_one_allocation_of_the_aligned_sizes() -> None:
    held = HostBuffers([{0}] * 2, {0: [1, ALIGNMENT_BYTES + 1]}, CPU)
    assert held.nbytes == 2 * (ALIGNMENT_BYTES + 2 * ALIGNMENT_BYTES)


def test_the_round_trip_and_what_is_held() -> None:
    held = HostBuffers([{0}], {0: [8]}, CPU)
    (buffer,) = held.buffers
    for state, action in (
        (HostBufferState.FILLING, HOST),
        (HostBufferState.FULL, HOST),
        (HostBufferState.EMPTYING, RETURN),
        (HostBufferState.FREE, RETURN),
    ):
        buffer.move(state, action)
    assert buffer.holds is None


@pytest.mark.parametrize(
    ("before", "step", "message"),
    [
        (
            [],
            HostBufferState.EMPTYING,
            "host buffer 0, holding None: FREE -> EMPTYING on 0RETURN5, but only FILLING may follow FREE; is a wait missing",
        ),
        (
            [HostBufferState.FILLING],
            HostBufferState.EMPTYING,
            "holding 0HOST5: FILLING -> EMPTYING on 0RETURN5, but only FULL may follow FILLING",
        ),
        ([HostBufferState.FILLING, HostBufferState.FULL], HostBufferState.FILLING, "FULL -> FILLING"),
        (
            [HostBufferState.FILLING, HostBufferState.FULL, HostBufferState.EMPTYING],
            HostBufferState.FILLING,
            "EMPTYING -> FILLING on 0RETURN5, but only FREE may follow",
        ),
    ],
)
def test_any_other_step_is_refused(before: list[HostBufferState], step: HostBufferState, message: str) -> None:
    buffer = HostBuffers([{0}], {0: [8]}, CPU).buffers[0]
    for state in before:
        buffer.move(state, HOST)
    with pytest.raises(RuntimeFault, match=message):
        buffer.move(step, RETURN)
