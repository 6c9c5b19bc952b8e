"""Hold what a rank has to do with others: those it sends to, and those it hosts for, each over a transport of its own.

Its own node's memory is one of those it sends to, under its own rank, and hosts nothing for anybody.

In: a schedule, a rank, and its transports. Out: one evictor and one acceptor, which pass on what concerns one of
several, and whatever has to be done with all of them in one order. Starts no transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bpipe.runtime.acceptor import Acceptor, LendingAcceptor, ReceivingAcceptor
from bpipe.runtime.capture import Claims
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.errors import TransferError
from bpipe.runtime.evictor import Evictor, Wait
from bpipe.runtime.multi_host import SeveralGuests, SeveralHosts
from bpipe.runtime.retention import Kept
from bpipe.runtime.streams import Streams
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
from bpipe.transport.base import Transport


@dataclass(frozen=True)
class _Partner:
    """Both roles with one other rank."""

    evictor: Evictor
    acceptor: Acceptor
    transport: Transport


class Partners:
    """One rank's, by their ranks, ascending: what waits for both ends is done with one after the other, in one order
    on all ranks."""

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
        """`wait` waits for a transfer and names it in errors; `kept` collects what stays.

        Raises ValueError for transfers that there is no transport for.
        """
        self._rank_of, self._rank, self._config = schedule.layout.rank_of, rank, config
        hosts, guests = hosts_of(schedule, rank), guests_of(schedule, rank)
        self._host_of = _only_hosts(hosts, config.name)
        self._transports = _by_rank(schedule, rank, transports)
        others = sorted({*guests, *(host.rank for host in hosts.values())})
        if any(other not in self._transports for other in others):
            raise ValueError(
                f"{config.name}: the schedule has transfers for rank {rank}, but there is no transport for them"
            )
        here, there = (
            host_buffers(schedule, rank),
            {host.rank: buffers_at(schedule, host) for host in set(hosts.values())},
        )
        # By residency, here or elsewhere: its host buffer.
        self.buffer_of = {**here, **{residency: there[host.rank][residency] for residency, host in hosts.items()}}
        # By what is hosted here: of how many of its rank's stages it has told the sizes by then.
        self.told_by = {
            residency: count
            for guest in guests
            for residency, count in num_measured(schedule, guest, Host(rank)).items()
        }
        self._partners: dict[int, _Partner] = {}
        if streams is not None:
            claims = Claims()
            for other in others or self._transports:
                link = self._end(other) + (f" over {config.links[other]}" if other in config.links else "")
                transport = self._transports[other]
                sent, hosted = self._buffers_for(rank, there.get(other, {})), self._buffers_for(other, here)
                evictor = Evictor(sent, transport, streams, config, wait=wait, kept=kept, claims=claims, link=link)
                acceptor: Acceptor
                if transport.one_sided:
                    acceptor = LendingAcceptor(hosted, transport)
                else:
                    acceptor = ReceivingAcceptor(hosted, transport, streams, config.device, wait)
                self._partners[other] = _Partner(evictor, acceptor, transport)

    def _buffers_for(self, guest: int, hosted: Mapping[Residency, int]) -> tuple[frozenset[int], ...]:
        """Of a rank's host buffers those for one guest; others hold nothing of its."""
        return stages_in_buffers(
            {
                residency: buffer
                for residency, buffer in hosted.items()
                if self._rank_of(residency.stage, residency.microbatch) == guest
            }
        )

    @property
    def evictor(self) -> Evictor | SeveralHosts | None:
        """The evictor of this rank; None where it evicts nothing."""
        evictors = {other: partner.evictor for other, partner in self._partners.items()}
        return SeveralHosts(evictors, self._host_of) if len(evictors) > 1 else next(iter(evictors.values()), None)

    @property
    def acceptor(self) -> Acceptor | SeveralGuests | None:
        acceptors = {other: partner.acceptor for other, partner in self._partners.items()}
        return SeveralGuests(acceptors, self._rank_of) if len(acceptors) > 1 else next(iter(acceptors.values()), None)

    def partner_of(self, action: Action) -> int:
        """Return the rank at the other end of a transfer: this one, where it has none."""
        key = action.key
        return self._host_of[key] if action.kind in (Kind.EVICT, Kind.LOAD) else self._rank_of(*key)

    def named(self, action: Action) -> str:
        """Return the other end of a transfer, for errors."""
        return self._end(self.partner_of(action))

    def _end(self, other: int) -> str:
        return "its own node's memory" if other == self._rank else f"stage {other}"

    @property
    def own_memory(self) -> tuple[int, int]:
        """How many host buffers this rank has in its own node's memory, and their bytes."""
        own = self._partners.get(self._rank)
        return (0, 0) if own is None else own.evictor.host_buffers

    @property
    def lent_bytes(self) -> int:
        """Bytes of host buffers that other ranks reach into by themselves: on a device its allocator does not count
        them."""
        return sum(
            partner.acceptor.host_buffer_bytes for partner in self._partners.values() if partner.transport.one_sided
        )

    def sees(self, action: Action) -> bool:
        """Return whether this rank has to write it down: with a one-sided transport a host sees nothing of its host
        buffers' transfers."""
        return action.kind in (Kind.EVICT, Kind.LOAD) or (
            action.kind in TRANSFER and not self._transports[self.partner_of(action)].one_sided
        )

    def gather(self, first: Action) -> None:
        """Allocate host buffers anew as one piece, where they grew before all sizes were known or have become too
        small.

        Both ends know all sizes alike now. `first`: what the iteration computes first, named in errors.
        """
        for other, partner in self._partners.items():
            grown = self._config.transfers.differing and self._grown(other, partner, first)
            if grown or partner.evictor.is_scattered or partner.acceptor.is_scattered:
                partner.evictor.let_go()
                partner.acceptor.let_go()
                partner.transport.release()

    def _grown(self, other: int, partner: _Partner, first: Action) -> bool:
        """Return whether the rooms on either end have to be larger. Each tells the other before it listens."""
        try:
            here = partner.evictor.tell_growth(first)
            there = partner.acceptor.hear_growth()
        except Exception as error:
            raise TransferError(
                f"{self._config.name}, stage {self._rank}: at the start of an iteration stage {other} did not send "
                f"the sizes of its transfers; the time-out is {self._config.transfers.timeout_s:g} s, --bpipe-timeout: {error}"
            ) from error
        return here or there

    def release(self) -> None:
        """Give the host buffers back."""
        for partner in self._partners.values():
            for role in (partner.evictor, partner.acceptor, partner.transport):
                role.release()

    def abandon(self) -> None:
        for partner in self._partners.values():
            for role in (partner.evictor, partner.acceptor, partner.transport):
                role.abandon()


def _by_rank(
    schedule: Schedule, rank: int, transports: Transport | Mapping[int, Transport] | None
) -> Mapping[int, Transport]:
    if transports is None or isinstance(transports, Mapping):
        return dict(sorted((transports or {}).items()))
    return {schedule.partners[rank] if schedule.partners else rank: transports}


def _only_hosts(hosts: Mapping[Residency, Host], name: str) -> dict[Key, int]:
    """Return the rank whose memory takes it, by stage and micro-batch. Raises ValueError where one leaves for
    several."""
    found: dict[Key, int] = {}
    for residency, host in hosts.items():
        before = found.setdefault(residency.key, host.rank)
        if before != host.rank:
            what = (
                f"micro-batch {residency.microbatch} of stage {residency.stage} is evicted both to rank {before} and "
                f"to rank {host.rank} in one iteration"
            )
            raise ValueError(f"{name}: {what}: evict it to only one of them")
    return found
