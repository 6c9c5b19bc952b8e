"""Host a partner's activations in host buffers. One of the two roles of a rank; the other is `evictor`.

In: HOST and RETURN actions with their host buffer. Out: buffers filled and emptied. Knows the transport's protocol and
no schedule. A buffer that is hosted again, or returned, waits for its own last transfer [8], and on a device it does so
beside the computation: no forward or backward of this rank waits for a buffer. At the end of the iteration everything
does, for then they may be given back. The host never blocks, except that a HOST may have to learn how large the
partner's storages are, a stage at a time, and that on a CPU every wait is the host's. It never waits to hear of a stage
that the partner comes to only later: that could need this very rank. Where the evictor reaches into the buffers by
itself, there is nothing but learning this and lending the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from bpipe.runtime.errors import TransferError
from bpipe.runtime.host_buffers import HostBuffer, HostBuffers, HostBufferState
from bpipe.runtime.streams import Streams
from bpipe.schedule.action import Action
from bpipe.transport.base import Done, OneSided, Pending, Transport, TwoSided
from bpipe.transport.layout import BufferLayout


class Acceptor(Protocol):
    """The acceptor's half of every transfer of one rank."""

    @property
    def num_host_buffers(self) -> int:
        """Number of host buffers allocated on this rank, used or not."""

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of memory they hold, used or not."""

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        """Bytes of one micro-batch that come, by the partner's stage; empty where this rank takes no part in that."""

    @property
    def is_scattered(self) -> bool:
        """Whether the host buffers are in several pieces of memory, some of which may be of no use any more."""

    def hear(self, action: Action, num_stages: int) -> None:
        """Hear, before this HOST, the sizes of so many of the partner's stages. Blocks until they are here."""

    def hear_growth(self) -> bool:
        """Hear between two iterations whether buffers have to grow, where sizes differ.

        Blocks until the partner begins this iteration, for which it needs nothing of this rank.
        """

    def host(self, action: Action, host_buffer: int) -> None:
        """Begin to fill a host buffer."""

    def give_back(self, action: Action, host_buffer: int) -> None:
        """Begin to empty a host buffer."""

    def end(self) -> None:
        """End the iteration: every host buffer must be free again."""

    def let_go(self) -> None:
        """Free the host buffers; the next HOST allocates them again, for all that was heard."""

    def release(self) -> None:
        """Free them and forget the sizes; the next HOST learns them anew."""

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""


class Hearing:
    """Sizes that an acceptor hears: lengths of the storages of a micro-batch, by the partner's stage, in the order
    told."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sizes: dict[int, tuple[int, ...]] = {}

    def hear(self, num_stages: int) -> None:
        while len(self.sizes) < num_stages:
            self.sizes |= self._transport.learn()

    def hear_growth(self) -> bool:
        if not self.sizes:
            return False
        grown = self._transport.learn()
        self.sizes |= grown
        return bool(grown)


class HearingAcceptor:
    """Common part of acceptors: they hear the sizes of what comes and lay out where it goes."""

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: Transport) -> None:
        self._layout = BufferLayout(stages_in_buffers)
        self._hearing = Hearing(transport)

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        return {stage: sum(lengths) for stage, lengths in self._hearing.sizes.items()}

    @property
    def is_scattered(self) -> bool:
        return len(self._layout.pieces) > 1

    def hear(self, action: Action, num_stages: int) -> None:
        self._hearing.hear(num_stages)

    def hear_growth(self) -> bool:
        return self._hearing.hear_growth()

    def let_go(self) -> None:
        self._layout.clear()

    def release(self) -> None:
        self.let_go()
        self._hearing.sizes.clear()


class LendingAcceptor(HearingAcceptor):
    """Lends memory to an evictor that does the rest by itself, or does nothing where the evictor uses its own."""

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: OneSided) -> None:
        super().__init__(stages_in_buffers, transport)
        self._transport = transport

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        return {}

    @property
    def num_host_buffers(self) -> int:
        return self._layout.num_buffers

    @property
    def host_buffer_bytes(self) -> int:
        return self._layout.nbytes

    def hear(self, action: Action, num_stages: int) -> None:
        if self._transport.lends:
            super().hear(action, num_stages)

    def host(self, action: Action, host_buffer: int) -> None:
        nbytes = self._layout.make_room(host_buffer, action.stage, self._hearing.sizes) if self._transport.lends else 0
        if nbytes:
            self._transport.lend(nbytes)

    def give_back(self, action: Action, host_buffer: int) -> None:
        """Do nothing: the evictor takes what it wants."""

    def end(self) -> None:
        """Do nothing: the evictor's own order keeps the buffers apart."""

    def abandon(self) -> None:
        """Do nothing: no transfer is held."""


class ReceivingAcceptor(HearingAcceptor):
    """Receives into its host buffers and sends them back."""

    def __init__(
        self,
        stages_in_buffers: Sequence[frozenset[int]],
        transport: TwoSided,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        super().__init__(stages_in_buffers, transport)
        self._count = len(stages_in_buffers)
        self._transport = transport
        self._streams = streams
        self._device = device
        self._wait = wait
        self._host_buffers = HostBuffers(self._layout, self._count, device)
        self._pending: dict[int, Pending] = {}

    @property
    def num_host_buffers(self) -> int:
        return self._layout.num_buffers

    @property
    def host_buffer_bytes(self) -> int:
        return self._host_buffers.nbytes

    def host(self, action: Action, host_buffer: int) -> None:
        buffer = self._host_buffers.buffers[host_buffer]
        self._host_buffers.make_room(host_buffer, action.stage, self._hearing.sizes)
        with self._streams.inbound():
            self._settle(buffer)  # [8]
            buffer.move(HostBufferState.FILLING, action)
            tensors = self._tensors(buffer, action)
            self._pending[host_buffer] = self._transport.host(host_buffer, tensors) if tensors else Done()

    def give_back(self, action: Action, host_buffer: int) -> None:
        buffer = self._host_buffers.buffers[host_buffer]
        with self._streams.outbound():
            self._settle(buffer)
            buffer.move(HostBufferState.EMPTYING, action)
            tensors = self._tensors(buffer, action)
            self._pending[host_buffer] = self._transport.give_back(host_buffer, tensors) if tensors else Done()

    def _tensors(self, buffer: HostBuffer, action: Action) -> list[torch.Tensor]:
        return self._host_buffers.tensors(buffer.index, action.stage, self._hearing.sizes[action.stage])

    def _settle(self, buffer: HostBuffer) -> None:
        """Wait for the buffer's transfer under way, if there is one."""
        pending = self._pending.pop(buffer.index, None)
        if pending is not None and buffer.holds is not None:
            action = buffer.holds
            self._wait(pending, action, buffer.state.value)
            buffer.move(
                HostBufferState.FULL if buffer.state is HostBufferState.FILLING else HostBufferState.FREE, action
            )

    def end(self) -> None:
        for buffer in self._host_buffers.buffers:
            self._settle(buffer)
            if buffer.state is not HostBufferState.FREE:
                raise TransferError(
                    f"host buffer {buffer.index} still holds {buffer.holds} at the end of the iteration: its RETURN "
                    f"is missing"
                )

    def let_go(self) -> None:
        super().let_go()
        self._host_buffers = HostBuffers(self._layout, self._count, self._device)

    def abandon(self) -> None:
        self._pending.clear()
