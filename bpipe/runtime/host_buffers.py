"""Hold the acceptor's buffers, each a small state machine, in memory that is allocated as their layout asks for it.

In: a layout, and how long a micro-batch's storages are. Out: buffers to receive into and to send from. Knows no
transport.

    FREE --HOST posted--> FILLING --received--> FULL --RETURN posted--> EMPTYING --sent--> FREE
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from bpipe.runtime.states import advance
from bpipe.schedule.action import Action
from bpipe.transport.layout import BufferLayout, Sizes


class HostBufferState(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    EMPTYING = "emptying"


_NEXT = {
    HostBufferState.FREE: HostBufferState.FILLING,
    HostBufferState.FILLING: HostBufferState.FULL,
    HostBufferState.FULL: HostBufferState.EMPTYING,
    HostBufferState.EMPTYING: HostBufferState.FREE,
}


class HostBuffer:
    """One place for one hosted micro-batch of any of some stages."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = HostBufferState.FREE
        self.holds: Action | None = None

    def move(self, state: HostBufferState, action: Action) -> None:
        """Go to `state` because of `action`; refuses every other step than the next one of the diagram."""
        self.state = advance(self.state, state, _NEXT, f"host buffer {self.index}, holding {self.holds}", action)
        self.holds = None if state is HostBufferState.FREE else action


class HostBuffers:
    """All host buffers of a rank.

    What is outgrown is kept: only the first iteration grows, and its end lets everything go.
    """

    def __init__(self, layout: BufferLayout, count: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._pieces: list[torch.Tensor] = []
        # By buffer and stage, where the buffer lies now.
        self._tensors: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.buffers = tuple(HostBuffer(index) for index in range(count))

    def make_room(self, host_buffer: int, stage: int, sizes: Sizes) -> None:
        """Make room for a micro-batch of `stage` in the buffer."""
        nbytes = self._layout.make_room(host_buffer, stage, sizes)
        if nbytes:
            self._pieces.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
            self._tensors.clear()

    def tensors(self, host_buffer: int, stage: int, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 tensors over the buffer's memory, as long as the stage's storages."""
        key = host_buffer, stage
        if key not in self._tensors:
            piece, offsets = self._layout.place(host_buffer, lengths) if lengths else (0, [])
            self._tensors[key] = [self._pieces[piece].narrow(0, *each) for each in zip(offsets, lengths, strict=True)]
        return self._tensors[key]

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, used or not."""
        return sum(piece.untyped_storage().nbytes() for piece in self._pieces)
