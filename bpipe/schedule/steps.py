"""A rank's slots as steps of an engine, whose hooks are before and after each computation and at the loop's start and
end.

A transfer next to a computation starts just before it. A transfer in a bubble slot goes to the *latest hook that is not
later* than its slot: after the computation before it, or the start of the loop. Starting a half of a transfer too early
costs nothing (it only posts a receive); starting it late could make its partner wait.

Transfers after the rank's last computation go to the end of the loop, after its last message to a neighbour. The
partner reaches its end of these transfers only because of that message. If anything waited for a transfer before the
message is sent (a queue that all streams share, a synchronising timer), both would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bpipe.schedule.action import Action
from bpipe.schedule.schedule import Schedule, Slot, computed_together


class Step(NamedTuple):
    """One computation and the transfers that start around it.

    `compute` is None for the loop's start and its end, the first and last step; `overlapped` is the backward that runs
    together with it.
    """

    compute: Action | None
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    overlapped: Action | None = None

    @property
    def computations(self) -> tuple[Action, ...]:
        return computed_together(self.compute, self.overlapped)


def one_by_one(program: Iterable[Step]) -> tuple[Step, ...]:
    """Put the two computations of an overlap one after the other.

    Transfers before both start before the forward, the others after the backward.
    """
    single: list[Step] = []
    for step in program:
        if step.overlapped is None:
            single.append(step)
        else:
            single += (Step(step.compute, step.before), Step(step.overlapped, (), step.after))
    return tuple(single)


def steps(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """Return the rank's program. The first step is the start of the loop and the last its end."""
    return tuple(each_step(schedule, rank))


def each_step(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Yield the steps of a rank one by one, for readers that need each only once."""
    current = Slot()
    after: tuple[Action, ...] = ()
    for slot in schedule.ranks[rank]:
        if slot.compute is None:
            after += slot.transfers
            continue
        yield Step(current.compute, current.transfers, after, current.overlapped)
        current, after = slot, ()
    yield Step(current.compute, current.transfers, (), current.overlapped)
    yield Step(None, (), after)
