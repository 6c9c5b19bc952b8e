"""Results of a simulation: makespan, bubbles, exposed time, and bytes over time.

A rank is busy while it computes; its span lasts from its first computation to the end of its last.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from bpipe.schedule.action import Action
from bpipe.schedule.host_buffers import Residencies, buffers_at, host_buffers, hosts_of
from bpipe.schedule.memory import changes_in_time
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Number


class Timed(NamedTuple):
    """An action and when it ran. Both ends of a transfer have the same times."""

    action: Action
    start_s: Number
    end_s: Number


class Reduced(NamedTuple):
    """Interval in which the gradients of a stage were reduced over its replicas, pauses included."""

    stage: int
    start_s: Number
    end_s: Number


class Wait(NamedTuple):
    """Seconds for which a rank waited only for balancing's transfers, and when they ended."""

    end_s: Number
    seconds: Number


class Level(NamedTuple):
    """Bytes of activations that a rank holds from `start_s` until the next level."""

    start_s: Number
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        schedule: The schedule.
        costs: Its costs.
        computations: By rank, in order.
        transfers: By rank, by start; each end of a transfer is on its rank.
        waits: By rank, waits for balancing's transfers alone.
        pipeline_s: When the last rank has computed.
        makespan_s: When gradients are reduced and weights updated, too.
        reductions: By rank, those that it had a part in.
    """

    schedule: Schedule
    costs: Costs
    computations: tuple[tuple[Timed, ...], ...]
    transfers: tuple[tuple[Timed, ...], ...]
    waits: tuple[tuple[Wait, ...], ...]
    pipeline_s: Number
    makespan_s: Number
    reductions: tuple[tuple[Reduced, ...], ...]

    @property
    def exposed_s(self) -> tuple[Number, ...]:
        """Seconds for which each rank waited only for balancing's transfers."""
        return tuple(sum(wait.seconds for wait in row) for row in self.waits)

    def busy_s(self, rank: int) -> Number:
        return sum(timed.end_s - timed.start_s for timed in self.computations[rank])

    @property
    def exposed_transfer_s(self) -> Number:
        """Seconds for which the rank that waits most for transfers waits."""
        return max(self.exposed_s)

    @property
    def bubble_of_makespan(self) -> Number:
        """Bubble over all ranks, 1 - busy / makespan: the share of the whole iteration without computation."""
        ranks = range(self.schedule.num_ranks)
        return bubble(sum(self.busy_s(rank) for rank in ranks), self.makespan_s * len(ranks))

    def levels(self, rank: int) -> tuple[Level, ...]:
        """Return the bytes of activations that the rank holds over time, its own and hosted ones."""
        return levels_of(changes_in_time((*self.computations[rank], *self.transfers[rank]), self.costs.memory))

    def peak_bytes(self, rank: int) -> int:
        """Return the most of `levels`."""
        return max((level.held_bytes for level in self.levels(rank)), default=0)


def levels_of(changes: Iterable[tuple[Number, int]]) -> tuple[Level, ...]:
    """Return the levels of held bytes from changes in the order of their times."""
    levels: list[Level] = []
    held = 0
    for time, change in changes:
        held += change
        if levels and levels[-1].start_s == time:
            levels[-1] = Level(time, held)
        else:
            levels.append(Level(time, held))
    return tuple(levels)


def bubble(busy: Number, whole: Number) -> Number:
    """Return the share of a time without computation, 1 - busy / whole; 0 if there is none."""
    if not whole:
        return 0
    return 1 - (Fraction(busy, whole) if isinstance(busy, int) and isinstance(whole, int) else busy / whole)


def with_host_buffers(simulation: Simulation, rank: int) -> list[tuple[Timed, int]]:
    """Return the rank's transfers in order, each with its host buffer (`schedule.host_buffers`), wherever that is."""
    schedule, residencies = simulation.schedule, Residencies()
    hosts = hosts_of(schedule, rank)
    by_host = {host: buffers_at(schedule, host) for host in set(hosts.values())}
    buffers = host_buffers(schedule, rank) | {residency: by_host[host][residency] for residency, host in hosts.items()}
    return [(timed, buffers[residencies.of(timed.action)]) for timed in simulation.transfers[rank]]
