"""Say which of its acceptor's host buffers each transfer of a simulation takes.

In: a Simulation and a rank. Out: its transfers, each with its buffer.
The buffers are those of `ir.host_buffers`, which both ends of a pair compute from the schedule. Knows no time of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bpipe.ir.action import Kind
from bpipe.ir.host_buffers import Hosting, host_buffers, hosts_of
from bpipe.simulate.report import Simulation, Timed


def with_host_buffers(simulation: Simulation, rank: int) -> Sequence[tuple[Timed, int]]:
    """The rank's transfers in order, with the host buffer on whichever rank hosts."""
    schedule = simulation.schedule
    hosts = hosts_of(schedule, rank)
    there = {host: host_buffers(schedule, host) for host in set(hosts.values())}
    buffers = host_buffers(schedule, rank) | {stay: there[host][stay] for stay, host in hosts.items()}
    stays: Counter[tuple[int, int]] = Counter()
    found = []
    for timed in simulation.transfers[rank]:
        key = (timed.action.stage, timed.action.microbatch)
        stays[key] += timed.action.kind in (Kind.EVICT, Kind.HOST)
        found.append((timed, buffers[Hosting(*key, stays[key] - 1)]))
    return found
