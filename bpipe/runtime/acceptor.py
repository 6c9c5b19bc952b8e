"""The acceptor's role of a rank: host a partner's activations in host buffers. The other role is `evictor`.

A buffer that is hosted again, or returned, waits for its own last transfer [8], and on a device it does so next to the
computation: no forward or backward of this rank waits for a buffer. At the end of the iteration compute's stream waits
for all of them, because they may be given back then. The host blocks only where a HOST has to learn the sizes of the
partner's next stage, and on a CPU, where every wait is the host's. It never waits for a stage that the partner computes
only later: that could need this very rank. If the evictor reaches into the buffers by itself, an acceptor only learns
sizes and lends the memory.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from bpipe.runtime import RuntimeFault, TransferError
from bpipe.schedule.action import Action, Kind
from bpipe.transport.distributed import Distributed
from bpipe.transport.memory import BufferLayout
from bpipe.transport.one_sided import OneSidedCopies, Transport
from bpipe.transport.streams import Done, Pending, Streams


class Acceptor:
    """The acceptor's half of all transfers with one partner: learns the sizes of what comes and lays out where it goes.

    `stages_in_buffers` are, for each host buffer, the partner's stages that it hosts.
    """

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: Transport) -> None:
        self._layout = BufferLayout(stages_in_buffers)
        self._learn = transport.learn
        # Lengths of a micro-batch's storages, by the partner's stage, in the order announced.
        self._sizes: dict[int, tuple[int, ...]] = {}

    @property
    def num_host_buffers(self) -> int:
        """Number of host buffers allocated on this rank, used or not."""
        return self._layout.num_buffers

    @property
    def host_buffer_bytes(self) -> int:
        """Bytes of the host buffers, used or not."""
        return self._layout.nbytes

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        """Bytes of one micro-batch that come, by the partner's stage; empty if this rank takes no part in that."""
        return {stage: sum(lengths) for stage, lengths in self._sizes.items()}

    @property
    def is_scattered(self) -> bool:
        """Whether the host buffers are in several pieces of memory, some of which may not be used any longer."""
        return len(self._layout.pieces) > 1

    def hear(self, num_stages: int) -> None:
        """Learn the sizes of this many of the partner's stages, before a HOST. Blocks until they are here."""
        while len(self._sizes) < num_stages:
            self._sizes |= self._learn()

    def hear_growth(self) -> bool:
        """Return whether buffers have to grow, between two iterations, if sizes differ.

        Blocks until the partner begins this iteration, for which it needs nothing of this rank.
        """
        if not self._sizes:
            return False
        grown = self._learn()
        self._sizes |= grown
        return bool(grown)

    def host(self, action: Action, host_buffer: int) -> None:
        """Begin to fill a host buffer."""
        raise NotImplementedError

    def give_back(self, action: Action, host_buffer: int) -> None:
        """Begin to empty a host buffer, unless the evictor copies by itself."""

    def end(self) -> None:
        """End the iteration: every host buffer must be free again. A one-sided evictor keeps them apart by itself."""

    def let_go(self) -> None:
        """Free the host buffers. The next HOST allocates them again, for all sizes that are known."""
        self._layout.clear()

    def release(self) -> None:
        """Free them and forget the sizes. The next HOST learns them anew."""
        self.let_go()
        self._sizes.clear()

    def abandon(self) -> None:
        """Drop every transfer after an error; the run is over."""


class LendingAcceptor(Acceptor):
    """Lends memory to an evictor that does the rest by itself, or does nothing if the evictor uses its own."""

    def __init__(self, stages_in_buffers: Sequence[frozenset[int]], transport: OneSidedCopies) -> None:
        super().__init__(stages_in_buffers, transport)
        self._transport = transport

    @property
    def moved_bytes(self) -> Mapping[int, int]:
        return {}

    def hear(self, num_stages: int) -> None:
        if self._transport.lends:
            super().hear(num_stages)

    def host(self, action: Action, host_buffer: int) -> None:
        nbytes = self._layout.make_room(host_buffer, action.stage, self._sizes) if self._transport.lends else 0
        if nbytes:
            self._transport.lend(nbytes)


class ReceivingAcceptor(Acceptor):
    """Receives into its host buffers and sends them back. `wait` waits for a transfer and names it in errors."""

    def __init__(
        self,
        stages_in_buffers: Sequence[frozenset[int]],
        transport: Distributed,
        streams: Streams,
        device: torch.device,
        wait: Callable[[Pending, Action, str], None],
    ) -> None:
        super().__init__(stages_in_buffers, transport)
        self._transport, self._streams, self._device, self._wait = transport, streams, device, wait
        # By host buffer: the micro-batch that it holds, and the transfer under way.
        self._hosted: dict[int, Action] = {}
        self._pending: dict[int, tuple[Action, Pending]] = {}
        # Pieces that were outgrown stay: only the first iteration grows, and its end frees everything.
        self._pieces: list[torch.Tensor] = []
        # By buffer and stage, the memory of its storages.
        self._tensors: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def host_buffer_bytes(self) -> int:
        return sum(piece.untyped_storage().nbytes() for piece in self._pieces)

    def host(self, action: Action, host_buffer: int) -> None:
        nbytes = self._layout.make_room(host_buffer, action.stage, self._sizes)
        if nbytes:
            self._pieces.append(torch.empty(nbytes, dtype=torch.uint8, device=self._device))
            self._tensors.clear()
        with self._streams.inbound():
            self._settle(host_buffer)  # [8]
            if host_buffer in self._hosted:
                raise RuntimeFault(f"{action}: host buffer {host_buffer} still holds {self._hosted[host_buffer]}")
            self._hosted[host_buffer] = action
            tensors = self._memory_for(action, host_buffer)
            pending = self._transport.host(host_buffer, tensors) if tensors else Done()
            self._pending[host_buffer] = action, pending

    def give_back(self, action: Action, host_buffer: int) -> None:
        with self._streams.outbound():
            self._settle(host_buffer)
            hosted = self._hosted.pop(host_buffer, None)
            if hosted is None or hosted.key != action.key:
                raise RuntimeFault(f"{action}: host buffer {host_buffer} holds {hosted or 'nothing'}")
            tensors = self._memory_for(action, host_buffer)
            pending = self._transport.give_back(host_buffer, tensors) if tensors else Done()
            self._pending[host_buffer] = action, pending

    def _memory_for(self, action: Action, host_buffer: int) -> list[torch.Tensor]:
        """Return uint8 tensors over the buffer's memory, as long as the storages of the action's stage."""
        if host_buffer in self._pending:
            raise RuntimeFault(f"{action}: host buffer {host_buffer} has a transfer under way; is a wait missing?")
        key, lengths = (host_buffer, action.stage), self._sizes[action.stage]
        if key not in self._tensors:
            piece, offsets = self._layout.place(host_buffer, lengths) if lengths else (0, [])
            self._tensors[key] = [self._pieces[piece].narrow(0, *part) for part in zip(offsets, lengths, strict=True)]
        return self._tensors[key]

    def _settle(self, host_buffer: int) -> None:
        """Wait for the buffer's transfer under way, if there is one."""
        if host_buffer in self._pending:
            action, pending = self._pending.pop(host_buffer)
            self._wait(pending, action, "filling" if action.kind is Kind.HOST else "emptying")

    def end(self) -> None:
        for host_buffer in sorted(self._pending):
            self._settle(host_buffer)
        for host_buffer, action in self._hosted.items():
            raise TransferError(
                f"host buffer {host_buffer} still holds {action} at the end of the iteration: its RETURN is missing"
            )

    def let_go(self) -> None:
        super().let_go()
        self._pieces.clear()
        self._tensors.clear()

    def abandon(self) -> None:
        self._pending.clear()
