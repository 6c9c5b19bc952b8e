"""Reach into host buffers without the partner's help: the two one-sided transports, which differ in whose memory they
are.

In: access to the memory, and a lane of copies for each direction: out of the evictor and into it. Out: puts and gets.
Knows no schedule.

    FREE --put--> HOLDING --get--> FREE

  [8] what touches a host buffer waits for what touched it last: a get for the put before it, a put for the get before it
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import torch

from bpipe.transport.base import Done, Pending
from bpipe.transport.control import Control, SentMessage, Subject
from bpipe.transport.device import Device
from bpipe.transport.device_memory import Piece
from bpipe.transport.host_memory import Budget
from bpipe.transport.lanes import CopyLane
from bpipe.transport.layout import BufferLayout, Sizes
from bpipe.transport.memory import Lender, Region, own_memory

Copy = Callable[[Iterable[Piece]], None]


class HostBufferAccess(Protocol):
    """Access of the evictor to the host buffers' memory, one piece after the other."""

    lends: bool

    def announce(self, sizes: Sizes) -> Pending:
        """Announce sizes, on the evictor."""

    def learn(self) -> dict[int, tuple[int, ...]]:
        """Return what the evictor announced, on an acceptor that owns the memory."""

    def lend(self, nbytes: int) -> None:
        """Make the next piece, on an acceptor that owns the memory."""

    def grow(self, nbytes: int) -> None:
        """Prepare to use a next piece, on the evictor."""

    def region(self, piece: int) -> Region:
        """Return that piece, on the evictor; block, the first time, until it is there."""

    def release(self) -> None:
        """Let go of all pieces, in agreement with the partner."""

    def withdraw(self) -> None:
        """Let go of them without a message: both ends know, and the evictor goes first."""

    def abandon(self) -> None:
        """Forget them, after an error."""


class Peer:
    """The host buffers are the partner's memory: made by it, reached by this rank from then on."""

    lends = True

    def __init__(self, control: Control, lender: Lender) -> None:
        self._control = control
        self._lender = lender
        self._lent: list[Region] = []
        self._opened: list[Region] = []
        self._num_pieces = 0
        self._told: list[SentMessage] = []

    def announce(self, sizes: Sizes) -> Pending:
        return self._control.send(Subject.SIZES, [[stage, list(lengths)] for stage, lengths in sizes.items()])

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(lengths) for stage, lengths in self._control.receive(Subject.SIZES)}

    def lend(self, nbytes: int) -> None:
        try:
            handle, region = self._lender.make(nbytes)
        except Exception as error:
            # Or the partner would wait for its time-out to learn less.
            self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()
            raise
        self._lent.append(region)
        # The partner hears it with the put that needs it, before which it may have to lend to this rank: not waited for
        # here.
        self._told.append(self._control.send(Subject.MEMORY, handle))

    def grow(self, nbytes: int) -> None:
        self._num_pieces += 1

    def region(self, piece: int) -> Region:
        while len(self._opened) <= piece:
            handle = self._control.receive(Subject.MEMORY)
            if "error" in handle:
                raise RuntimeError(f"the partner could not allocate the host buffers that it lends: {handle['error']}")
            self._opened.append(self._lender.open(handle))
        return self._opened[piece]

    def release(self) -> None:
        sent, self._told = self._told, []
        if self._num_pieces:
            for piece in range(self._num_pieces):
                self.region(piece).close()
            self._opened.clear()
            # Whoever lends to each other says it at once, and hears it only after that.
            sent.append(self._control.send(Subject.MEMORY, "closed"))
        if self._lent:
            # CUDA leaves open what happens to memory that is freed while another process has it open.
            self._control.receive(Subject.MEMORY)
        for message in sent:
            message.wait()
        self.withdraw()

    def withdraw(self) -> None:
        for region in self._forget():
            region.close()

    def abandon(self) -> None:
        for region in self._forget():
            region.abandon()

    def _forget(self) -> list[Region]:
        known = [*self._opened, *self._lent]
        self._opened, self._lent, self._num_pieces = [], [], 0
        return known


_TRANSPORT, _ANOTHER = "--bpipe-transport host", "Use another transport (auto finds one)"


class HostMemory:
    """The host buffers are this rank's own memory on the host, pinned on a machine with a GPU."""

    lends = False

    def __init__(
        self, device: Device, budget: Budget | None = None, wanted: str = _TRANSPORT, way_out: str = _ANOTHER
    ) -> None:
        """`budget` says whether there is room for this rank's buffers and its neighbours'. `wanted`, `way_out`: in
        its refusal."""
        self._device = device
        self._budget = budget
        self._refusal = wanted, way_out
        self._regions: list[Region] = []
        self._nbytes = 0

    def announce(self, sizes: Sizes) -> Pending:
        return Done()

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {}

    def lend(self, nbytes: int) -> None:
        raise AssertionError("the host buffers are the evictor's own memory")

    def grow(self, nbytes: int) -> None:
        lacking = self._budget.of(self._nbytes + nbytes, self) if self._budget is not None else None
        if lacking is not None:
            wanted, way_out = self._refusal
            raise RuntimeError(
                f"{wanted}: {lacking}. {way_out}, save less per micro-batch (a smaller --micro-batch-size, "
                "recomputation), or give the job more CPU memory"
            )
        self._regions.append(own_memory(nbytes, self._device))
        self._nbytes += nbytes

    def region(self, piece: int) -> Region:
        return self._regions[piece]

    def release(self) -> None:
        for region in self._forget():
            region.close()

    withdraw = release

    def abandon(self) -> None:
        for region in self._forget():
            region.abandon()

    def _forget(self) -> list[Region]:
        known, self._regions, self._nbytes = self._regions, [], 0
        if self._budget is not None:
            self._budget.let_go(self)
        return known


class _BufferState(enum.Enum):
    """What an evictor knows of a host buffer."""

    FREE = "free"
    HOLDING = "holding"


class OneSidedCopies:
    """The one-sided transport over access to memory."""

    one_sided: Literal[True] = True

    def __init__(self, access: HostBufferAccess, outbound: CopyLane, inbound: CopyLane) -> None:
        self._access = access
        self._outbound = outbound
        self._inbound = inbound
        self._layout = BufferLayout(())
        self._num_pieces = 0
        self._states: dict[int, _BufferState] = {}
        self._last: dict[int, Pending] = {}

    @property
    def lends(self) -> bool:
        return self._access.lends

    def reach(self, layout: BufferLayout) -> None:
        self._layout = layout

    def announce(self, sizes: Sizes) -> Pending:
        return self._access.announce(sizes)

    def learn(self) -> dict[int, tuple[int, ...]]:
        return self._access.learn()

    def lend(self, nbytes: int) -> None:
        self._access.lend(nbytes)

    def grow(self) -> None:
        for nbytes in self._layout.pieces[self._num_pieces :]:
            self._access.grow(nbytes)
            self._num_pieces += 1

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor], after: Sequence[Pending] = ()) -> Pending:
        """Put tensors into a host buffer.

        `after`: what else has to be over first, such as what fills the tensors; if that fails, so does this.
        """
        self.grow()
        states = _BufferState.FREE, _BufferState.HOLDING
        return self._move(self._outbound, host_buffer, tensors, lambda region: region.write_all, *states, after)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._move(
            self._inbound, host_buffer, tensors, lambda region: region.read_all, _BufferState.HOLDING, _BufferState.FREE
        )

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
        self._num_pieces = 0
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
        after: Sequence[Pending] = (),
    ) -> Pending:
        now = self._states.get(host_buffer, _BufferState.FREE)
        if now is not before:
            raise RuntimeError(
                f"host buffer {host_buffer} is {now.value}, but must be {before.value} for this transfer: the program "
                f"uses it twice"
            )
        # The layout may grow before the copy is made.
        piece, offsets = self._layout.place(host_buffer, (tensor.numel() for tensor in tensors))

        def copy() -> None:
            copy_of(self._access.region(piece))(zip(offsets, tensors, strict=True))

        self._states[host_buffer] = afterwards
        last = self._last.get(host_buffer)
        self._last[host_buffer] = lane.run(copy, after=[*after, *([last] if last is not None else [])])  # [8]
        return self._last[host_buffer]
