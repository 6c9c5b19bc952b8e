"""Host a partner's activations in preallocated host buffers. One of the two roles of a rank; the other is `evictor`.

In: HOST and RETURN actions with their host buffer. Out: buffers filled and emptied. Knows the transport's protocol and no schedule.
A buffer that is hosted again, or returned, waits for its own last transfer [8], and on a device it does so beside the computation: no
forward or backward of this rank waits for a buffer. At the end of the iteration everything does, for then they may be given back. The host
never blocks, except that the very first HOST learns how large the partner's storages are, and that on a CPU every wait is the host's.
Where the evictor reaches into the buffers by itself, there is nothing but that first HOST.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from bpipe.ir.action import Action
from bpipe.runtime.errors import TransferError
from bpipe.runtime.host_buffers import HostBuffer, HostBuffers, HostBufferState
from bpipe.runtime.streams import Streams
from bpipe.transport.base import Done, OneSided, Pending, TwoSided
from bpipe.transport.layout import BufferLayout


class Acceptor(Protocol):
    """The acceptor's half of every transfer of one rank."""

    @property
    def num_host_buffers(self) -> int:
        """Host buffers allocated on this rank, used or not."""

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of memory they hold, used or not."""

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        """By the partner's stage, the bytes of one micro-batch that come; empty where this rank takes no part in that."""

    def host(self, action: Action, host_buffer: int) -> None:
        """A host buffer is about to be filled."""

    def give_back(self, action: Action, host_buffer: int) -> None:
        """A host buffer is about to be emptied."""

    def end(self) -> None:
        """The iteration is over: every host buffer must be free again."""

    def release(self) -> None:
        """Free the host buffers; the next HOST learns the sizes and allocates them again."""

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""


class LendingAcceptor:
    """Lends memory, once, to an evictor that does the rest by itself."""

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: OneSided) -> None:
        self._stages_in_buffers = stages_in_buffers
        self._transport = transport
        self._lent = False
        self.host_buffer_bytes = 0
        self.moved_bytes: Mapping[int, int] = {}

    @property
    def num_host_buffers(self) -> int:
        return len(self._stages_in_buffers) if self.host_buffer_bytes else 0

    def host(self, action: Action, host_buffer: int) -> None:
        if not self._lent:
            self.host_buffer_bytes = self._transport.lend(lambda sizes: BufferLayout.of(self._stages_in_buffers, sizes))
            self._lent = True

    def give_back(self, action: Action, host_buffer: int) -> None:
        """The evictor has taken, or will take, what it wants."""

    def end(self) -> None:
        """The evictor's own order keeps the buffers apart."""

    def release(self) -> None:
        self._lent = False
        self.host_buffer_bytes = 0

    def abandon(self) -> None:
        """Nothing is held."""


class ReceivingAcceptor:
    """Receives into its host buffers and sends them back."""

    def __init__(
        self,
        stages_in_buffers: Sequence[frozenset[int]],
        transport: TwoSided,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        self._stages_in_buffers = stages_in_buffers
        self._transport = transport
        self._streams = streams
        self._device = device
        self._wait = wait
        self._host_buffers: HostBuffers | None = None
        self._pending: dict[int, Pending] = {}
        self.moved_bytes: Mapping[int, int] = {}

    @property
    def num_host_buffers(self) -> int:
        return len(self._host_buffers.buffers) if self._host_buffers and self._host_buffers.nbytes else 0

    @property
    def host_buffer_bytes(self) -> int:
        return self._host_buffers.nbytes if self._host_buffers else 0

    def _buffer(self, host_buffer: int, action: Action) -> HostBuffer:
        if self._host_buffers is None:
            sizes = self._transport.learn()
            self._host_buffers = HostBuffers(self._stages_in_buffers, sizes, self._device)
            self.moved_bytes = {stage: sum(lengths) for stage, lengths in sizes.items()}
        return self._host_buffers.buffers[host_buffer]

    def host(self, action: Action, host_buffer: int) -> None:
        buffer = self._buffer(host_buffer, action)
        with self._streams.inbound():
            self._settle(buffer)  # [8]
            buffer.move(HostBufferState.FILLING, action)
            self._pending[host_buffer] = self._transport.host(host_buffer, tensors) if (tensors := buffer.tensors(action.stage)) else Done()

    def give_back(self, action: Action, host_buffer: int) -> None:
        buffer = self._buffer(host_buffer, action)
        with self._streams.outbound():
            self._settle(buffer)
            buffer.move(HostBufferState.EMPTYING, action)
            self._pending[host_buffer] = (
                self._transport.give_back(host_buffer, tensors) if (tensors := buffer.tensors(action.stage)) else Done()
            )

    def _settle(self, buffer: HostBuffer) -> None:
        """Wait for the buffer's transfer under way, if there is one."""
        pending = self._pending.pop(buffer.index, None)
        if pending is not None and buffer.holds is not None:
            action = buffer.holds
            self._wait(pending, action, buffer.state.value)
            buffer.move(HostBufferState.FULL if buffer.state is HostBufferState.FILLING else HostBufferState.FREE, action)

    def end(self) -> None:
        for buffer in self._host_buffers.buffers if self._host_buffers else ():
            self._settle(buffer)
            if buffer.state is not HostBufferState.FREE:
                raise TransferError(
                    f"host buffer {buffer.index} still holds {buffer.holds} at the end of the iteration: its RETURN is missing"
                )

    def release(self) -> None:
        self._host_buffers = None

    def abandon(self) -> None:
        self._pending.clear()
