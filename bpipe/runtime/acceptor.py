"""Host a partner's activations in preallocated slots. One of the two roles of a rank; the other is `evictor`.

In: HOST and RETURN actions with their slot. Out: slots filled and emptied. Knows the transport's protocol and no schedule.
A slot that is hosted again, or returned, waits for its own last transfer [8], and on a device it does so beside the computation: no
forward or backward of this rank waits for a slot. At the end of the iteration everything does, for then the slots may be given back. The
host never blocks, except that the very first HOST learns how large the partner's storages are, and that on a CPU every wait is the host's.
Where the evictor reaches into the slots by itself, there is nothing but that first HOST.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from bpipe.ir.action import Action
from bpipe.runtime.errors import TransferError
from bpipe.runtime.host_buffers import HostBuffer, HostBuffers, State
from bpipe.runtime.streams import Streams
from bpipe.transport.base import Done, OneSided, Pending, TwoSided
from bpipe.transport.layout import BufferLayout


class Acceptor(Protocol):
    """The acceptor's half of every transfer of one rank."""

    @property
    def num_host_buffers(self) -> int:
        """Slots allocated on this rank, used or not."""

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of memory the slots hold, used or not."""

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        """By the partner's stage, the bytes of one micro-batch that come; empty where this rank takes no part in that."""

    def host(self, action: Action, index: int) -> None:
        """A slot is about to be filled."""

    def give_back(self, action: Action, index: int) -> None:
        """A slot is about to be emptied."""

    def end(self) -> None:
        """The iteration is over: every slot must be free again."""

    def release(self) -> None:
        """Free the slots; the next HOST learns the sizes and allocates them again."""

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""


class LendingAcceptor:
    """Lends memory, once, to an evictor that does the rest by itself."""

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: OneSided) -> None:
        self._stages_in_slots = stages_in_buffers
        self._transport = transport
        self._lent = False
        self.host_buffer_bytes = 0
        self.moved_bytes: Mapping[int, int] = {}

    @property
    def num_host_buffers(self) -> int:
        return len(self._stages_in_slots) if self.host_buffer_bytes else 0

    def host(self, action: Action, index: int) -> None:
        if not self._lent:
            self.host_buffer_bytes = self._transport.lend(lambda sizes: BufferLayout.of(self._stages_in_slots, sizes))
            self._lent = True

    def give_back(self, action: Action, index: int) -> None:
        """The evictor has taken, or will take, what it wants."""

    def end(self) -> None:
        """The evictor's own order keeps the slots apart."""

    def release(self) -> None:
        self._lent = False
        self.host_buffer_bytes = 0

    def abandon(self) -> None:
        """Nothing is held."""


class ReceivingAcceptor:
    """Receives into its slots and sends them home."""

    def __init__(
        self,
        stages_in_buffers: Sequence[frozenset[int]],
        transport: TwoSided,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        self._stages_in_slots = stages_in_buffers
        self._transport = transport
        self._streams = streams
        self._device = device
        self._wait = wait
        self._slots: HostBuffers | None = None
        self._pending: dict[int, Pending] = {}
        self.moved_bytes: Mapping[int, int] = {}

    @property
    def num_host_buffers(self) -> int:
        return len(self._slots.slots) if self._slots and self._slots.nbytes else 0

    @property
    def host_buffer_bytes(self) -> int:
        return self._slots.nbytes if self._slots else 0

    def _slot(self, index: int, action: Action) -> HostBuffer:
        if self._slots is None:
            sizes = self._transport.learn()
            self._slots = HostBuffers(self._stages_in_slots, sizes, self._device)
            self.moved_bytes = {stage: sum(lengths) for stage, lengths in sizes.items()}
        return self._slots.slots[index]

    def host(self, action: Action, index: int) -> None:
        slot = self._slot(index, action)
        with self._streams.homeward():
            self._settle(slot)  # [8]
            slot.move(State.FILLING, action)
            self._pending[index] = self._transport.host(index, buffers) if (buffers := slot.buffers(action.stage)) else Done()

    def give_back(self, action: Action, index: int) -> None:
        slot = self._slot(index, action)
        with self._streams.outward():
            self._settle(slot)
            slot.move(State.EMPTYING, action)
            self._pending[index] = self._transport.give_back(index, buffers) if (buffers := slot.buffers(action.stage)) else Done()

    def _settle(self, slot: HostBuffer) -> None:
        """Wait for the slot's transfer under way, if there is one."""
        pending = self._pending.pop(slot.index, None)
        if pending is not None and slot.holds is not None:
            action = slot.holds
            self._wait(pending, action, slot.state.value)
            slot.move(State.FULL if slot.state is State.FILLING else State.FREE, action)

    def end(self) -> None:
        for slot in self._slots.slots if self._slots else ():
            self._settle(slot)
            if slot.state is not State.FREE:
                raise TransferError(f"host buffer {slot.index} still holds {slot.holds} at the end of the iteration: its RETURN is missing")

    def release(self) -> None:
        self._slots = None

    def abandon(self) -> None:
        self._pending.clear()
