"""All partners of a rank: the ranks that it evicts to and those that it hosts for, each over a transport of its own.

Its own node's memory is one of those that it evicts to, under its own rank, and hosts nothing.
"""

from collections.abc import Mapping

from bpipe.runtime import TransferError
from bpipe.runtime.acceptor import Acceptor, LendingAcceptor, ReceivingAcceptor
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
from bpipe.transport.one_sided import Transport
from bpipe.transport.streams import Streams


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
