"""The checker against a slow and obvious one that walks the grid slot by slot, on schedules damaged at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import OTHER_END, Action, Kind
from bpipe.schedule.check.rules import RULES, Case, ScheduleError, check_no_deadlock
from bpipe.schedule.schedule import Schedule, Slot
from tests.support.oracle import is_sound
from tests.unit.schedule.check.test_overlap import OVERLAPPED

CONFIGS = [
    ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()),
    ScheduleConfig("1f1b", 5, 7, balance=BalanceConfig()),
    ScheduleConfig("interleaved-1f1b", 4, 6, num_chunks=2, balance=BalanceConfig()),
    ScheduleConfig("gpipe", 3, 4),
]


def damaged(schedule: Schedule, rng: random.Random) -> Schedule:
    """A few cells exchanged, cleared, doubled, moved, or transfers taken, added, and shifted on both ranks."""
    rows = [list(row) for row in schedule.ranks]
    for _ in range(rng.choice([1, 1, 1, 2])):
        rank = rng.randrange(len(rows))
        row = rows[rank]
        one, other = rng.randrange(len(row)), rng.randrange(len(row))
        change = rng.randrange(5)
        if change == 0:
            row[one], row[other] = row[other], row[one]
        elif change == 1:
            row[one] = Slot(row[other].compute, row[one].transfers, row[other].overlapped)
        elif change == 2:
            row[one] = Slot(row[one].compute, (), row[one].overlapped if rng.random() < 0.5 else None)
        elif change == 3:
            partner = schedule.partners[rank] if schedule.partners else rank
            stage = schedule.layout.placements[0].index(rank)
            kind = rng.choice([Kind.EVICT, Kind.LOAD])
            added = Action(stage, kind, rng.randrange(schedule.num_microbatches))
            row[one] = Slot(row[one].compute, (*row[one].transfers, added))
            back = rows[partner][one]
            rows[partner][one] = Slot(back.compute, (*back.transfers, Action(stage, OTHER_END[kind], added.microbatch)))
        else:
            moving = [slot for slot, cell in enumerate(row) if cell.transfers]
            if moving and schedule.partners:
                source = rng.choice(moving)
                target = max(0, min(len(row) - 1, source + rng.choice([-2, -1, 1, 2])))
                for lane in (row, rows[schedule.partners[rank]]):
                    lane[source], lane[target] = (
                        Slot(lane[source].compute),
                        Slot(lane[target].compute, lane[target].transfers + lane[source].transfers),
                    )
    changed = replace(schedule, ranks=tuple(tuple(row) for row in rows))
    if schedule.bounds is not None and rng.random() < 0.3:
        changed = replace(changed, bounds=tuple(bound - (rng.random() < 0.2) for bound in schedule.bounds))
    return changed


def is_accepted(schedule: Schedule) -> bool:
    case = Case(schedule)
    try:
        for rule in RULES:
            if rule is not check_no_deadlock:
                rule(case)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("sound", [*map(build, CONFIGS), OVERLAPPED], ids=lambda schedule: schedule.name)
def test_the_checker_agrees_with_walking_the_grid(sound: Schedule) -> None:
    assert is_sound(sound)
    rng = random.Random(11)
    verdicts = []
    for _ in range(400):
        schedule = damaged(sound, rng)
        verdicts.append(is_sound(schedule))
        assert is_accepted(schedule) == verdicts[-1], schedule
    assert 10 < sum(verdicts) < 390, "both verdicts are tried"
