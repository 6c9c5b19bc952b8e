"""Host buffers: apart from one another, as large as what is known asks for, and refusing every step but the next."""

from __future__ import annotations

import pytest

from bpipe.runtime.acceptor import HostBuffer, HostBufferState
from bpipe.runtime.errors import RuntimeFault
from bpipe.schedule.action import Action, Kind

HOST, RETURN = Action(0, Kind.HOST, 5), Action(0, Kind.RETURN, 5)


@pytest.mark.parametrize(
    ("before", "step", "message"),
    [
        ([], HostBufferState.EMPTYING, "host buffer 0, holding None: FREE -> EMPTYING on 0RETURN5, but only FILLING"),
        ([HostBufferState.FILLING], HostBufferState.EMPTYING, "holding 0HOST5: FILLING -> EMPTYING on 0RETURN5"),
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
