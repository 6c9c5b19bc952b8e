"""All partners of a rank: the ranks that it evicts to and those that it hosts for, each over a transport of its own.

Its own node's memory is one of those that it evicts to, under its own rank, and hosts nothing.

In the acceptor's role a rank hosts a partner's activations in host buffers. (The other role is `evictor`.) A buffer that is
hosted again, or returned, waits for its own last transfer [8], and on a device it does so next to the computation: no forward
or backward of this rank waits for a buffer. At the end of the iteration compute's stream waits for all of them, because they
may be given back then. The host blocks only where a HOST has to learn the sizes of the partner's next stage, and on a CPU,
where every wait is the host's. It never waits for a stage that the partner computes only later: that could need this very
rank. If the evictor reaches into the buffers by itself, an acceptor only learns sizes and lends the memory.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from bpipe.runtime import RuntimeFault, TransferError
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.evictor import Evictor, Wait
from bpipe.runtime.retention import Kept
from bpipe.schedule.action import TRANSFER, Action, Key, Kind
from bpipe.schedule.host_buffers import (
    Residency,
    buffers_at,
    guests_of,
    host_buffers,
    hosts_of,
    num_measured,
    stages_in_buffers,
)
from bpipe.schedule.hosts import Host
from bpipe.schedule.schedule import Schedule
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


class Partners:
    """The partners of one rank, by their ranks, ascending: what waits for both ends is done with one after the other,
    in one order on all ranks.

    `transports` are to the only partner, or by the partner's rank; `streams` are None if nothing moves. `wait` waits for
    a transfer and names it in errors; `kept` collects what stays. Raises ValueError for transfers without a transport.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        transports: Transport | Mapping[int, Transport] | None,
        config: EngineConfig,
        streams: Streams | None,
        *,
        wait: Wait,
        kept: Kept,
    ) -> None:
        self._rank_of, self._rank, self._config = schedule.layout.rank_of, rank, config
        hosts, guests = hosts_of(schedule, rank), guests_of(schedule, rank)
        self._host_of = _only_hosts(hosts, config.name)
        if transports is not None and not isinstance(transports, Mapping):
            transports = {schedule.partners[rank] if schedule.partners else rank: transports}
        self._transports = dict(sorted((transports or {}).items()))
        others = sorted({*guests, *(host.rank for host in hosts.values())})
        if any(other not in self._transports for other in others):
            raise ValueError(
                f"{config.name}: the schedule has transfers for rank {rank}, but there is no transport for them"
            )
        here = host_buffers(schedule, rank)
        elsewhere = {host.rank: buffers_at(schedule, host) for host in set(hosts.values())}
        # By residency, here or elsewhere: its host buffer.
        self.buffer_of = {**here, **{residency: elsewhere[host.rank][residency] for residency, host in hosts.items()}}
        # By residency here: the number of its rank's stages whose sizes have been announced by then.
        self._num_announced = {
            residency: count
            for guest in guests
            for residency, count in num_measured(schedule, guest, Host(rank)).items()
        }
        # Both roles of this rank; that of the acceptor by the evictor's rank.
        self.evictor = Evictor(self._host_of, streams, config, wait, kept)
        self.acceptors: dict[int, Acceptor] = {}
        if streams is None:
            return
        for other in others or self._transports:
            link = self._end(other) + (f" over {config.links[other]}" if other in config.links else "")
            transport = self._transports[other]
            self.evictor.add_host(other, self._buffers_for(rank, elsewhere.get(other, {})), transport, link)
            hosted = self._buffers_for(other, here)
            if transport.one_sided:
                self.acceptors[other] = LendingAcceptor(hosted, transport)
            else:
                self.acceptors[other] = ReceivingAcceptor(hosted, transport, streams, config.device, wait)

    def _buffers_for(self, guest: int, hosted: Mapping[Residency, int]) -> tuple[frozenset[int], ...]:
        """Return for each host buffer the stages of one guest that it hosts."""
        return stages_in_buffers(
            {
                residency: buffer
                for residency, buffer in hosted.items()
                if self._rank_of(residency.stage, residency.microbatch) == guest
            }
        )

    def partner_of(self, action: Action) -> int:
        """Return the rank at the other end of a transfer: this one, if it has none."""
        key = action.key
        return self._host_of[key] if action.kind in (Kind.EVICT, Kind.LOAD) else self._rank_of(*key)

    def named(self, action: Action) -> str:
        """Return the other end of a transfer, for errors."""
        return self._end(self.partner_of(action))

    def _end(self, other: int) -> str:
        return "its own node's memory" if other == self._rank else f"stage {other}"

    def sees(self, action: Action) -> bool:
        """Whether this rank records it: with a one-sided transport a host does not see the transfers of its buffers."""
        return action.kind in (Kind.EVICT, Kind.LOAD) or (
            action.kind in TRANSFER and not self._transports[self.partner_of(action)].one_sided
        )

    def start(self, action: Action, residency: Residency) -> None:
        """Start a transfer."""
        buffer = self.buffer_of[residency]
        if action.kind is Kind.EVICT:
            self.evictor.evict(action, buffer)
        elif action.kind is Kind.LOAD:
            self.evictor.load(action, buffer)
        else:
            acceptor = self.acceptors[self.partner_of(action)]
            if action.kind is Kind.HOST:
                acceptor.hear(self._num_announced[residency])
                acceptor.host(action, buffer)
            else:
                acceptor.give_back(action, buffer)

    def end(self) -> None:
        """End an iteration."""
        self.evictor.end()
        for acceptor in self.acceptors.values():
            acceptor.end()

    def forget_order(self) -> None:
        """Forget what touched the host buffers last, before and after a capture."""
        for transport in self._transports.values():
            if transport.one_sided:
                transport.forget_order()

    def gather(self, first: Action) -> None:
        """Allocate host buffers anew as one piece if they grew before all sizes were known or have become too small.

        Both ends know the same sizes now. `first`: what the iteration computes first, named in errors.
        """
        evictor, differing = self.evictor, self._config.transfers.differing
        grown = evictor.sizing.grow() if differing else {}
        for other, acceptor in self.acceptors.items():
            is_larger = differing and self._grown(other, grown, first)
            if is_larger or evictor.is_scattered(other) or acceptor.is_scattered:
                evictor.let_go(other)
                acceptor.let_go()
                self._transports[other].release()

    def _grown(self, other: int, grown: Mapping[int, tuple[int, ...]], first: Action) -> bool:
        """Whether the rooms on either end have to be larger. Each tells the other before it listens."""
        try:
            evicts_more = self.evictor.tell_growth(other, grown, first)
            hosts_more = self.acceptors[other].hear_growth()
        except Exception as error:
            raise TransferError(
                f"{self._config.name}, stage {self._rank}: at the start of an iteration stage {other} did not send "
                f"the sizes of its transfers; the time-out is {self._config.transfers.timeout_s:g} s, --bpipe-timeout: {error}"
            ) from error
        return evicts_more or hosts_more

    def release(self) -> None:
        """Give the host buffers back."""
        self.evictor.release()
        for other, acceptor in self.acceptors.items():
            acceptor.release()
            self._transports[other].release()

    def abandon(self) -> None:
        """Drop everything after an error."""
        self.evictor.abandon()
        for other, acceptor in self.acceptors.items():
            acceptor.abandon()
            self._transports[other].abandon()


def _only_hosts(hosts: Mapping[Residency, Host], name: str) -> dict[Key, int]:
    """Return the rank that hosts each micro-batch, by stage and number. Raises ValueError if one leaves for several."""
    host_of: dict[Key, int] = {}
    for residency, host in hosts.items():
        before = host_of.setdefault(residency.key, host.rank)
        if before != host.rank:
            raise ValueError(
                f"{name}: micro-batch {residency.microbatch} of stage {residency.stage} is evicted both to rank "
                f"{before} and to rank {host.rank} in one iteration: evict it to only one of them"
            )
    return host_of
