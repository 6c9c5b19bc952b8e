"""Build the schedule a configuration asks for: the one door. In: a `ProgramConfig`. Out: a checked Schedule.

The command, the planner and the trainer's hooks all ask here, so they cannot differ. Knows no tensors and no command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bpipe.generate.registry import GENERATORS, Generator
from bpipe.ir.check import check
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import balance

BALANCES = ("none", "bpipe")

Pass = Callable[[Schedule], Schedule]


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """What to build. `num_stages` is the number of pipeline ranks p; with `num_chunks` v each rank computes v of p*v stages.

    `bounds` holds one number for every rank, or the same for all; by default the schedule's own balanced bound. `partners[rank]` is the
    rank that hosts for it; by default rank s and rank p-1-s are a pair. Both need `balance="bpipe"`.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1
    balance: str = "none"
    bounds: tuple[int, ...] | None = None
    partners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in GENERATORS:
            raise ValueError(f"unknown schedule {self.schedule!r}: choose from {', '.join(GENERATORS)}")
        for name in ("num_stages", "num_microbatches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but there must be at least 1")
        if self.balance not in BALANCES:
            raise ValueError(f"unknown balance {self.balance!r}: choose from {', '.join(BALANCES)}")
        if self.balance == "none" and (self.bounds is not None or self.partners is not None):
            raise ValueError('bounds and partners say how to balance, but balance is "none": set balance="bpipe" or leave them out')
        self._check_chunks(GENERATORS[self.schedule])

    def _check_chunks(self, generator: Generator) -> None:
        if self.num_chunks < generator.min_chunks:
            raise ValueError(
                f"schedule {self.schedule} needs at least {generator.min_chunks} chunks a rank, num_chunks is {self.num_chunks}"
            )
        if generator.max_chunks is not None and self.num_chunks > generator.max_chunks:
            fitting = ", ".join(name for name, other in GENERATORS.items() if other.max_chunks is None)
            raise ValueError(
                f"schedule {self.schedule} takes at most {generator.max_chunks} chunk a rank, num_chunks is {self.num_chunks}: "
                f"leave it at {generator.max_chunks}, or choose a schedule with chunks ({fitting or 'none yet'})"
            )


def build(config: ProgramConfig) -> Schedule:
    """Generate, then run the passes, checking the schedule after each.

    Raises ValueError for what cannot be built, naming the value, the limit and the way out.
    """
    generator = GENERATORS[config.schedule]
    schedule = generator.generate(config.num_stages, config.num_microbatches, config.num_chunks)
    check(schedule)
    for change in passes(config):
        schedule = change(schedule)
        check(schedule)
    return schedule


def passes(config: ProgramConfig) -> tuple[Pass, ...]:
    """The passes a configuration asks for, in order."""
    if config.balance == "none":
        return ()
    return (lambda schedule: balance(schedule, balanced_bounds(config), config.partners),)


def balanced_bounds(config: ProgramConfig) -> tuple[int, ...]:
    """One bound a rank: the configuration's, or the one its schedule balances to."""
    p, m, v = config.num_stages, config.num_microbatches, config.num_chunks
    if config.bounds is None:
        return (GENERATORS[config.schedule].balanced_bound(p, m, v),) * p
    if len(config.bounds) not in (1, p):
        raise ValueError(f"{len(config.bounds)} bounds for {p} stages: give one for all or one for each")
    return tuple(config.bounds) * (p if len(config.bounds) == 1 else 1)
