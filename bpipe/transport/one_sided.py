"""The two one-sided transports, which reach into host buffers without the partner's help: its memory, or one's own.

  FREE --put--> HOLDING --get--> FREE

[8] what touches a host buffer waits for what touched it last: a get for the put before it, a put for the get before it
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch

from bpipe.transport.distributed import Control, Distributed, Subject, Works
from bpipe.transport.host_memory import Budget
from bpipe.transport.memory import BufferLayout, Lender, Region, Sizes, own_memory
from bpipe.transport.streams import CopyLane, Device, Done, Pending


class OneSidedCopies(ABC):
    """A one-sided transport, with a lane of copies for each direction."""

    one_sided: Literal[True] = True
    # Whether the host buffers are the acceptor's memory. If they are not, the acceptor does nothing.
    lends: bool

    def __init__(self, outbound: CopyLane, inbound: CopyLane) -> None:
        self._outbound = outbound
        self._inbound = inbound
        self._layout = BufferLayout(())
        self._num_pieces = 0
        # Host buffers that hold a micro-batch, and what touched each buffer last.
        self._full: set[int] = set()
        self._last: dict[int, Pending] = {}

    def reach(self, layout: BufferLayout) -> None:
        """Set the layout of the host buffers, on the evictor and before anything else.

        It grows before the put that needs it to.
        """
        self._layout = layout

    @abstractmethod
    def announce(self, sizes: Sizes) -> Pending:
        """Announce the lengths of a micro-batch's tensors, on the evictor, once for each stage before its first put."""

    @abstractmethod
    def learn(self) -> dict[int, tuple[int, ...]]:
        """Return the evictor's next announcement, on an acceptor that lends. Blocks until it is there."""

    @abstractmethod
    def lend(self, nbytes: int) -> None:
        """Make the next piece of the layout, on an acceptor that lends.

        Does not wait for the partner, unless it fails.
        """

    def grow(self) -> None:
        """Follow the layout's growth, on the evictor. An acceptor lends the same whether anything is put or not."""
        for nbytes in self._layout.pieces[self._num_pieces :]:
            self._add(nbytes)
            self._num_pieces += 1

    @abstractmethod
    def _add(self, nbytes: int) -> None:
        """Prepare to use a next piece, on the evictor."""

    @abstractmethod
    def _region(self, piece: int) -> Region:
        """Return a piece, on the evictor. Blocks, the first time, until it is there."""

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Copy the tensors into the host buffer. They must not change or be freed before the wait."""
        self.grow()
        return self._copy(host_buffer, tensors, fills=True)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Pending:
        """Copy the host buffer into the tensors. They must not be read before the wait."""
        return self._copy(host_buffer, tensors, fills=False)

    def _copy(self, host_buffer: int, tensors: Sequence[torch.Tensor], fills: bool) -> Pending:
        if (host_buffer in self._full) == fills:
            now, needed = ("holding", "free") if fills else ("free", "holding")
            raise RuntimeError(
                f"host buffer {host_buffer} is {now}, but must be {needed} for this transfer: the program uses it twice"
            )
        # The layout may grow before the copy is made.
        piece, offsets = self._layout.place(host_buffer, (tensor.numel() for tensor in tensors))

        def copy() -> None:
            region = self._region(piece)
            (region.write if fills else region.read)(zip(offsets, tensors, strict=True))

        (self._full.add if fills else self._full.discard)(host_buffer)
        lane, last = self._outbound if fills else self._inbound, self._last.get(host_buffer)
        self._last[host_buffer] = lane.run(copy, after=[] if last is None else [last])  # [8]
        return self._last[host_buffer]

    def forget_order(self) -> None:
        """Forget what touched the buffers last, before and after a capture, on the evictor.

        What is captured cannot wait for what ran before it, which is over. Replays run one after the other.
        """
        self._last.clear()

    def release(self) -> None:
        """Give the host buffers back, because another program takes over or the run is over. Both ends call it."""
        for pending in self._last.values():
            pending.wait()
        self._agree()
        self.withdraw()

    @abstractmethod
    def _agree(self) -> None:
        """Wait until neither end has the other's memory open."""

    def withdraw(self) -> None:
        """Let go after a trial that failed. Both ends call it, the evictor first, and each knows when the other has."""
        for region in self._forget():
            region.close()

    def abandon(self) -> None:
        """Drop every reference after the run, or after a failed transfer.

        It does not wait for the partner or the device, and frees nothing that either may still reach.
        """
        for region in self._forget():
            region.abandon()

    def _forget(self) -> list[Region]:
        """Drop all state, and return the regions that were in use."""
        self._num_pieces = 0
        self._last.clear()
        self._full.clear()
        return self._take_regions()

    @abstractmethod
    def _take_regions(self) -> list[Region]: ...


class Peer(OneSidedCopies):
    """The host buffers are the partner's memory: made by it, one piece after the other, and opened by this rank."""

    lends = True

    def __init__(self, control: Control, lender: Lender, outbound: CopyLane, inbound: CopyLane) -> None:
        super().__init__(outbound, inbound)
        self._control = control
        self._lender = lender
        self._lent: list[Region] = []
        self._opened: list[Region] = []
        self._sent: list[Works] = []

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
        # The partner receives it with the put that needs it, before which it may have to lend to this rank: not waited
        # for here.
        self._sent.append(self._control.send(Subject.MEMORY, handle))

    def _add(self, nbytes: int) -> None:
        """Do nothing: the partner makes the piece."""

    def _region(self, piece: int) -> Region:
        while len(self._opened) <= piece:
            handle = self._control.receive(Subject.MEMORY)
            if "error" in handle:
                raise RuntimeError(f"the partner could not allocate the host buffers that it lends: {handle['error']}")
            self._opened.append(self._lender.open(handle))
        return self._opened[piece]

    def _agree(self) -> None:
        sent, self._sent = self._sent, []
        if self._num_pieces:
            for piece in range(self._num_pieces):
                self._region(piece).close()
            self._opened.clear()
            # Two ranks that lend to each other both send this at once, and receive only after that.
            sent.append(self._control.send(Subject.MEMORY, "closed"))
        if self._lent:
            # CUDA leaves open what happens to memory that is freed while another process has it open.
            self._control.receive(Subject.MEMORY)
        for message in sent:
            message.wait()

    def _take_regions(self) -> list[Region]:
        regions = [*self._opened, *self._lent]
        self._opened, self._lent = [], []
        return regions


class HostMemory(OneSidedCopies):
    """The host buffers are this rank's own memory on the host, pinned on a machine with a GPU.

    Args:
        device: The device that copies.
        outbound: Lane of puts.
        inbound: Lane of gets.
        budget: Whether there is room for this rank's buffers and its neighbours'; None: unlimited.
        wanted: The flag that asked for them, in the refusal.
        way_out: What else to do, in the refusal.
    """

    lends = False

    def __init__(
        self,
        device: Device,
        outbound: CopyLane,
        inbound: CopyLane,
        budget: Budget | None = None,
        wanted: str = "--bpipe-transport host",
        way_out: str = "Use another transport (auto finds one)",
    ) -> None:
        super().__init__(outbound, inbound)
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

    def _add(self, nbytes: int) -> None:
        lacking = self._budget.of(self._nbytes + nbytes, self) if self._budget is not None else None
        if lacking is not None:
            wanted, way_out = self._refusal
            raise RuntimeError(
                f"{wanted}: {lacking}. {way_out}, save less per micro-batch (a smaller --micro-batch-size, "
                "recomputation), or give the job more CPU memory"
            )
        self._regions.append(own_memory(nbytes, self._device))
        self._nbytes += nbytes

    def _region(self, piece: int) -> Region:
        return self._regions[piece]

    def _agree(self) -> None:
        """Do nothing: no other rank has this memory open."""

    def _take_regions(self) -> list[Region]:
        regions, self._regions, self._nbytes = self._regions, [], 0
        if self._budget is not None:
            self._budget.let_go(self)
        return regions


Transport = Distributed | OneSidedCopies
