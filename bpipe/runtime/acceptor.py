"""Host a partner's activations in preallocated slots. One of the two roles of a rank; the other is `evictor`.

In: HOST and RETURN actions with their slot. Out: slots filled and emptied. Knows the transport's protocol and no schedule.
The host never blocks here, with two exceptions: the very first HOST learns how large the partner's storages are, and a slot that is
hosted again, or returned, waits for its own last transfer [8].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bpipe.ir.action import Action
from bpipe.runtime.errors import TransferError
from bpipe.runtime.slots import HostSlot, HostSlots, State
from bpipe.runtime.streams import Streams
from bpipe.transport.base import Pending, Transport


class Acceptor:
    """The acceptor's half of every transfer of one rank."""

    def __init__(
        self,
        stages_in_slots: Sequence[frozenset[int]],
        transport: Transport,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        self._stages_in_slots = stages_in_slots
        self._transport = transport
        self._streams = streams
        self._device = device
        self._wait = wait
        self._slots: HostSlots | None = None
        self._pending: dict[int, Pending] = {}

    @property
    def num_slots(self) -> int:
        """Slots allocated, used or not."""
        return len(self._slots.slots) if self._slots else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory the slots hold, used or not."""
        return self._slots.nbytes if self._slots else 0

    def _slot(self, index: int, action: Action) -> HostSlot:
        if self._slots is None:
            try:
                sizes = self._transport.learn()
            except Exception as error:
                raise TransferError(f"{action}: the partner never said how large its activations are: {error}") from error
            self._slots = HostSlots(self._stages_in_slots, sizes, self._device)
        return self._slots.slots[index]

    def host(self, action: Action, index: int) -> None:
        """Be ready to receive into a slot."""
        slot = self._slot(index, action)
        self._settle(slot)  # [8]
        slot.move(State.FILLING, action)
        with self._streams.homeward():
            self._pending[index] = self._transport.host(index, slot.buffers(action.stage))

    def give_back(self, action: Action, index: int) -> None:
        """Send a slot's content home."""
        slot = self._slot(index, action)
        self._settle(slot)
        slot.move(State.EMPTYING, action)
        with self._streams.outward():
            self._pending[index] = self._transport.give_back(index, slot.buffers(action.stage))

    def _settle(self, slot: HostSlot) -> None:
        """Wait for the slot's transfer under way, if there is one."""
        pending = self._pending.pop(slot.index, None)
        if pending is not None and slot.holds is not None:
            action = slot.holds
            self._wait(pending, action, slot.state.value)
            slot.move(State.FULL if slot.state is State.FILLING else State.FREE, action)

    def end(self) -> None:
        """The iteration is over: every slot must be free again."""
        for slot in self._slots.slots if self._slots else ():
            self._settle(slot)
            if slot.state is not State.FREE:
                raise TransferError(f"host slot {slot.index} still holds {slot.holds} at the end of the iteration: its RETURN is missing")

    def release(self) -> None:
        """Free the slots; the next HOST learns the sizes and allocates them again."""
        self._slots = None

    def abandon(self) -> None:
        """Drop everything after an error; the run is over."""
        self._pending.clear()
