"""Host buffers: apart from one another, as large as what is known asks for, and refusing every step but the next."""

from __future__ import annotations

import pytest
import torch

from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.host_buffers import HostBuffer, HostBuffers, HostBufferState
from bpipe.schedule.action import Action, Kind
from bpipe.transport.layout import ALIGNMENT_BYTES, BufferLayout, Sizes

CPU = torch.device("cpu")
HOST, RETURN = Action(0, Kind.HOST, 5), Action(0, Kind.RETURN, 5)


def hosting(*stages: set[int], sizes: Sizes) -> HostBuffers:
    """Buffers that host these stages, with room for what is known of them."""
    held = HostBuffers(BufferLayout(stages), len(stages), CPU)
    held.make_room(0, min(stages[0]), sizes)
    return held


def test_buffers_do_not_overlap() -> None:
    lengths = (100, 700, 512)
    held = hosting({0}, {0}, {0}, sizes={0: lengths})
    value = 0
    for number in range(3):
        for tensor in held.tensors(number, 0, lengths):
            value += 1
            tensor.fill_(value)
    seen = [int(v) for number in range(3) for tensor in held.tensors(number, 0, lengths) for v in tensor.unique()]
    assert seen == list(range(1, 10))
    assert [tensor.numel() for tensor in held.tensors(0, 0, lengths)] == [*lengths]


def test_memory_is_one_allocation_of_the_aligned_sizes() -> None:
    assert hosting({0}, {0}, sizes={0: (1, ALIGNMENT_BYTES + 1)}).nbytes == 2 * (ALIGNMENT_BYTES + 2 * ALIGNMENT_BYTES)


def test_a_buffer_that_is_too_small_for_a_stage_measured_later_lies_elsewhere_from_then_on() -> None:
    held = hosting({0, 3}, {0}, sizes={0: (100,)})
    first = held.tensors(0, 0, [100])[0]
    first.fill_(7)
    held.make_room(0, 3, {0: (100,), 3: (2000,)})
    assert held.nbytes == 2 * 512 + 2048
    for tensor in (*held.tensors(0, 3, [2000]), *held.tensors(0, 0, [100]), *held.tensors(1, 0, [100])):
        tensor.fill_(9)
    assert first.unique().tolist() == [7], "whoever still reads what was there does not see what came after it"


def test_the_round_trip_and_what_is_held() -> None:
    buffer = HostBuffer(0)
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
            "host buffer 0, holding None: FREE -> EMPTYING on 0RETURN5, but only FILLING may follow FREE; is a wait "
            "missing",
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
    buffer = HostBuffer(0)
    for state in before:
        buffer.move(state, HOST)
    with pytest.raises(RuntimeFault, match=message):
        buffer.move(step, RETURN)
