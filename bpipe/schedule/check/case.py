"""Hold a schedule under judgement: what its rules share, and the error that names a place and shows it.

Judges nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.files.grid import window
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule

NOWHERE = -1


class ScheduleError(ValueError):
    """A schedule that breaks a rule: which, and where a place is to blame, `rank`, `slot` and `action`, with the
    grid around it."""

    def __init__(
        self, rule: str, message: str, rank: int | None = None, slot: int | None = None, action: Action | None = None
    ) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule, self.rank, self.slot, self.action = rule, rank, slot, action


@dataclass(slots=True)
class Spots:
    """Slots of the computations of every stage and micro-batch, at `stage * num_microbatches + microbatch`; NOWHERE
    where there is none.

    `need` is the first computation that reads the saved activations, `release` the last: the same for a full backward.
    Those of shards are by kind, at `rank * num_microbatches + microbatch`.
    """

    forward: list[int]
    need: list[int]
    release: list[int]
    shards: Mapping[Kind, list[int]]


@dataclass(slots=True)
class Case:
    """A schedule under judgement and what its rules share."""

    schedule: Schedule
    exchange: Exchange = Exchange.POSTED
    spots: Spots = field(default_factory=lambda: Spots([], [], [], {}))

    def at(self, rank: int, slot: int, key: int) -> Action | None:
        """Return the computation of stage and micro-batch `key` in this slot; of two that overlap, the one of that
        key."""
        mine = divmod(key, self.schedule.num_microbatches)
        return next((one for one in self.schedule.ranks[rank][slot].computations if one.key == mine), None)

    def error(
        self, rule: str, rank: int, slot: int, action: Action | None, reason: str, lanes: tuple[int, ...] = ()
    ) -> ScheduleError:
        """Return the error at this place; `lanes` are further ranks whose part of the grid explains it."""
        what = "a bubble" if action is None else str(action)
        grid = window(self.schedule, rank, slot, lanes)
        return ScheduleError(rule, f"rank {rank}, slot {slot}, {what}: {reason}\n{grid}", rank, slot, action)


Rule = Callable[[Case], None]
