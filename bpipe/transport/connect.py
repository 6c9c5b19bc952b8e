"""Connect the pairs of a world, and choose each pair's transport by what its link measures.

A trial of a transport checks that what comes back was sent. It runs in a thread and on a stream of its own, so that the run
goes on without one that hangs.
"""

from __future__ import annotations

import functools
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from bpipe.schedule.hosts import Pair
from bpipe.transport import AUTO
from bpipe.transport.distributed import (
    Control,
    Distributed,
    Headed,
    PairGroups,
    Subject,
    abort_groups,
    destroy_groups,
    gathered,
    pair_control,
    pair_groups,
    part,
)
from bpipe.transport.host_memory import Budget, Buffers, LocalRank, memory_limits, read_link, read_text
from bpipe.transport.memory import BufferLayout, DeviceMemory, SharedMemory
from bpipe.transport.one_sided import HostMemory, Peer, Transport
from bpipe.transport.streams import CopyLane, Device, synchronize

TWO_SIDED = ("nccl", "gloo")
# A one-sided copy takes no compute unit and no time of the partner: worth a somewhat slower link.
ONE_SIDED_ADVANTAGE = 1.25


@dataclass(frozen=True)
class Location:
    """Location of a rank."""

    boot: str
    """Boot id: ranks share memory only on one boot of one machine."""

    namespace: str
    """PID namespace: ranks in different ones cannot open each other's memory."""

    host: str
    """Host name."""

    no_room: str | None = None
    """Why its buffers might not fit into the host's memory."""

    @staticmethod
    def here(no_room: str | None = None) -> Location:
        """Return this process's location."""
        unknown = f"unknown on {socket.gethostname()}"
        boot = read_text(Path("/proc/sys/kernel/random/boot_id")) or unknown
        return Location(boot, read_link(Path("/proc/self/ns/pid")) or unknown, socket.gethostname(), no_room)


@dataclass(frozen=True)
class MeasuredLink:
    """Measured link of one pair."""

    ranks: Pair

    transport: str
    """The chosen one; empty if none can be used."""

    bytes_per_s: Mapping[str, float]
    """By candidate, there and back."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """By candidate that cannot be used, why."""


def candidates(wanted: str, device_type: str) -> tuple[str, ...]:
    """Return the transports to try. Raises ValueError if the wanted one cannot reach the device's memory."""
    on_cpu = device_type == "cpu"
    # A CPU's activations are in host memory anyway, so "host" has to be asked for there.
    automatic = ("gloo", "peer") if on_cpu else ("nccl", "peer", "host")
    possible = ("gloo" if on_cpu else "nccl", "peer", "host")
    if wanted == AUTO:
        return automatic
    if wanted not in possible:
        raise ValueError(
            f"--bpipe-transport {wanted} cannot move memory of device {device_type}: use {', '.join(possible)} or auto"
        )
    return (wanted,)


def obstacle(name: str, mine: Location, theirs: Location) -> str | None:
    """Return why two ranks cannot use a transport, or None if they can."""
    if name == "host":
        return mine.no_room or theirs.no_room
    if name != "peer":
        return None
    if mine.boot != theirs.boot:
        return f"{mine.host} and {theirs.host} are different machines"
    if mine.namespace != theirs.namespace:
        return "the two processes are in different containers (process namespaces)"
    return None


def choose(bytes_per_s: Mapping[str, float]) -> str:
    """Return the fastest measured transport; one-sided ones have an advantage."""
    return max(
        bytes_per_s, key=lambda name: bytes_per_s[name] * (ONE_SIDED_ADVANTAGE if name in ("peer", "host") else 1.0)
    )


class Connection:
    """This rank's connection to its partner. The transports of all programs share its groups and lanes."""

    def __init__(
        self,
        partner: int,
        control: Control,
        groups: Mapping[str, PairGroups],
        device: Device,
        lanes: tuple[CopyLane, CopyLane],
        timeout_s: float,
    ) -> None:
        self.partner = partner
        self.control = control
        self.link: MeasuredLink | None = None
        self.budget: Budget | None = None
        self._groups = dict(groups)
        self._device = device
        self._lanes = lanes
        self.timeout_s = timeout_s

    def transport(self, name: str | None = None, differing: bool = False) -> Transport:
        """Return the transport for one program: the named one, by default the one that was chosen.

        `differing`: whether micro-batches of one stage may differ in size.
        """
        if name is None:
            assert self.link is not None
            name = self.link.transport
        if name in self._groups:
            return (Headed if differing else Distributed)(self.control, self._groups[name])
        if name in TWO_SIDED:
            raise RuntimeError(
                f"this pair has no groups for {name}: it was connected by "
                f"{self.link.transport if self.link else 'others'}"
            )
        if name == "host":
            return HostMemory(self._device, *self._lanes, self.budget)
        lender = DeviceMemory(self._device) if self._device.has_runtime else SharedMemory()
        return Peer(self.control, lender, *self._lanes)

    def settle(self, link: MeasuredLink) -> None:
        """Use this link from now on. Both ranks call it with the same one.

        A communicator takes hundreds of megabytes of a GPU, so those that were not chosen are destroyed. One that
        failed stays, aborted or not, because destroying it may never end.
        """
        self.link = link
        for name in [name for name in self._groups if name in link.bytes_per_s and name != link.transport]:
            destroy_groups(self._groups.pop(name))

    def abort(self, name: str) -> None:
        """Abort what is under way by this transport, if it is two-sided: copies by one rank cannot be aborted."""
        if name in self._groups:
            abort_groups(self._groups[name])

    def close(self) -> None:
        """End threads and process groups after a run that ended well.

        Both ranks call it, after their engines' `release`. Raises what the control group raises if the partner does not
        come within the time-out.
        """
        for lane in self._lanes:
            lane.close()
        used = self._groups if self.link is None else {self.link.transport: self._groups.get(self.link.transport)}
        # One that failed while it was tried stays: destroying it may never end.
        part(self.control, [groups for groups in used.values() if groups is not None])
        self._groups.clear()

    def abandon(self) -> None:
        """End the threads after an error without waiting. The groups stay."""
        for lane in self._lanes:
            lane.close(wait=False)


class OwnMemory:
    """This rank's connection to its own node's memory, which involves no other rank."""

    def __init__(self, device: Device, budget: Budget, timeout_s: float) -> None:
        self._device, self._budget = device, budget
        self._lanes = device.lanes(timeout_s)
        rank = dist.get_rank()
        self.link = MeasuredLink((rank, rank), "host", {"host": measure_alone(self.transport(), device)})

    def transport(self, name: str | None = None, differing: bool = False) -> Transport:
        """Return the transport for one program, which is always `host` and takes any sizes. All share the lanes."""
        way_out = "Evict less (a larger --bpipe-bound or --bpipe-memory, other --bpipe-hosts)"
        return HostMemory(self._device, *self._lanes, self._budget, "--bpipe-hosts", way_out)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def abandon(self) -> None:
        for lane in self._lanes:
            lane.close(wait=False)


def connect_own(buffers: Buffers, timeout_s: float, device: Device) -> tuple[OwnMemory | None, list[MeasuredLink]]:
    """Return this rank's connection to its node's memory, None if it has no `buffers` to keep there; and every such
    rank's link, on all ranks.

    Collective over the world: what all ranks of a node keep there has to fit together.
    """
    everyone = _neighbours(buffers)
    own = OwnMemory(device, Budget(everyone[dist.get_rank()], everyone), timeout_s) if buffers.count else None
    return own, _all_links([] if own is None else [own.link])


def connect(
    pairs: Sequence[Pair], wanted: str, timeout_s: float, device: Device, buffers: Buffers | None = None
) -> tuple[Connection | None, list[MeasuredLink]]:
    """Connect pairs if no rank is in several of them; arguments as of `connect_all`.

    Return this rank's connection, None if it is in no pair, and the measured links.
    """
    connections, links = connect_all(pairs, wanted, timeout_s, device, buffers)
    if len(connections) > 1:
        raise ValueError(
            f"rank {dist.get_rank()} is in several pairs (with ranks {', '.join(map(str, connections))}): use "
            "connect_all"
        )
    return next(iter(connections.values()), None), links


def connect_all(
    pairs: Sequence[Pair],
    wanted: str,
    timeout_s: float,
    device: Device,
    buffers: Buffers | None = None,
    own_memory: bool = False,
) -> tuple[dict[int, Connection], list[MeasuredLink]]:
    """Connect all pairs. Collective over the world.

    Args:
        pairs: (low, high) global ranks, equal on every rank: the world makes the groups together, and two ranks that
            are in several pairs come to those in one order.
        wanted: A transport, or "auto" for the best of those that can be used.
        timeout_s: Seconds after which a transfer or a message fails.
        device: This rank's.
        buffers: What this rank would keep in the host's memory.
        own_memory: Whether `buffers` are for what goes to no other rank, so that no pair uses the host's memory.

    Returns:
        This rank's connections by the other's rank, ascending; and every pair's link, the same on all ranks.

    Raises:
        ValueError: For a transport that cannot be used on this device.
        RuntimeError: On every rank alike, if a pair has no transport.
    """
    names = tuple(name for name in candidates(wanted, device.device.type) if not (own_memory and name == "host"))
    rank = dist.get_rank()
    everyone = _neighbours(buffers or Buffers())
    connections: dict[int, Connection] = {}
    for low, high in sorted(pairs):
        control = pair_control(low, high, timeout_s)
        groups = {name: pair_groups(low, high, name, timeout_s) for name in names if name in TWO_SIDED}
        if control is not None:
            partner = high if rank == low else low
            own = {name: pair for name, pair in groups.items() if pair is not None}
            connections[partner] = Connection(partner, control, own, device, device.lanes(timeout_s), timeout_s)
    connections = dict(sorted(connections.items()))
    # Host memory that was asked for is used if what is really needed fits, which is known once an iteration has run. It
    # is chosen automatically only if it fits in any case.
    here = Location.here(Budget(everyone[rank], everyone).at_most() if wanted == AUTO else None)
    links = _all_links([_find_link(connection, names, rank, device, here) for connection in connections.values()])
    _refuse_without_transport(links, connections.values())
    on_host = {rank for link in links if link.transport == "host" for rank in link.ranks}
    budget = Budget(everyone[rank], [other for number, other in enumerate(everyone) if number in on_host])
    for partner, connection in connections.items():
        connection.settle(next(link for link in links if set(link.ranks) == {rank, partner}))
        connection.budget = budget
    return connections, links


def _neighbours(buffers: Buffers) -> list[LocalRank]:
    """Return what each rank would keep in its host's memory and the limits on that. Collective over the world."""
    return gathered(LocalRank(buffers, memory_limits()))


def _all_links(mine: list[MeasuredLink]) -> list[MeasuredLink]:
    """Return every pair's link once. Collective over the world."""
    # Both ranks of a pair have the same link.
    links: dict[Pair, MeasuredLink] = {link.ranks: link for of_rank in gathered(mine) for link in of_rank}
    return [links[ranks] for ranks in sorted(links)]


def _refuse_without_transport(links: Sequence[MeasuredLink], connections: Iterable[Connection]) -> None:
    lines = [
        f"ranks {link.ranks[0]} and {link.ranks[1]}: {name}: {why}"
        for link in links
        if not link.transport
        for name, why in link.refused.items()
    ]
    if lines:
        for connection in connections:
            connection.abandon()
        raise RuntimeError("no transport connects every pair of ranks, see --bpipe-transport:\n  " + "\n  ".join(lines))


def _find_link(connection: Connection, names: Sequence[str], rank: int, device: Device, mine: Location) -> MeasuredLink:
    """Try every candidate with the partner and agree on one, the same on both ranks."""
    partner = connection.partner
    ranks = min(rank, partner), max(rank, partner)
    theirs = Location(**connection.control.exchange(Subject.FACTS, asdict(mine)))
    measured: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in names:
        why = obstacle(name, mine, theirs)
        if why is None:
            ends = connection.transport(name), connection.control, device, rank < partner
            speed, why = measure(*ends, connection.timeout_s / 2, functools.partial(connection.abort, name))
            if why is None:
                measured[name] = speed
        if why is not None:
            refused[name] = why
    # The lower rank has held the clock, so its choice counts.
    link = {"transport": choose(measured) if measured else "", "bytes_per_s": measured, "refused": refused}
    theirs_link = connection.control.exchange(Subject.PROBE, link)
    return MeasuredLink(ranks, **(link if rank < partner else theirs_link))


# Ten times what a latency-bound message takes on the slowest link here, a few milliseconds on the fastest.
PROBE_BYTES = 16 << 20
PROBES = 4
# Seconds that an aborted trial may take to end before nobody waits for it any more.
GRACE_S = 10.0


def measure(
    transport: Transport, control: Control, device: Device, evictor: bool, within_s: float, abort: Callable[[], None]
) -> tuple[float, str | None]:
    """Return the link's bytes per second there and back, or why it cannot be used. Both ranks call it.

    Args:
        transport: What to try.
        control: The pair's channel for agreeing on the outcome.
        device: This rank's device.
        evictor: Whether this rank evicts; the lower rank does.
        within_s: Time limit in seconds, shorter than that of a watchdog that ends the process.
        abort: Ends the transport's pending operations.
    """
    seconds: list[float] = []
    errors: list[str] = []

    def trial() -> None:
        try:
            with device.apart():
                seconds.extend(_rounds(transport, device, evictor))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    # A thread of its own: a communicator that is never made blocks its caller, and a copy that never comes the stream. A
    # daemon: one that hangs must not hold up the end of the process.
    thread = threading.Thread(target=trial, name="bpipe-probe", daemon=True)
    thread.start()
    thread.join(within_s)
    hangs = thread.is_alive()
    if hangs:
        abort()
        thread.join(GRACE_S)
    late = f"nothing arrived within {within_s:g} s (half of --bpipe-timeout)"
    why = late if hangs else next(iter(errors), None)
    # What the trial allocated is in the pool of its own stream, where nobody would use it again.
    device.empty_cache()
    # The first also connects, allocates and touches pages.
    speed = 0.0 if why else 2 * PROBE_BYTES / statistics.median(seconds[1:])
    other = control.exchange(Subject.PROBE, why)
    if not why and not other:
        transport.release()
        return speed, None
    # Another transport takes over and needs the memory, which is freed only once nobody has it open.
    if evictor:
        transport.withdraw()
    control.exchange(Subject.PROBE, None)
    if not evictor:
        transport.withdraw()
    return speed, why or other


def measure_alone(transport: Transport, device: Device) -> float:
    """Return the bytes per second of a transport into this rank's own memory. Raises what the transport raises."""
    seconds = _rounds(transport, device, evictor=True)
    transport.release()
    return 2 * PROBE_BYTES / statistics.median(seconds[1:])


def _rounds(transport: Transport, device: Device, evictor: bool) -> list[float]:
    """Return the seconds of every round there and back. Raises RuntimeError if other bytes come back."""
    buffer = torch.arange(PROBE_BYTES // 8, device=device.device).view(torch.uint8)
    back = torch.zeros_like(buffer)
    # One host buffer for one tensor.
    layout = BufferLayout.of([(0,)], {0: (PROBE_BYTES,)})
    if evictor:
        if transport.one_sided:
            transport.reach(layout)
        transport.announce({0: (PROBE_BYTES,)}).wait()
    else:
        transport.learn()
        if transport.one_sided and transport.lends:
            transport.lend(layout.nbytes)
    seconds = []
    for _ in range(PROBES):
        begin = time.perf_counter()
        if evictor:
            transport.put(0, [buffer]).wait()
            transport.get(0, [back]).wait()
        elif not transport.one_sided:
            transport.host(0, [back]).wait()
            transport.give_back(0, [back]).wait()
        synchronize(device.device)
        seconds.append(time.perf_counter() - begin)
    if evictor and not torch.equal(buffer, back):
        raise RuntimeError("received data differs from the data sent")
    return seconds
