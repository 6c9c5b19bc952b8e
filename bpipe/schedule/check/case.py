"""A schedule under check: what its rules share, and the error that names a place and shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.files.grid import window
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule

NOWHERE = -1


class ScheduleError(ValueError):
    """A schedule that breaks `rule`, with the `rank`, `slot` and `action` to blame, if any, and the grid around."""

    def __init__(
        self, rule: str, message: str, rank: int | None = None, slot: int | None = None, action: Action | None = None
    ) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule, self.rank, self.slot, self.action = rule, rank, slot, action


@dataclass(slots=True)
class Spots:
    """Slots of the computations of every stage and micro-batch, at `stage * num_microbatches + microbatch`, or NOWHERE.

    Attributes:
        forward: Slots of forwards.
        need: Slots of the first computation that reads the saved activations.
        release: Slots of the last one, which is the same for a full backward.
        shards: Slots of shards by kind, at `rank * num_microbatches + microbatch`.
    """

    forward: list[int]
    need: list[int]
    release: list[int]
    shards: Mapping[Kind, list[int]]


@dataclass(slots=True)
class Case:
    """A schedule under check and what its rules share."""

    schedule: Schedule
    exchange: Exchange = Exchange.POSTED
    spots: Spots = field(default_factory=lambda: Spots([], [], [], {}))

    def at(self, rank: int, slot: int, key: int) -> Action | None:
        """Return the computation of stage and micro-batch `key` in this slot, which may have two that overlap."""
        stage_and_microbatch = divmod(key, self.schedule.num_microbatches)
        computations = self.schedule.ranks[rank][slot].computations
        return next((action for action in computations if action.key == stage_and_microbatch), None)

    def error(
        self, rule: str, rank: int, slot: int, action: Action | None, reason: str, lanes: tuple[int, ...] = ()
    ) -> ScheduleError:
        """Return the error at this place; `lanes` are further ranks whose part of the grid explains it."""
        cell = "a bubble" if action is None else str(action)
        grid = window(self.schedule, rank, slot, lanes)
        return ScheduleError(rule, f"rank {rank}, slot {slot}, {cell}: {reason}\n{grid}", rank, slot, action)


Rule = Callable[[Case], None]
