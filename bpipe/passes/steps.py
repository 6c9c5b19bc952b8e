"""Fold a rank's slots onto the hooks an engine has: before and after each computation, and the start of the loop.

In: a checked Schedule and a rank. Out: one `Step` per computation, in order. Knows no tensors, no clock.

A transfer beside a computation starts just before it. A transfer in a bubble slot has no computation to start with, so it goes to
the *latest hook that is not later* than its slot: after the computation before it, or the start of the loop. Starting a half of a
transfer too early costs nothing (it only posts a receive); starting it late could make its partner wait for what waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.ir.action import Action
from bpipe.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Step:
    """One computation and the transfers that start around it. `compute` is None for the start of the loop, which is the first step."""

    compute: Action | None
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()


def steps(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """The rank's program. Step 0 is the start of the loop; its transfers stand in `after`."""
    folded: list[Step] = []
    compute: Action | None = None
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    for slot in schedule.ranks[rank]:
        if slot.compute is None:
            after += slot.transfers
            continue
        folded.append(Step(compute, before, after))
        compute, before, after = slot.compute, slot.transfers, ()
    folded.append(Step(compute, before, after))
    return tuple(folded)
