"""The checker against a slow and obvious one that walks the grid slot by slot, on schedules damaged at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bpipe.ir.action import OTHER_END, TRANSFER, Action, Kind
from bpipe.ir.check import RULES, Case, ScheduleError, check_no_deadlock
from bpipe.ir.schedule import Schedule, Slot
from bpipe.program import ProgramConfig, build

CONFIGS = [
    ProgramConfig("1f1b", 4, 8, balance="bpipe"),
    ProgramConfig("1f1b", 5, 7, balance="bpipe"),
    ProgramConfig("interleaved-1f1b", 4, 6, 2, "bpipe"),
    ProgramConfig("gpipe", 3, 4),
]


def is_sound(schedule: Schedule) -> bool:
    """Do what each slot says, all ranks in step; anything that cannot be done, or is left undone, makes the schedule unsound."""
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    forwarded: set[tuple[int, int]] = set()
    backwarded: set[tuple[int, int]] = set()
    present: set[tuple[int, int]] = set()
    away: set[tuple[int, int]] = set()
    for column in zip(*schedule.ranks, strict=True):
        began = {
            name: set(held) for name, held in (("forwarded", forwarded), ("backwarded", backwarded), ("present", present), ("away", away))
        }
        holding = [sum(schedule.stage_to_rank[stage] == rank for stage, _ in present) for rank in range(schedule.num_ranks)]
        for stage, _ in away:
            holding[schedule.partners[schedule.stage_to_rank[stage]] if schedule.partners else 0] += 1
        for rank, cell in enumerate(column):
            one = cell.compute
            if one is not None:
                key = (one.stage, one.microbatch)
                if one.stage not in stages or one.microbatch not in microbatches or schedule.stage_to_rank[one.stage] != rank:
                    return False
                if one.kind is Kind.FORWARD:
                    if key in forwarded or (one.stage and (one.stage - 1, one.microbatch) not in began["forwarded"]):
                        return False
                    forwarded.add(key)
                    present.add(key)
                    holding[rank] += 1
                else:
                    after = (one.stage + 1, one.microbatch)
                    if key in backwarded or key not in began["present"] or (after[0] in stages and after not in began["backwarded"]):
                        return False
                    backwarded.add(key)
                    present.discard(key)
            for moved in cell.transfers:
                if not moves(schedule, rank, moved, column, began, present, away, holding):
                    return False
        # What is evicted, returned or computed backward is still held during this slot.
        if schedule.bounds is not None and any(held > bound for held, bound in zip(holding, schedule.bounds, strict=True)):
            return False
    every = {(stage, microbatch) for stage in stages for microbatch in microbatches}
    return forwarded == backwarded == every


def moves(
    schedule: Schedule,
    rank: int,
    moved: Action,
    column: tuple[Slot, ...],
    began: dict[str, set[tuple[int, int]]],
    present: set[tuple[int, int]],
    away: set[tuple[int, int]],
    holding: list[int],
) -> bool:
    """Move one micro-batch, if it can be moved in this slot, and its other end is there."""
    if schedule.partners is None or schedule.partners[rank] == rank or moved.kind not in TRANSFER:
        return False
    partner, key = schedule.partners[rank], (moved.stage, moved.microbatch)
    if Action(moved.stage, OTHER_END[moved.kind], moved.microbatch) not in column[partner].transfers:
        return False
    evictor = rank if moved.kind in (Kind.EVICT, Kind.LOAD) else partner
    if moved.stage not in range(schedule.num_stages) or schedule.stage_to_rank[moved.stage] != evictor:
        return False
    computing = column[evictor].compute
    if computing is not None and (computing.stage, computing.microbatch) == key:
        return False
    if moved.kind is Kind.EVICT:
        if key not in began["present"] or key not in present:
            return False
        present.discard(key)
        away.add(key)
        holding[partner] += 1
    elif moved.kind is Kind.LOAD:
        if key not in began["away"] or key not in away:
            return False
        away.discard(key)
        present.add(key)
        holding[rank] += 1
    return True


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
            row[one] = Slot(row[other].compute, row[one].transfers)
        elif change == 2:
            row[one] = Slot(row[one].compute)
        elif change == 3:
            partner = schedule.partners[rank] if schedule.partners else rank
            stage = schedule.stage_to_rank.index(rank)
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


@pytest.mark.parametrize("config", CONFIGS)
def test_the_checker_agrees_with_walking_the_grid(config: ProgramConfig) -> None:
    sound = build(config)
    assert is_sound(sound)
    rng = random.Random(11)
    verdicts = []
    for _ in range(400):
        schedule = damaged(sound, rng)
        verdicts.append(is_sound(schedule))
        assert is_accepted(schedule) == verdicts[-1], schedule
    assert 10 < sum(verdicts) < 390, "both verdicts are tried"
