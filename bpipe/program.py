"""Build the schedule a configuration asks for: the one door. In: a `ProgramConfig`. Out: a checked Schedule.

The command, the planner and the trainer's hooks all ask here, so they cannot differ. Knows no tensors and no command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bpipe.check.rules import check
from bpipe.generate.families import FAMILIES, that_take_chunks, that_take_groups
from bpipe.generate.family import Family
from bpipe.ir.schedule import Schedule
from bpipe.names import unknown
from bpipe.passes.balance import balance, smallest_bounds

BALANCES = ("none", "bpipe")

# About a gigabyte and a half of schedule, and a minute and a half to build it.
MAX_COMPUTATIONS = 10_000_000

Pass = Callable[[Schedule], Schedule]


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """What to build. `num_stages` is the number of pipeline ranks p; with `num_chunks` v each rank computes v of p*v stages.

    `bounds` holds one number for every rank, or the same for all; by default the schedule's own balanced bound. `partners[rank]` is the
    rank that hosts for it; by default rank s and rank p-1-s are a pair. Both need `balance="bpipe"`. `group_size` is for an interleaved
    schedule: how many micro-batches go through a chunk before they go through the next, by default as many as there are ranks.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    balance: str = "none"
    bounds: tuple[int, ...] | None = None
    partners: tuple[int, ...] | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in FAMILIES:
            raise ValueError(unknown("schedule", self.schedule, FAMILIES))
        for name in ("num_stages", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but there must be at least 1")
        computations = 2 * self.num_stages * self.num_microbatches * self.num_chunks
        if computations > MAX_COMPUTATIONS:
            raise ValueError(f"{computations} computations are more than {MAX_COMPUTATIONS}: ask for fewer stages or micro-batches")
        _check_balance(self.balance, self.bounds, self.partners)
        self._check_chunks(FAMILIES[self.schedule])
        if self.group_size is not None and not FAMILIES[self.schedule].takes_groups:
            others = f"leave the group out, or choose from {that_take_groups()}"
            raise ValueError(f"schedule {self.schedule} has no groups of micro-batches: {others}")

    def _check_chunks(self, family: Family) -> None:
        if self.num_chunks < family.min_chunks:
            raise ValueError(f"schedule {self.schedule} needs at least {family.min_chunks} chunks a rank, not {self.num_chunks}")
        if family.max_chunks is not None and self.num_chunks > family.max_chunks:
            raise ValueError(
                f"schedule {self.schedule} takes at most {family.max_chunks} chunk a rank, not {self.num_chunks}: "
                f"leave it at {family.max_chunks}, or choose a schedule with chunks ({that_take_chunks()})"
            )


def build(config: ProgramConfig) -> Schedule:
    """Generate, then run the passes, checking the schedule after each.

    Raises ValueError for what cannot be built, naming the value, the limit and the way out.
    """
    p, m, v, g = config.num_stages, config.num_microbatches, config.num_chunks, config.group_size
    family = FAMILIES[config.schedule]
    bounds = (family.balanced_bound(p, m, v, g),) if config.bounds is None else config.bounds
    return run(family.generate(p, m, v, g), passes(config.balance, bounds, config.partners))


def adopt(
    schedule: Schedule, balance: str = "none", bounds: Sequence[int] | None = None, partners: Sequence[int] | None = None
) -> Schedule:
    """A schedule from elsewhere, checked, and balanced if asked: by default to the smallest bound every pair of it can keep."""
    _check_balance(balance, bounds, partners)
    check(schedule)
    if balance != "none" and bounds is None:
        bounds = (max(smallest_bounds(schedule, partners)),)
    return run(schedule, passes(balance, bounds, partners))


def passes(balance: str, bounds: Sequence[int] | None, partners: Sequence[int] | None) -> tuple[Pass, ...]:
    """The passes that such a choice asks for, in order."""
    if balance == "none" or bounds is None:
        return ()
    return (lambda schedule: balanced(schedule, bounds, partners),)


def run(schedule: Schedule, changes: Sequence[Pass]) -> Schedule:
    """Run the passes, checking after each. What a pass gets has been checked."""
    check(schedule)
    for change in changes:
        schedule = change(schedule)
        check(schedule)
    return schedule


def balanced(schedule: Schedule, bounds: Sequence[int], partners: Sequence[int] | None) -> Schedule:
    """The balancing pass with one bound for each rank, or one for all."""
    p = schedule.num_ranks
    if len(bounds) not in (1, p):
        raise ValueError(f"{len(bounds)} bounds for {p} stages: give one for all or one for each")
    return balance(schedule, tuple(bounds) * (p if len(bounds) == 1 else 1), partners)


def _check_balance(balance: str, bounds: Sequence[int] | None, partners: Sequence[int] | None) -> None:
    if balance not in BALANCES:
        raise ValueError(unknown("balance", balance, BALANCES))
    if balance == "none" and (bounds is not None or partners is not None):
        raise ValueError('bounds and partners say how to balance, but balance is "none": choose balance "bpipe" or leave them out')
