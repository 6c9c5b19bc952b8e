"""All partners of a rank: the ranks that it evicts to and those that it hosts for, each over a transport of its own.

Its own node's memory is one of those that it evicts to, under its own rank, and hosts nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from bpipe.runtime.acceptor import Acceptor, LendingAcceptor, ReceivingAcceptor
from bpipe.runtime.capture import Claims
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.errors import TransferError
from bpipe.runtime.evictor import Evictor, Wait
from bpipe.runtime.graph import Pieces
from bpipe.runtime.retention import Kept
from bpipe.runtime.sizing import Sizing, Unmoved, together
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
        self._transports = _by_rank(schedule, rank, transports)
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
        # What exceeded the bound at once, over all evictors.
        self._passed = Unmoved()
        # Both roles of this rank, by the other's.
        self.evictors: dict[int, Evictor] = {}
        self.acceptors: dict[int, Acceptor] = {}
        if streams is not None:
            claims = Claims()
            for other in others or self._transports:
                link = self._end(other) + (f" over {config.links[other]}" if other in config.links else "")
                transport = self._transports[other]
                sent, hosted = self._buffers_for(rank, elsewhere.get(other, {})), self._buffers_for(other, here)
                self.evictors[other] = Evictor(
                    sent, transport, streams, config, wait=wait, kept=kept, claims=claims, link=link
                )
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

    @property
    def sizing(self) -> Sizing | None:
        """Sizes of all evictors together; None without partners. Each evictor has buffers of its own with its host."""
        sizings = [evictor.sizing for evictor in self.evictors.values()]
        return together(sizings, self._passed) if sizings else None

    def sees(self, action: Action) -> bool:
        """Whether this rank records it: with a one-sided transport a host does not see the transfers of its buffers."""
        return action.kind in (Kind.EVICT, Kind.LOAD) or (
            action.kind in TRANSFER and not self._transports[self.partner_of(action)].one_sided
        )

    def begin(self) -> None:
        self._passed = Unmoved()
        for evictor in self.evictors.values():
            evictor.begin()

    def remember(
        self,
        forward: Action,
        graph: Pieces,
        inputs: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """Remember a finished forward whose activations will leave, or show how large they are."""
        for host, evictor in self.evictors.items():
            if evictor.unmeasured(forward.stage) or self._host_of.get(forward.key) == host:
                evictor.remember(forward, graph, inputs, outputs)

    def measure(self, forward: Action) -> None:
        """Tell each host the sizes of the stages that come to it, and of no other: it listens for no more.

        Called after a stage's first forward at once: the partner may wait for it, and this rank then for the partner.
        """
        for host, evictor in self.evictors.items():
            if evictor.unmeasured(forward.stage):
                evictor.measure(forward)
                if self._host_of.get(forward.key) != host:
                    evictor.forget(forward)

    def start(self, action: Action, residency: Residency) -> None:
        """Start a transfer."""
        buffer, partner = self.buffer_of[residency], self.partner_of(action)
        if action.kind is Kind.EVICT:
            self.evictors[partner].evict(action, buffer)
        elif action.kind is Kind.LOAD:
            self.evictors[partner].load(action, buffer)
        elif action.kind is Kind.HOST:
            self.acceptors[partner].hear(self._num_announced[residency])
            self.acceptors[partner].host(action, buffer)
        else:
            self.acceptors[partner].give_back(action, buffer)

    def finish_evictions(self) -> None:
        for evictor in self.evictors.values():
            evictor.finish_evictions()

    def finish_load(self, backward: Action) -> None:
        for evictor in self.evictors.values():
            evictor.finish_load(backward)

    def finish_all(self) -> None:
        for evictor in self.evictors.values():
            evictor.finish_all()

    def computes(self) -> None:
        """Note that a computation begins next to everything that is here."""
        sizings = (evictor.sizing for evictor in self.evictors.values())
        self._passed = self._passed.with_here([nbytes for sizing in sizings for nbytes in sizing.at_home])

    def end(self) -> None:
        for evictor in self.evictors.values():
            evictor.end()
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
        for other, evictor, acceptor, transport in self._roles():
            grown = self._config.transfers.differing and self._grown(other, first)
            if grown or evictor.is_scattered or acceptor.is_scattered:
                evictor.let_go()
                acceptor.let_go()
                transport.release()

    def _roles(self) -> list[tuple[int, Evictor, Acceptor, Transport]]:
        return [
            (other, self.evictors[other], self.acceptors[other], self._transports[other]) for other in self.evictors
        ]

    def _grown(self, other: int, first: Action) -> bool:
        """Whether the rooms on either end have to be larger. Each tells the other before it listens."""
        try:
            evicts_more = self.evictors[other].tell_growth(first)
            hosts_more = self.acceptors[other].hear_growth()
        except Exception as error:
            raise TransferError(
                f"{self._config.name}, stage {self._rank}: at the start of an iteration stage {other} did not send "
                f"the sizes of its transfers; the time-out is {self._config.transfers.timeout_s:g} s, --bpipe-timeout: {error}"
            ) from error
        return evicts_more or hosts_more

    def release(self) -> None:
        """Give the host buffers back."""
        for _, evictor, acceptor, transport in self._roles():
            for role in (evictor, acceptor, transport):
                role.release()

    def abandon(self) -> None:
        """Drop everything after an error."""
        for _, evictor, acceptor, transport in self._roles():
            for role in (evictor, acceptor, transport):
                role.abandon()


def _by_rank(
    schedule: Schedule, rank: int, transports: Transport | Mapping[int, Transport] | None
) -> Mapping[int, Transport]:
    if transports is None or isinstance(transports, Mapping):
        return dict(sorted((transports or {}).items()))
    return {schedule.partners[rank] if schedule.partners else rank: transports}


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
