"""The prediction of one configuration: time, MFU, bubble, memory, transfers, of the schedule that would run."""

from dataclasses import dataclass
from fractions import Fraction

from bpipe.build import built, unchecked
from bpipe.plan.timing import Timing, steady_timing, whole_timing
from bpipe.predict.activations import keeps_own
from bpipe.predict.costs import predict_costs
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.layout import Setup
from bpipe.predict.memory import RankMemory, predict_memory
from bpipe.predict.profile import Profile
from bpipe.predict.tensor_parallel import Exposed, exposed
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import num_transfers
from bpipe.simulate.cost import Costs
from bpipe.simulate.engine import simulate
from bpipe.simulate.report import Simulation

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
