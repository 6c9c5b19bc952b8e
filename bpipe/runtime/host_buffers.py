"""Hold the acceptor's preallocated buffers, each a small state machine.

In: the sizes of a micro-batch's storages, by stage, and which stages each buffer will host. Out: buffers to receive into and to send
from. Knows no transport.

    FREE --HOST posted--> FILLING --received--> FULL --RETURN posted--> EMPTYING --sent--> FREE
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import torch

from bpipe.ir.action import Action
from bpipe.runtime.states import advance
from bpipe.transport.layout import BufferLayout


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
    """One preallocated place for one hosted micro-batch of any of some stages."""

    def __init__(self, index: int, tensors: Mapping[int, list[torch.Tensor]]) -> None:
        self.index = index
        self.state = HostBufferState.FREE
        self.holds: Action | None = None
        self._tensors = tensors

    def tensors(self, stage: int) -> list[torch.Tensor]:
        """uint8 tensors over the buffer's memory, the i-th as long as the stage's i-th storage."""
        return self._tensors[stage]

    def move(self, state: HostBufferState, action: Action) -> None:
        """Go to `state` because of `action`; refuses every other step than the next one of the diagram."""
        self.state = advance(self.state, state, _NEXT, f"host buffer {self.index}, holding {self.holds}", action)
        self.holds = None if state is HostBufferState.FREE else action


class HostBuffers:
    """All host buffers of a rank, allocated together, once."""

    def __init__(self, stages_in_buffers: Sequence[Iterable[int]], sizes: Mapping[int, Sequence[int]], device: torch.device) -> None:
        layout = BufferLayout.of(stages_in_buffers, sizes)
        self.memory = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.buffers = tuple(
            HostBuffer(index, {stage: self._cut(layout.offsets(index, sizes[stage]), sizes[stage]) for stage in stages})
            for index, stages in enumerate(stages_in_buffers)
        )

    def _cut(self, offsets: Iterable[int], lengths: Iterable[int]) -> list[torch.Tensor]:
        return [self.memory.narrow(0, offset, nbytes) for offset, nbytes in zip(offsets, lengths, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, used or not."""
        return self.memory.untyped_storage().nbytes()
