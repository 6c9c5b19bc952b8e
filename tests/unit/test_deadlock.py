"""No balanced plan deadlocks when everything waits for its other end, and the checker would notice if one did."""

from __future__ import annotations

import pytest

from bpipe.generate.registry import GENERATORS
from bpipe.ir import deadlock
from bpipe.ir.deadlock import Waits, blocked_ranks
from bpipe.ir.schedule import Schedule
from bpipe.passes.balance import balance, smallest_bounds
from bpipe.passes.steps import Step, steps


def plans(name: str, chunks: int, stages: tuple[int, ...]) -> list[Schedule]:
    """Balanced to every bound from the smallest to four above it."""
    made = []
    for p in stages:
        for m in (p - 1, p, 2 * p, 3 * p + 1):
            plain = GENERATORS[name].generate(p, m, chunks)
            least = max(smallest_bounds(plain))
            made += [balance(plain, [bound] * p) for bound in range(least, least + 4)]
    return made


def steps_without_start(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """What stands before the first computation waits until the rank reaches it."""
    start, first, *others = steps(schedule, rank)
    return (Step(None), Step(first.compute, start.after + first.before, first.after), *others)


@pytest.mark.parametrize("waits", Waits)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3)])
def test_no_plan_deadlocks(name: str, chunks: int, waits: Waits) -> None:
    stages = (4, 6, 8, 12, 16) if chunks == 1 else (4, 6, 8)
    for schedule in plans(name, chunks, stages):
        assert not blocked_ranks(schedule, waits)


def test_gpipe_does_not_deadlock() -> None:
    assert not blocked_ranks(GENERATORS["gpipe"].generate(5, 7, 1))


def test_without_a_hook_at_the_start_acceptors_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptor that starts its half only at its first computation waits there for what waits for it."""
    monkeypatch.setattr(deadlock, "steps", steps_without_start)
    schedules = plans("1f1b", 1, (4, 6, 8))
    stuck = [schedule for schedule in schedules if blocked_ranks(schedule, Waits.IN_EVERY_OPERATION)]
    assert stuck
    assert not any(blocked_ranks(schedule, Waits.AFTER_EXCHANGES) for schedule in stuck)
    blocked = {one.rank for one in blocked_ranks(stuck[0])}
    assert {0, stuck[0].num_ranks - 1} <= blocked
