"""Say which host buffer each transfer of a simulation takes.

In: a Simulation and a rank. Out: its transfers, each with its buffer. The buffers are those of `schedule.host_buffers`, which
both ends of a pair compute from the schedule. Knows no time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.schedule.host_buffers import Residencies, all_buffers
from bpipe.simulate.report import Simulation, Timed


def with_host_buffers(simulation: Simulation, rank: int) -> Sequence[tuple[Timed, int]]:
    """Return the rank's transfers in order, with the host buffer on whichever rank hosts, or in its own host memory."""
    buffers = all_buffers(simulation.schedule, rank)
    residencies = Residencies()
    return [(timed, buffers[residencies.of(timed.action)]) for timed in simulation.transfers[rank]]
