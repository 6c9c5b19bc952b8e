"""Reach into host buffers without the partner's help: the two one-sided transports, which differ in whose memory they are.

In: access to the memory, and a lane of copies for each direction: out of the evictor and into it. Out: puts and gets. Knows no schedule.

    FREE --put--> HOLDING --get--> FREE

  [8] what touches a host buffer waits for what touched it last: a get for the put before it, a put for the get before it
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import torch

from bpipe.transport.base import Done, Pending, Sizes
from bpipe.transport.control import About, Control, Sent
from bpipe.transport.device import Device
from bpipe.transport.device_memory import Piece
from bpipe.transport.host_memory import Budget
from bpipe.transport.lanes import CopyLane
from bpipe.transport.layout import BufferLayout
from bpipe.transport.memory import Lender, Region, own_memory

Copy = Callable[[Iterable[Piece]], None]


class Access(Protocol):
    """How the evictor comes to the host buffers' memory."""

    def announce(self, sizes: Sizes, layout: BufferLayout) -> Pending:
        """Evictor: the host buffers are about to be used."""

    def lend(self, layout_of: Callable[[Sizes], BufferLayout]) -> int:
        """Acceptor: make the memory, if it is the acceptor's."""

    def region(self) -> Region:
        """Evictor: the host buffers' memory; blocks, the first time, until it is there."""

    def release(self) -> None:
        """Let go of it, in agreement with the partner."""

    def withdraw(self) -> None:
        """Let go of it without a message: both ends know, and the evictor goes first."""

    def abandon(self) -> None:
        """Forget it, after an error."""


class Peer:
    """The host buffers are the partner's memory: made by it once, reached by this rank from then on."""

    def __init__(self, control: Control, lender: Lender) -> None:
        self._control = control
        self._lender = lender
        self._lent: Region | None = None
        self._opened: Region | None = None
        self._announced = False
        self._told: Sent | None = None

    def announce(self, sizes: Sizes, layout: BufferLayout) -> Pending:
        # Where nothing travels no memory is made, and none is waited for.
        self._announced = layout.nbytes > 0
        return self._control.send(About.SIZES, [[stage, list(lengths)] for stage, lengths in sizes.items()])

    def lend(self, layout_of: Callable[[Sizes], BufferLayout]) -> int:
        sizes = {stage: tuple(lengths) for stage, lengths in self._control.receive(About.SIZES)}
        layout = layout_of(sizes)
        if not layout.nbytes:
            return 0
        try:
            handle, self._lent = self._lender.make(layout.nbytes)
        except Exception as error:
            # Or the partner would wait for its time-out to learn less.
            self._control.send(About.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()
            raise
        # The partner hears it with its first put, before which it may have to lend to this rank: not waited for here.
        self._told = self._control.send(About.MEMORY, handle)
        return layout.nbytes

    def region(self) -> Region:
        if self._opened is None:
            handle = self._control.receive(About.MEMORY)
            if "error" in handle:
                raise RuntimeError(f"the partner could not make the host buffers it lends: {handle['error']}")
            self._opened = self._lender.open(handle)
        return self._opened

    def release(self) -> None:
        sent = [self._told] if self._told is not None else []
        if self._announced:
            self.region().close()
            self._opened = None
            self._announced = False
            # Whoever lends to each other says it at once, and hears it only after that.
            sent.append(self._control.send(About.MEMORY, "closed"))
        if self._lent is not None:
            # CUDA leaves open what happens to memory that is freed while another process has it open.
            self._control.receive(About.MEMORY)
        for message in sent:
            message.wait()
        self._told = None
        self.withdraw()

    def withdraw(self) -> None:
        for region in self._forget():
            region.close()

    def abandon(self) -> None:
        for region in self._forget():
            region.abandon()

    def _forget(self) -> list[Region]:
        known = [region for region in (self._opened, self._lent) if region is not None]
        self._opened = self._lent = None
        return known


class Host:
    """The host buffers are this rank's own memory on the host, pinned on a machine with a GPU."""

    def __init__(self, device: Device, budget: Budget | None = None) -> None:
        """`budget` says whether there is room for this rank's buffers and its neighbours'."""
        self._device = device
        self._budget = budget
        self._region: Region | None = None

    def announce(self, sizes: Sizes, layout: BufferLayout) -> Pending:
        lacking = self._budget.of(layout.nbytes) if self._budget is not None else None
        if lacking is not None:
            raise RuntimeError(
                f"--bpipe-transport host: {lacking}. Use another (auto finds it), move less (a smaller --micro-batch-size, recomputation), "
                f"or give the job more of the host's memory"
            )
        if layout.nbytes:
            self._region = own_memory(layout.nbytes, self._device)
        return Done()

    def lend(self, layout_of: Callable[[Sizes], BufferLayout]) -> int:
        return 0

    def region(self) -> Region:
        assert self._region is not None, "announce comes before the first put"
        return self._region

    def release(self) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None

    withdraw = release

    def abandon(self) -> None:
        if self._region is not None:
            self._region.abandon()
            self._region = None


class _BufferState(enum.Enum):
    """What an evictor knows of a host buffer."""

    FREE = "free"
    HOLDING = "holding"


class Reaching:
    """The one-sided transport over access to memory."""

    one_sided: Literal[True] = True

    def __init__(self, access: Access, outbound: CopyLane, inbound: CopyLane) -> None:
        self._access = access
        self._outbound = outbound
        self._inbound = inbound
        self._layout = BufferLayout((), 0)
        self._states: dict[int, _BufferState] = {}
        self._last: dict[int, Pending] = {}

    def announce(self, sizes: Sizes, layout: BufferLayout) -> Pending:
        self._layout = layout
        return self._access.announce(sizes, layout)

    def lend(self, layout_of: Callable[[Sizes], BufferLayout]) -> int:
        return self._access.lend(layout_of)

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._move(self._outbound, host_buffer, tensors, lambda region: region.write_all, _BufferState.FREE, _BufferState.HOLDING)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._move(self._inbound, host_buffer, tensors, lambda region: region.read_all, _BufferState.HOLDING, _BufferState.FREE)

    def release(self) -> None:
        for pending in self._last.values():
            pending.wait()
        self._forget()
        self._access.release()

    def withdraw(self) -> None:
        self._forget()
        self._access.withdraw()

    def abandon(self) -> None:
        self._forget()
        self._access.abandon()

    def _forget(self) -> None:
        self._last.clear()
        self._states.clear()

    def _move(
        self,
        lane: CopyLane,
        host_buffer: int,
        tensors: Sequence[torch.Tensor],
        copy_of: Callable[[Region], Copy],
        before: _BufferState,
        afterwards: _BufferState,
    ) -> Pending:
        def copy() -> None:
            offsets = self._layout.offsets(host_buffer, (tensor.numel() for tensor in tensors))
            copy_of(self._access.region())(zip(offsets, tensors, strict=True))

        now = self._states.get(host_buffer, _BufferState.FREE)
        if now is not before:
            raise RuntimeError(
                f"host buffer {host_buffer} is {now.value}, but must be {before.value} for this transfer: the program uses it twice"
            )
        self._states[host_buffer] = afterwards
        last = self._last.get(host_buffer)
        self._last[host_buffer] = lane.run(copy, after=[last] if last is not None else [])  # [8]
        return self._last[host_buffer]
