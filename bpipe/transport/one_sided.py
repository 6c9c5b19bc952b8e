"""The two one-sided transports, which reach into host buffers without the partner's help: its memory, or one's own.

  FREE --put--> HOLDING --get--> FREE

[8] what touches a host buffer waits for what touched it last: a get for the put before it, a put for the get before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from bpipe.transport.base import Done, Pending
from bpipe.transport.control import Control, Subject, Works
from bpipe.transport.device_memory import Device
from bpipe.transport.host_memory import Budget
from bpipe.transport.lanes import CopyLane
from bpipe.transport.layout import BufferLayout, Sizes
from bpipe.transport.memory import Lender, Region, own_memory


class Peer:
    """The host buffers are the partner's memory: made by it, one piece after the other, and opened by this rank."""

    lends = True

    def __init__(self, control: Control, lender: Lender) -> None:
        self._control = control
        self._lender = lender
        self._lent: list[Region] = []
        self._opened: list[Region] = []
        self._num_pieces = 0
        self._sent: list[Works] = []

    def announce(self, sizes: Sizes) -> Pending:
        return self._control.send(Subject.SIZES, [[stage, list(lengths)] for stage, lengths in sizes.items()])

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(lengths) for stage, lengths in self._control.receive(Subject.SIZES)}

    def lend(self, nbytes: int) -> None:
        """Make the next piece, on the acceptor."""
        try:
            handle, region = self._lender.make(nbytes)
        except Exception as error:
            # Or the partner would wait for its time-out to learn less.
            self._control.send(Subject.MEMORY, {"error": f"{type(error).__name__}: {error}"}).wait()
            raise
        self._lent.append(region)
        # The partner receives it with the put that needs it, before which it may have to lend to this rank: not waited
        # for here.
        self._sent.append(self._control.send(Subject.MEMORY, handle))

    def grow(self, nbytes: int) -> None:
        """Prepare to use a next piece, on the evictor."""
        self._num_pieces += 1

    def region(self, piece: int) -> Region:
        """Return that piece, on the evictor. Blocks, the first time, until it is there."""
        while len(self._opened) <= piece:
            handle = self._control.receive(Subject.MEMORY)
            if "error" in handle:
                raise RuntimeError(f"the partner could not allocate the host buffers that it lends: {handle['error']}")
            self._opened.append(self._lender.open(handle))
        return self._opened[piece]

    def release(self) -> None:
        """Let go of all pieces, in agreement with the partner."""
        sent, self._sent = self._sent, []
        if self._num_pieces:
            for piece in range(self._num_pieces):
                self.region(piece).close()
            self._opened.clear()
            # Two ranks that lend to each other both send this at once, and receive only after that.
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
        regions = [*self._opened, *self._lent]
        self._opened, self._lent, self._num_pieces = [], [], 0
        return regions


class HostMemory:
    """The host buffers are this rank's own memory on the host, pinned on a machine with a GPU.

    Args:
        device: The device that copies.
        budget: Whether there is room for this rank's buffers and its neighbours'; None: unlimited.
        wanted: The flag that asked for them, in the refusal.
        way_out: What else to do, in the refusal.
    """

    lends = False

    def __init__(
        self,
        device: Device,
        budget: Budget | None = None,
        wanted: str = "--bpipe-transport host",
        way_out: str = "Use another transport (auto finds one)",
    ) -> None:
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
        regions, self._regions, self._nbytes = self._regions, [], 0
        if self._budget is not None:
            self._budget.let_go(self)
        return regions


class OneSidedCopies:
    """The one-sided transport over access to memory, with a lane of copies for each direction."""

    one_sided: Literal[True] = True

    def __init__(self, access: Peer | HostMemory, outbound: CopyLane, inbound: CopyLane) -> None:
        self._access = access
        self._outbound = outbound
        self._inbound = inbound
        self._layout = BufferLayout(())
        self._num_pieces = 0
        # Host buffers that hold a micro-batch, and what touched each buffer last.
        self._full: set[int] = set()
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

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        self.grow()
        return self._copy(host_buffer, tensors, fills=True)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._copy(host_buffer, tensors, fills=False)

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
        self._full.clear()

    def _copy(self, host_buffer: int, tensors: Sequence[torch.Tensor], fills: bool) -> Pending:
        if (host_buffer in self._full) == fills:
            now, needed = ("holding", "free") if fills else ("free", "holding")
            raise RuntimeError(
                f"host buffer {host_buffer} is {now}, but must be {needed} for this transfer: the program uses it twice"
            )
        # The layout may grow before the copy is made.
        piece, offsets = self._layout.place(host_buffer, (tensor.numel() for tensor in tensors))

        def copy() -> None:
            region = self._access.region(piece)
            (region.write if fills else region.read)(zip(offsets, tensors, strict=True))

        (self._full.add if fills else self._full.discard)(host_buffer)
        lane, last = self._outbound if fills else self._inbound, self._last.get(host_buffer)
        self._last[host_buffer] = lane.run(copy, after=[] if last is None else [last])  # [8]
        return self._last[host_buffer]
