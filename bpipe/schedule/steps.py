"""Fold a rank's slots onto the hooks an engine has: before and after each computation, and the loop's start and end.

In: a checked Schedule and a rank. Out: one `Step` per computation, in order, between those two. Knows no tensors, no
clock.

A transfer beside a computation starts just before it. A transfer in a bubble slot has no computation to start with, so
it goes to the *latest hook that is not later* than its slot: after the computation before it, or the start of the loop.
Starting a half of a transfer too early costs nothing (it only posts a receive); starting it late could make its partner
wait for what waits for it.

What stands behind the rank's last computation goes to the end of the loop, after its last message to a neighbour. The
partner comes to its end of these transfers only with what that message sets going: where anything waits for a transfer
before the message is sent (a queue that all streams share, a synchronising timer), both would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bpipe.schedule.action import Action
from bpipe.schedule.schedule import Schedule, computed_together


class Step(NamedTuple):
    """One computation and the transfers that start around it.

    `compute` is None for the loop's start and its end, the first and last.

    `overlapped` is the backward that runs together with it.
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

    What starts before both starts before the forward, the rest behind both.
    """
    found: list[Step] = []
    for step in program:
        if step.overlapped is None:
            found.append(step)
        else:
            found += (Step(step.compute, step.before), Step(step.overlapped, (), step.after))
    return tuple(found)


def steps(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """Return the rank's program.

    The first step is the start of the loop and the last its end; their transfers stand in `after`.
    """
    return tuple(each_step(schedule, rank))


def each_step(schedule: Schedule, rank: int) -> Iterator[Step]:
    """Yield the steps of a rank one after the other, for readers that need each only once."""
    compute: Action | None = None
    overlapped: Action | None = None
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    for slot in schedule.ranks[rank]:
        if slot.compute is None:
            after += slot.transfers
            continue
        yield Step(compute, before, after, overlapped)
        compute, overlapped, before, after = slot.compute, slot.overlapped, slot.transfers, ()
    yield Step(compute, before, (), overlapped)
    yield Step(None, (), after)
