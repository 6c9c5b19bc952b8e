"""Properties of every schedule this package can build; on random ones, the checker agrees with a slow, obvious one."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import balance, smallest_bound
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import OTHER_END, Action, Kind
from bpipe.schedule.check.rules import RULES, Case, ScheduleError, check, check_no_deadlock
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.document import read_json, write_json
from bpipe.schedule.files.text import read_csv, write_csv
from bpipe.schedule.host_buffers import host_buffers
from bpipe.schedule.memory import counting, num_transfers
from bpipe.schedule.program import steps
from bpipe.schedule.schedule import Schedule, Slot
from tests.support.oracle import is_sound
from tests.unit.schedule.check.test_overlap import OVERLAPPED


@st.composite
def configs(draw: st.DrawFn, max_stages: int = 12) -> ScheduleConfig:
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    p = family.num_pipes * draw(st.integers(1, max_stages // family.num_pipes))
    m = draw(st.integers(1, 6 * p))
    chunks = draw(st.sampled_from(family.chunks(4)))
    group = draw(st.none() | st.integers(p, m)) if family.takes_groups and p <= m else None
    delay = draw(st.integers(0, 4)) if family.takes_delay else 0
    return ScheduleConfig(
        name,
        p,
        m,
        num_chunks=chunks,
        balance=draw(st.sampled_from([None, BalanceConfig()])),
        group_size=group,
        delay=delay,
    )


def holds_what_must(config: ScheduleConfig) -> Schedule:
    schedule = build(config)
    p, m, v = config.num_ranks, config.num_microbatches, config.num_chunks
    check(schedule)
    passes = 3 if FAMILIES[config.schedule].splits else 2
    assert sum(len(slot.computations) for row in schedule.ranks for slot in row) == passes * p * v * m
    if config.balance is not None:
        plain = FAMILIES[config.schedule].generate(p, m, v, config)
        (bound,) = set(schedule.bounds or ())
        assert schedule == balance(plain, [bound] * p)
        if bound > 1:
            with pytest.raises(ValueError, match=r"cannot keep|has no partner|which hosts for"):
                balance(plain, [bound - 1] * p)
        for before, after in zip(plain.ranks, schedule.ranks, strict=True):
            assert [slot.compute for slot in before] == [slot.compute for slot in after], (
                "balancing moves no computation"
            )
    for rank in range(p):
        moved = num_transfers(schedule, rank)
        assert moved.evictions == moved.loads
        assert moved.hosts == moved.returns == len(host_buffers(schedule, rank))
        folded = tuple(steps(schedule, rank))
        assert [step.compute for step in folded[1:-1]] == [
            slot.compute for slot in schedule.ranks[rank] if slot.compute is not None
        ]
        flat: list[Action] = [action for step in folded for action in (*step.before, *step.after)]
        assert flat == [action for slot in schedule.ranks[rank] for action in slot.transfers]
    return schedule


def comes_back(schedule: Schedule) -> None:
    assert read_csv(write_csv(schedule), schedule.name) == schedule
    assert read_json(write_json(schedule)) == schedule


@settings(max_examples=40)
@given(configs())
def test_every_schedule_keeps_every_rule_and_comes_back_from_text(config: ScheduleConfig) -> None:
    comes_back(holds_what_must(config))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=150)
@given(configs(max_stages=32))
def test_large_schedules_keep_every_rule(config: ScheduleConfig) -> None:
    comes_back(holds_what_must(config))


@settings(max_examples=30)
@given(configs(max_stages=8), st.integers(0, 4), st.randoms(use_true_random=False))
def test_any_pairing_and_any_bound_above_its_smallest(config: ScheduleConfig, above: int, rng: random.Random) -> None:
    """Each rank has its own bound: the pair's smallest and up to four more."""
    plain = FAMILIES[config.schedule].generate(config.num_ranks, config.num_microbatches, config.num_chunks, config)
    ranks = list(range(config.num_ranks))
    rng.shuffle(ranks)
    partners = list(range(config.num_ranks))
    for first, second in zip(ranks[::2], ranks[1::2], strict=False):
        partners[first], partners[second] = second, first
    pairs = [(min(rank, partner), max(rank, partner)) for rank, partner in enumerate(partners)]
    least = [smallest_bound(plain, pair, counting(plain.num_stages)) for pair in pairs]
    bounds = [bound + above for bound in least]
    balanced = balance(plain, bounds, partners)
    check(balanced)
    assert balanced.bounds == tuple(bounds)
    for rank in range(config.num_ranks):
        tighter = [bound - (place in (rank, partners[rank])) for place, bound in enumerate(least)]
        if min(tighter) >= 1:
            with pytest.raises(ValueError, match=f"both keep is {least[rank]} |Give it {least[rank]},"):
                balance(plain, tighter, partners)


CONFIGS = [
    ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()),
    ScheduleConfig("1f1b", 5, 7, balance=BalanceConfig()),
    ScheduleConfig("interleaved-1f1b", 4, 6, num_chunks=2, balance=BalanceConfig()),
    ScheduleConfig("gpipe", 3, 4),
]


def damaged(schedule: Schedule, rng: random.Random) -> Schedule:
    """Return the schedule with a few cells exchanged, cleared, doubled or moved, or transfers removed, added or shifted."""
    rows = [list(row) for row in schedule.ranks]
    for _ in range(rng.choice([1, 1, 1, 2])):
        rank = rng.randrange(len(rows))
        row = rows[rank]
        first, second = rng.randrange(len(row)), rng.randrange(len(row))
        change = rng.randrange(5)
        if change == 0:
            row[first], row[second] = row[second], row[first]
        elif change == 1:
            row[first] = Slot(row[second].compute, row[first].transfers, row[second].overlapped)
        elif change == 2:
            row[first] = Slot(row[first].compute, (), row[first].overlapped if rng.random() < 0.5 else None)
        elif change == 3:
            partner = schedule.partners[rank] if schedule.partners else rank
            stage = schedule.layout.placements[0].index(rank)
            kind = rng.choice([Kind.EVICT, Kind.LOAD])
            added = Action(stage, kind, rng.randrange(schedule.num_microbatches))
            row[first] = Slot(row[first].compute, (*row[first].transfers, added))
            host_slot = rows[partner][first]
            rows[partner][first] = Slot(
                host_slot.compute, (*host_slot.transfers, Action(stage, OTHER_END[kind], added.microbatch))
            )
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
