"""Host a partner's activations in this rank's node's memory, behind its device, which only passes them on.

In: HOST and RETURN actions with their slot there, and in which order the RETURNs come. Out: slots filled and emptied. Knows no schedule.

    FREE --HOST--> KEPT --brought to the device ahead--> AHEAD --RETURN--> FREE

A slot's state is what was asked of it, in order; the lanes of the transport do it in that order, and the host never waits for them before
the iteration's end. The device has two buffers: what comes passes through the one, what goes back through the other. What goes back next is
brought there as soon as the one before it has gone, so it need not be waited for when it is asked for.
On a device these transfers have streams of their own: what waits for the partner in them holds up nothing else of this rank's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from bpipe.ir.action import Action
from bpipe.ir.host_buffers import STAGING
from bpipe.runtime.acceptor import HearingAcceptor
from bpipe.runtime.errors import TransferError
from bpipe.runtime.host_buffers import HostBuffers
from bpipe.runtime.states import advance
from bpipe.runtime.streams import Streams
from bpipe.transport.base import Pending
from bpipe.transport.layout import BufferLayout
from bpipe.transport.passing import Passing

Key = tuple[int, int]
# The buffers on the device.
_COMING, _GOING = range(STAGING)


class SlotState(enum.Enum):
    FREE = "free"
    KEPT = "kept"
    AHEAD = "brought to the device ahead"


_NEXT = {SlotState.FREE: SlotState.KEPT, SlotState.KEPT: SlotState.AHEAD, SlotState.AHEAD: SlotState.FREE}


class MemorySlot:
    """One place in the node's memory for one micro-batch of any of some stages."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = SlotState.FREE
        self.holds: Action | None = None

    def move(self, state: SlotState, action: Action) -> None:
        """Go to `state` because of `action`; refuses every other step than the next one of the diagram."""
        self.state = advance(self.state, state, _NEXT, f"slot {self.index} of the node's memory, holding {self.holds}", action)
        if state is not SlotState.AHEAD:
            self.holds = action if state is SlotState.KEPT else None


class PassingAcceptor(HearingAcceptor):
    """The acceptor whose host buffers are slots in its node's memory."""

    def __init__(
        self,
        stages_in_slots: Sequence[frozenset[int]],
        returns: Sequence[Key],
        transport: Passing,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        """`returns`: the stage and micro-batch of every RETURN of an iteration, in order."""
        super().__init__(stages_in_slots, transport)
        self._returns = tuple(returns)
        self._transport = transport
        self._streams = streams
        self._device = device
        self._wait = wait
        self._slots = tuple(map(MemorySlot, range(len(stages_in_slots))))
        transport.reach(self._layout)
        stages: frozenset[int] = frozenset().union(*stages_in_slots)
        self._staging = BufferLayout([stages] * STAGING)
        self._buffers = HostBuffers(self._staging, STAGING, device)
        # What is kept and was not brought back yet: its HOST and its slot. How many have gone back; and what is on the device for the next.
        self._kept: dict[Key, tuple[Action, int]] = {}
        self._num_returned = 0
        self._ahead: list[torch.Tensor] | None = None
        self._pending: list[tuple[Pending, Action, str]] = []

    @property
    def num_host_buffers(self) -> int:
        return self._staging.num_buffers

    @property
    def host_buffer_bytes(self) -> int:
        return self._buffers.nbytes

    @property
    def slots(self) -> tuple[int, int]:
        """How many there are in the node's memory, and their bytes."""
        return self._layout.num_buffers, self._layout.nbytes

    def host(self, action: Action, host_buffer: int) -> None:
        sizes, slot = self._hearing.sizes, self._slots[host_buffer]
        slot.move(SlotState.KEPT, action)
        self._layout.make_room(host_buffer, action.stage, sizes)
        self._buffers.make_room(_COMING, action.stage, sizes)
        tensors = self._on_device(_COMING, action)
        if tensors:
            with self._streams.inbound():
                self._pending.append((self._transport.host(host_buffer, tensors), action, "coming to be passed on"))
        self._kept[action.stage, action.microbatch] = action, host_buffer
        self._bring_next()

    def give_back(self, action: Action, host_buffer: int) -> None:
        self._slots[host_buffer].move(SlotState.FREE, action)
        tensors, self._ahead = self._ahead, None
        # Of all slots only that of what goes back next is ahead.
        assert tensors is not None
        assert self._returns[self._num_returned] == (action.stage, action.microbatch)
        if tensors:
            with self._streams.outbound():
                self._pending.append((self._transport.give_back(host_buffer, tensors), action, "going back"))
        self._num_returned += 1
        self._bring_next()

    def _bring_next(self) -> None:
        """Bring what goes back next to the device, if nothing is there that has still to go, and it has come at all."""
        following = self._returns[self._num_returned : self._num_returned + 1]
        if self._ahead is not None or not following or following[0] not in self._kept:
            return
        hosting, host_buffer = self._kept.pop(following[0])
        self._slots[host_buffer].move(SlotState.AHEAD, hosting)
        tensors = self._on_device(_GOING, hosting)
        if tensors:
            with self._streams.outbound():
                self._transport.bring(host_buffer, tensors)
        self._ahead = tensors

    def _on_device(self, buffer: int, action: Action) -> list[torch.Tensor]:
        return self._buffers.tensors(buffer, action.stage, self._hearing.sizes[action.stage])

    def end(self) -> None:
        pending, self._pending = self._pending, []
        for one, action, state in pending:
            self._wait(one, action, state)
        for slot in self._slots:
            if slot.state is not SlotState.FREE:
                raise TransferError(
                    f"slot {slot.index} of the node's memory still holds {slot.holds} at the end of the iteration: its RETURN is missing"
                )
        self._num_returned = 0

    def let_go(self) -> None:
        super().let_go()
        self._staging.clear()
        self._buffers = HostBuffers(self._staging, STAGING, self._device)

    def abandon(self) -> None:
        self._pending.clear()
        self._kept.clear()
        self._ahead = None
