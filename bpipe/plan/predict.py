"""The prediction of one configuration: time, MFU, bubble, memory, transfers, of the schedule that would run.

Times of many micro-batches are extrapolated. Only enough are simulated to show a repetition: in the middle of every
rank's order, two steps in a row compute the same for other micro-batches, each computation later by the same seconds.
Every further step then adds these seconds. If nothing repeats, about twice as many are simulated, and so on; if nothing
ever repeats, the last increase is extrapolated. Memory is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from bpipe.balance.budget import BudgetTooSmall
from bpipe.build import built, unchecked
from bpipe.predict.activations import keeps_own
from bpipe.predict.costs import predict_costs
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import Exposed, exposed
from bpipe.predict.memory import RankMemory, predict_memory
from bpipe.predict.profile import Profile
from bpipe.schedule.action import of_microbatch
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import num_transfers
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
    busy_s: float
    """Computing, over all ranks."""
    exposed_s: tuple[float, ...]
    """Waiting for transfers, by rank."""
    simulated: int
    """Micro-batches that were simulated; the rest is extrapolated."""

    @property
    def bubble_of_makespan(self) -> float:
        return float(bubble(self.busy_s, len(self.exposed_s) * self.iteration_s))

    def plus(self, step: Timing, times: float) -> Timing:
        """Return these seconds plus `times` those of a step."""
        return Timing(
            self.iteration_s + times * step.iteration_s,
            self.busy_s + times * step.busy_s,
            tuple(total + times * part for total, part in zip(self.exposed_s, step.exposed_s, strict=True)),
            self.simulated,
        )


def whole_timing(simulation: Simulation) -> Timing:
    ranks = range(simulation.schedule.num_ranks)
    return Timing(
        float(simulation.makespan_s),
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
    zero = Timing(0.0, 0.0, (0.0,) * len(more.exposed_s), 0)
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
    return Timing(seconds, busy, tuple(exposed), step)


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


# Evictions of this many forwards take a second to count. For more, those of these numbers of steps are counted.
_FORWARDS_ASKED = 100_000
_STEPS_ASKED = (6, 18)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration with its prediction, and what else is known about it."""

    setup: Setup
    mfu: float
    timing: Timing
    memory: tuple[RankMemory, ...]
    """Of every rank."""
    transfers: tuple[int, ...]
    """Evictions of every rank in an iteration."""
    name: str = ""
    """What the command calls it: `launch`, `stock` or `bpipe` in an answer, the change in a list of changes."""
    unbalanced_bytes: int | None = None
    """What its fullest rank would need without balancing, if it fits only balanced."""
    refused: tuple[str, ...] = ()
    """The trainer's reasons against it."""
    is_guarded: bool = False
    """Whether the trainer takes it and checks it as it runs."""
    flags: str = ""
    """What launches it, in words."""

    @property
    def iteration_s(self) -> float:
        return float(self.timing.iteration_s)

    @property
    def range_s(self) -> list[float] | None:
        """Seconds between which a run is likely to take; None if no run of its kind is known."""
        bars = self.setup.error_bars
        return None if bars is None else list(bars.range_s(self.iteration_s))

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest rank."""
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def limit_bytes(self) -> int:
        """Bytes that a device may hold."""
        return self.memory[0].limit_bytes

    @property
    def fits(self) -> bool:
        return all(rank.fits for rank in self.memory)

    @property
    def can_run(self) -> bool:
        """Whether it fits and the trainer takes it."""
        return self.fits and not self.refused

    @property
    def is_tight(self) -> bool:
        """Whether it can run, but a device is so full that the allocator may have to free and allocate again."""
        return self.can_run and any(rank.is_tight for rank in self.memory)

    @property
    def state(self) -> str:
        """What prevents it or makes it doubtful, in words."""
        states = {
            "refused by the trainer": bool(self.refused),
            "guarded": self.is_guarded,
            "tight": self.is_tight,
            "does not fit": not self.fits,
        }
        return ", ".join(words for words, holds in states.items() if holds)


def costs_of(setup: Setup, profile: Profile | None = None) -> Costs:
    """Return costs of a setup: a profile's values as measured, predicted ones scaled by the cluster's factor."""
    costs = predict_costs(setup)
    if profile is None:
        return costs
    return profile.apply(setup, costs, Exposed(*(setup.time_factor * seconds for seconds in exposed(setup))))


def simulation_of(setup: Setup, profile: Profile | None = None) -> Simulation:
    """Return the simulation of every micro-batch."""
    return simulate(built(setup.program()), costs_of(setup, profile))


def predict(
    setup: Setup,
    profile: Profile | None = None,
    simulation: Simulation | None = None,
    timing: Timing | None = None,
) -> Candidate:
    """Predict everything about one setup, from a `simulation` of all micro-batches, a known `timing`, or the steady
    phase."""
    costs = costs_of(setup, profile) if simulation is None else simulation.costs
    if timing is None:
        timing = steady_timing(setup, costs) if simulation is None else whole_timing(simulation)
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, setup.padded_vocabulary)
    count = setup.cluster.num_devices
    return Candidate(
        setup=setup,
        mfu=mfu(flops, timing.iteration_s, count, setup.peak_flops_per_s),
        timing=timing,
        memory=predict_memory(setup),
        transfers=_num_evictions(setup),
    )


def _num_evictions(setup: Setup) -> tuple[int, ...]:
    """Return each rank's evictions per iteration, extrapolated for many forwards: transfers and computations have
    different periods."""
    has_fill = FAMILIES[setup.schedule].fill is not None
    if setup.balance is None or not (has_fill or setup.activation_budget is not None or keeps_own(setup)):
        return (0,) * setup.pipeline

    def count(microbatches: int | None = None) -> list[int]:
        schedule = unchecked(setup.program(microbatches))
        return [num_transfers(schedule, rank).evictions for rank in range(setup.pipeline)]

    m, step = setup.num_microbatches, setup.stride
    few, many = (steps * step + m % step for steps in _STEPS_ASKED)
    are_few = m <= many or m * setup.slices * setup.num_stages <= _FORWARDS_ASKED
    if are_few or not has_fill or setup.activation_budget is not None:
        return tuple(count())
    ratio = Fraction(m - few, many - few)
    return tuple(less + int(ratio * (more - less)) for less, more in zip(count(few), count(many), strict=True))
