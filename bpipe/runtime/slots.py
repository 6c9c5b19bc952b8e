"""Hold the acceptor's preallocated buffers, each a small state machine.

In: the sizes of a micro-batch's storages, by stage, and which stages each slot will host. Out: buffers to receive into and to send
from. Knows no transport.

    FREE --HOST posted--> FILLING --received--> FULL --RETURN posted--> EMPTYING --sent--> FREE
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from bpipe.ir.action import Action
from bpipe.runtime.states import advance

# Buffers start on the boundary copy engines and vector loads like best; the remainder of a storage's last block is never sent.
ALIGNMENT_BYTES = 512


class State(enum.Enum):
    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    EMPTYING = "emptying"


_NEXT = {State.FREE: State.FILLING, State.FILLING: State.FULL, State.FULL: State.EMPTYING, State.EMPTYING: State.FREE}


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostSlot:
    """One preallocated place for one hosted micro-batch of any of some stages. `sizes[stage]` are the lengths of its storages."""

    def __init__(self, index: int, memory: torch.Tensor, sizes: Mapping[int, Sequence[int]]) -> None:
        self.index = index
        self.state = State.FREE
        self.holds: Action | None = None
        self._buffers = {stage: _cut(memory, lengths) for stage, lengths in sizes.items()}

    def buffers(self, stage: int) -> list[torch.Tensor]:
        """uint8 tensors over the slot's memory, the i-th as long as the stage's i-th storage."""
        return self._buffers[stage]

    def move(self, state: State, action: Action) -> None:
        """Go to `state` because of `action`; refuses every other step than the next one of the diagram."""
        self.state = advance(self.state, state, _NEXT, f"host slot {self.index}, holding {self.holds}", action)
        self.holds = None if state is State.FREE else action


def _cut(memory: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    starts = itertools.accumulate((aligned(nbytes) for nbytes in lengths), initial=0)
    return [memory.narrow(0, start, nbytes) for start, nbytes in zip(starts, lengths, strict=False)]


class HostSlots:
    """All host slots of a rank, allocated together, once; each as large as the largest of the stages it will host."""

    def __init__(self, stages_in_slots: Sequence[Iterable[int]], sizes: Mapping[int, Sequence[int]], device: torch.device) -> None:
        layouts = [{stage: sizes[stage] for stage in stages} for stages in stages_in_slots]
        lengths = [max(sum(map(aligned, lengths)) for lengths in layout.values()) for layout in layouts]
        self.memory = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        starts = itertools.accumulate(lengths, initial=0)
        self.slots = tuple(
            HostSlot(index, self.memory.narrow(0, start, length), layout)
            for index, (start, length, layout) in enumerate(zip(starts, lengths, layouts, strict=False))
        )

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, used or not."""
        return self.memory.untyped_storage().nbytes()
