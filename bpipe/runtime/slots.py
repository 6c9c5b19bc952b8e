"""Hold the acceptor's preallocated buffers, each a small state machine.

In: the sizes of a micro-batch's storages and a number of slots. Out: buffers to receive into and to send from. Knows no transport.

    FREE --HOST posted--> FILLING --received--> FULL --RETURN posted--> EMPTYING --sent--> FREE
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from bpipe.ir.action import Action
from bpipe.runtime.errors import RuntimeFault

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
    """One preallocated place for one hosted micro-batch: `buffers[i]` is a uint8 tensor as long as the i-th storage."""

    def __init__(self, index: int, memory: torch.Tensor, sizes: Sequence[int]) -> None:
        self.index = index
        self.state = State.FREE
        self.holds: Action | None = None
        self.buffers = []
        offset = 0
        for nbytes in sizes:
            self.buffers.append(memory.narrow(0, offset, nbytes))
            offset += aligned(nbytes)

    def move(self, state: State, action: Action) -> None:
        """Go to `state` because of `action`; refuses every other step than the next one of the diagram."""
        if _NEXT[self.state] is not state:
            raise RuntimeFault(
                f"host slot {self.index}, holding {self.holds}: {self.state.name} -> {state.name} on {action}, "
                f"but only {_NEXT[self.state].name} may follow {self.state.name}; is a wait missing?"
            )
        self.state = state
        self.holds = None if state is State.FREE else action


class HostSlots:
    """All host slots of a rank, allocated together, once."""

    def __init__(self, num_slots: int, sizes: Sequence[int], device: torch.device) -> None:
        per_slot = sum(aligned(nbytes) for nbytes in sizes)
        self.sizes = tuple(sizes)
        self.memory = torch.empty(num_slots * per_slot, dtype=torch.uint8, device=device)
        self.slots = tuple(
            HostSlot(index, self.memory.narrow(0, index * per_slot, per_slot), sizes) for index in range(num_slots)
        )

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, used or not."""
        return self.memory.untyped_storage().nbytes()

    @property
    def num_used(self) -> int:
        return sum(slot.state is not State.FREE for slot in self.slots)
