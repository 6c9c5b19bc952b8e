"""Iteration times of many micro-batches, extrapolated from the first ones.

In: a Setup and its costs. Out: `Timing`.

A few micro-batches are all simulated. Of many, only enough are simulated to show a repetition: in the middle of every
rank's order, two steps in a row compute the same for other micro-batches, each computation later by the same seconds.
Every further step then adds these seconds. If nothing repeats, about twice as many are simulated, and so on; if nothing
ever repeats, the last increase is extrapolated. Memory is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from bpipe.balance.budget import BudgetTooSmall
from bpipe.build import unchecked
from bpipe.predict.layout import Setup
from bpipe.schedule.action import of_microbatch
from bpipe.schedule.families.families import FAMILIES
from bpipe.simulate.cost import Costs, Number
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation, Timed, bubble

# A relative difference below this is due to rounding.
_ROUNDED = 1e-9
# Ranks ahead of the slowest may never repeat exactly: it is enough that steps add the same time within this share.
_EVEN = 1e-3
# Steps simulated beyond those that fill the pipeline, until some repeat. After the last number, times are extrapolated
# anyway.
_FURTHER = (1, 3, 7, 15, 31)
# Nothing repeats in a family whose ranks hold ever more, but each step adds the same time from the first on.
_WITHOUT_END = (4, 5)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one iteration, or that a step adds to it."""

    iteration_s: float
    pipeline_s: float
    busy_s: float
    """Computing, over all ranks."""
    exposed_s: tuple[float, ...]
    """Waiting for transfers, by rank."""
    simulated: int
    """Micro-batches that were simulated; the rest is extrapolated."""

    @property
    def bubble_of_makespan(self) -> float:
        return float(bubble(self.busy_s, len(self.exposed_s) * self.iteration_s))

    @property
    def bubble_of_pipeline(self) -> float:
        """Bubble of the pipeline over all ranks, 1 - computing / pipeline, without reduction and update."""
        return 1 - (1 - self.bubble_of_makespan) * self.iteration_s / self.pipeline_s

    def plus(self, step: Timing, times: float) -> Timing:
        """Return these seconds plus `times` those of a step."""
        return Timing(
            self.iteration_s + times * step.iteration_s,
            self.pipeline_s + times * step.pipeline_s,
            self.busy_s + times * step.busy_s,
            tuple(total + times * part for total, part in zip(self.exposed_s, step.exposed_s, strict=True)),
            self.simulated,
        )


def whole_timing(simulation: Simulation) -> Timing:
    ranks = range(simulation.schedule.num_ranks)
    return Timing(
        float(simulation.makespan_s),
        float(simulation.pipeline_s),
        float(sum(simulation.busy_s(rank) for rank in ranks)),
        tuple(float(seconds) for seconds in simulation.exposed_s),
        simulation.schedule.num_whole_microbatches,
    )


def steady_timing(setup: Setup, costs: Costs) -> Timing:
    """Return the timing of all micro-batches of a setup."""
    timing = timing_within(setup, costs, inf)
    assert timing is not None, "nothing takes longer than for ever"
    return timing


def timing_within(setup: Setup, costs: Costs, most_s: float) -> Timing | None:
    """Return the timing, or None if the first micro-batches show that it is longer than `most_s`.

    In the steady phase no micro-batch adds less than the busiest rank computes for it.
    """
    m, step = setup.num_microbatches, setup.stride
    simulated: list[Timing] = []
    for count in _counts(setup):
        if count + step >= m:
            return _whole(setup, costs)
        try:
            simulation = simulate(unchecked(setup.program(count)), costs)
        except BudgetTooSmall:
            # Room that is planned for all micro-batches may be too small for the order of fewer.
            return _whole(setup, costs)
        latest, added = whole_timing(simulation), _repeated(simulation, step)
        if added is not None:
            return latest.plus(added, (m - count) // step)
        busiest_s = max(float(simulation.busy_s(rank)) for rank in range(setup.pipeline)) / count
        # A time equal to `most_s` may be rounded to either side of it.
        # Passes of shards overlap, so with them a step may add less than all that a rank computes.
        least_s = (latest.iteration_s + (m - count) * busiest_s) * (1 - _ROUNDED)
        if least_s > most_s and not setup.is_sharded:
            return None
        simulated.append(latest)
        if _adds_evenly(simulated[-3:]):
            break
    less, latest = simulated[-2:]
    return latest.plus(_added(less, latest), m - latest.simulated)


def _adds_evenly(timings: Sequence[Timing]) -> bool:
    """Whether a micro-batch adds as much from the second to the third timing as from the first to the second."""
    if len(timings) < 3:
        return False
    before, now = ((added.iteration_s, *added.exposed_s) for added in map(_added, timings, timings[1:]))
    return all(abs(later - earlier) <= _EVEN * now[0] for earlier, later in zip(before, now, strict=True))


def _added(less: Timing, more: Timing) -> Timing:
    """Return what each further micro-batch adds."""
    zero = Timing(0.0, 0.0, 0.0, (0.0,) * len(more.exposed_s), 0)
    return zero.plus(more.plus(less, -1), 1 / (more.simulated - less.simulated))


def _whole(setup: Setup, costs: Costs) -> Timing:
    return whole_timing(simulate(unchecked(setup.program()), costs))


def _counts(setup: Setup) -> Iterator[int]:
    """Yield numbers of micro-batches to simulate, each fewer than all by whole steps.

    All slices of a micro-batch run forward before the first runs backward, which takes two micro-batches more.
    """
    step, fill = setup.stride, FAMILIES[setup.schedule].fill
    further = 0 if setup.slices == 1 else -(-2 // step)
    for steps in _WITHOUT_END if fill is None else (fill + number for number in _FURTHER):
        yield (steps + further) * step + setup.num_microbatches % step


def _repeated(simulation: Simulation, step: int) -> Timing | None:
    """Return what a step adds; None unless every rank repeats one in its middle, with its transfers."""
    number = step * simulation.schedule.layout.slices
    added = None
    busy, exposed = 0.0, []
    for rank, row in enumerate(simulation.computations):
        length = len(row) * step // simulation.schedule.num_whole_microbatches
        first = (len(row) - 2 * length) // 2
        if first < 0 or not length:
            return None
        first_step, second_step = row[first : first + length], row[first + length : first + 2 * length]
        begins = first_step[0].start_s
        added = second_step[0].start_s - begins if added is None else added
        transfers = simulation.transfers[rank]
        first_moves, second_moves = _within(transfers, begins, added), _within(transfers, begins + added, added)
        if not (
            _is_later(first_step, second_step, number, added) and _is_later(first_moves, second_moves, number, added)
        ):
            return None
        busy += sum(float(timed.end_s - timed.start_s) for timed in first_step)
        exposed.append(
            sum(float(wait.seconds) for wait in simulation.waits[rank] if begins < wait.end_s <= begins + added)
        )
    assert added is not None
    seconds = float(added)
    return Timing(seconds, seconds, busy, tuple(exposed), step)


def _within(row: Sequence[Timed], begins: Number, seconds: Number) -> list[Timed]:
    return [timed for timed in row if begins <= timed.start_s < begins + seconds]


def _is_later(first: Sequence[Timed], second: Sequence[Timed], step: int, seconds: Number) -> bool:
    """Whether the second row has the first's actions for later micro-batches, all later by the same seconds."""
    rounded = _ROUNDED * float(seconds)
    return len(first) == len(second) and all(
        abs(float(later.start_s - earlier.start_s - seconds)) <= rounded
        and later.action == of_microbatch(earlier.action, earlier.action.microbatch + step)
        for earlier, later in zip(first, second, strict=True)
    )
