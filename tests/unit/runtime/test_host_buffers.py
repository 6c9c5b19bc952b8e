"""Host slots: preallocated once, apart from one another, and refusing every step but the next."""

from __future__ import annotations

import pytest
import torch

from bpipe.ir.action import Action, Kind
from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.host_buffers import HostBuffers, State
from bpipe.transport.layout import ALIGNMENT_BYTES

CPU = torch.device("cpu")
HOST, RETURN = Action(0, Kind.HOST, 5), Action(0, Kind.RETURN, 5)


def test_buffers_do_not_overlap() -> None:
    slots = HostBuffers([{0}] * 3, {0: [100, 700, 512]}, CPU)
    value = 0
    for slot in slots.slots:
        for buffer in slot.buffers(0):
            value += 1
            buffer.fill_(value)
    seen = [int(v) for slot in slots.slots for buffer in slot.buffers(0) for v in buffer.unique()]
    assert seen == list(range(1, 10))
    assert [buffer.numel() for buffer in slots.slots[0].buffers(0)] == [100, 700, 512]


def test_memory_is_one_allocation_of_the_aligned_sizes() -> None:
    slots = HostBuffers([{0}] * 2, {0: [1, ALIGNMENT_BYTES + 1]}, CPU)
    assert slots.nbytes == 2 * (ALIGNMENT_BYTES + 2 * ALIGNMENT_BYTES)


def test_the_round_trip_and_what_is_held() -> None:
    slots = HostBuffers([{0}], {0: [8]}, CPU)
    (slot,) = slots.slots
    for state, action in ((State.FILLING, HOST), (State.FULL, HOST), (State.EMPTYING, RETURN), (State.FREE, RETURN)):
        slot.move(state, action)
    assert slot.holds is None


@pytest.mark.parametrize(
    ("before", "step", "message"),
    [
        (
            [],
            State.EMPTYING,
            "host buffer 0, holding None: FREE -> EMPTYING on 0RETURN5, but only FILLING may follow FREE; is a wait missing",
        ),
        ([State.FILLING], State.EMPTYING, "holding 0HOST5: FILLING -> EMPTYING on 0RETURN5, but only FULL may follow FILLING"),
        ([State.FILLING, State.FULL], State.FILLING, "FULL -> FILLING"),
        ([State.FILLING, State.FULL, State.EMPTYING], State.FILLING, "EMPTYING -> FILLING on 0RETURN5, but only FREE may follow"),
    ],
)
def test_any_other_step_is_refused(before: list[State], step: State, message: str) -> None:
    slot = HostBuffers([{0}], {0: [8]}, CPU).slots[0]
    for state in before:
        slot.move(state, HOST)
    with pytest.raises(RuntimeFault, match=message):
        slot.move(step, RETURN)
