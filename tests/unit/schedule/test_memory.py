"""The memory rule against sums over every micro-batch in every slot: overlaps, split backwards, shares after I."""

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.balance.budget import ActivationBudget, balance_within
from bpipe.balance.pairs import OverBound, plan_evictions
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.memory import Memory, StageMemory, live_bytes, memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, StageCost
from bpipe.simulate.engine import simulate

Key = tuple[int, int]
FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


@dataclass
class Life:
    """When each action of one micro-batch of a stage starts and ends on one rank: a slot lasts from n to n + 1."""

    times: dict[Kind, list[tuple[Fraction, Fraction]]]

    def held(self, time: Fraction, size: StageMemory) -> int:
        """Return the bytes held at a time when nothing starts or ends."""
        if Kind.HOST in self.times:
            stays = zip(self.times[Kind.HOST], self.times[Kind.RETURN], strict=True)
            return sum(size.moved_bytes for host, load in stays if host[0] < time < load[1])
        away = any(
            evict[1] < time < load[0]
            for evict, load in zip(self.times.get(Kind.EVICT, []), self.times.get(Kind.LOAD, []), strict=True)
        )
        (start, _) = self.times[FORWARD][0]
        (_, end) = self.times[BACKWARD if BACKWARD in self.times else WEIGHT][0]
        if not start < time < end:
            return 0
        here = size.saved_bytes
        if INPUT in self.times:
            first, last = self.times[INPUT][0]
            if time > last:
                here = size.after_input_bytes
            elif time > first:
                here = max(size.saved_bytes, size.after_input_bytes)
        return here - size.moved_bytes * away


def lives(rows: list[tuple[Action, Fraction, Fraction]]) -> dict[Key, Life]:
    by_key: dict[Key, Life] = {}
    for action, start, end in rows:
        life = by_key.setdefault((action.stage, action.microbatch), Life({}))
        life.times.setdefault(action.kind, []).append((start, end))
    return by_key


def slow_curve(schedule: Schedule, rank: int, memory: Memory) -> list[int]:
    """Return the bytes held in the middle of each slot."""
    rows = [
        (action, Fraction(slot), Fraction(slot + 1))
        for slot, cell in enumerate(schedule.ranks[rank])
        for action in (*cell.computations, *cell.transfers)
    ]
    by_key = lives(rows)
    middles = [slot + Fraction(1, 2) for slot in range(len(schedule.ranks[rank]))]
    return [sum(life.held(time, memory.stages[stage]) for (stage, _), life in by_key.items()) for time in middles]


def one_order(rng: random.Random, m: int, halves: float) -> tuple[list[Action], list[Action]]:
    """Draw orders of two stages: the first in any order that the second can follow, backwards whole or in halves."""
    split = [rng.random() < halves for _ in range(m)]
    order: list[Action] = []
    done, waiting, left = 0, [], []
    while done < m or waiting or left:
        roll = rng.random()
        if done < m and (roll < 0.5 or not (waiting or left)):
            order.append(Action(0, FORWARD, done))
            waiting.append(done)
            done += 1
        elif waiting and (roll < 0.8 or not left):
            microbatch = waiting.pop(rng.randrange(len(waiting)))
            order.append(Action(0, INPUT if split[microbatch] else BACKWARD, microbatch))
            left += [microbatch] * split[microbatch]
        elif left:
            order.append(Action(0, WEIGHT, left.pop(rng.randrange(len(left)))))
    return order, [Action(1, action.kind, action.microbatch) for action in order]


def random_schedule(seed: int, halves: float = 0.6) -> Schedule:
    rng = random.Random(seed)
    m = rng.randint(2, 8)
    return place("random", m, one_pipe((0, 1)), one_order(rng, m, halves))


def overlapping(schedule: Schedule, rng: random.Random) -> Schedule:
    """Return rank 0 alone, with some forwards and the backwards after them (of other micro-batches) in one slot."""
    row = [cell for cell in schedule.ranks[0] if cell.compute is not None]
    merged = []
    while row:
        cell, *row = row
        first, second = cell.compute, row[0].compute if row else None
        assert first is not None
        if (
            second is not None
            and first.kind is FORWARD
            and second.kind in (BACKWARD, INPUT)
            and first.microbatch != second.microbatch
            and rng.random() < 0.7
        ):
            cell, row = replace(cell, overlapped=second), row[1:]
        merged.append(cell)
    return Schedule("overlapping", schedule.num_microbatches, one_pipe((0,)), (tuple(merged),))


@st.composite
def sizes(draw: st.DrawFn, num_stages: int) -> Memory:
    saved = draw(st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages))
    after = draw(st.lists(st.integers(0, 14), min_size=num_stages, max_size=num_stages))
    return memory_of(saved, [draw(st.integers(0, size)) for size in saved], after)


@settings(max_examples=60)
@given(st.integers(0, 10**6), sizes(2), st.booleans())
def test_slots_hold_what_looking_at_each_microbatch_says(seed: int, memory: Memory, overlap: bool) -> None:
    schedule = random_schedule(seed)
    if overlap:
        schedule = overlapping(schedule, random.Random(seed))
        memory = replace(memory, stages=memory.stages[:1])
    check(schedule)
    for rank in range(schedule.num_ranks):
        assert list(live_bytes(schedule, rank, memory)) == slow_curve(schedule, rank, memory)


@settings(max_examples=60)
@given(st.integers(0, 10**6), sizes(2), st.integers(0, 8))
def test_time_holds_it_too_and_balanced_schedules_keep_their_bounds(seed: int, memory: Memory, above: int) -> None:
    plain = random_schedule(seed)
    least = [0, 0]
    for _ in range(200):  # the first bound in bytes, from the smallest on, that can be kept
        try:
            schedule = balance_within(plain, ActivationBudget(tuple(max(1, bound + above) for bound in least), memory))
            break
        except ValueError:
            least = [bound + 1 for bound in least]
    check(schedule)
    costs = Costs(
        tuple(
            StageCost(
                2,
                5,
                weight_s=3,
                saved_bytes=size.saved_bytes,
                moved_bytes=size.moved_bytes,
                after_input_bytes=size.after_input_bytes,
            )
            for size in memory.stages
        )
    )
    report = simulate(schedule, costs)
    for rank in range(2):
        assert max(slow_curve(schedule, rank, memory)) <= max(1, least[rank] + above)
        assert list(live_bytes(schedule, rank, memory)) == slow_curve(schedule, rank, memory)
        rows = [
            (timed.action, Fraction(timed.start_s), Fraction(timed.end_s))
            for timed in (*report.computations[rank], *report.transfers[rank])
        ]
        levels = report.levels(rank)
        for level, behind in pairwise(levels):
            time = Fraction(level.start_s + behind.start_s) / 2
            assert level.held_bytes == sum(
                life.held(time, memory.stages[stage]) for (stage, _), life in lives(rows).items()
            )
        assert levels[-1].held_bytes == 0


def fewest(schedule: Schedule, bound: int, memory: Memory) -> int | None:
    """Try every set of rank 0's micro-batches, smallest first; each is evicted as long as possible."""
    slots = {kind: {} for kind in (FORWARD, INPUT)}
    for slot, cell in enumerate(schedule.ranks[0]):
        if cell.compute is not None and cell.compute.kind is not WEIGHT:
            slots[FORWARD if cell.compute.kind is FORWARD else INPUT][cell.compute.microbatch] = slot
    curve = slow_curve(schedule, 0, memory)
    for size in range(schedule.num_microbatches + 1):
        for chosen in combinations(range(schedule.num_microbatches), size):
            left = list(curve)
            for microbatch in chosen:
                for slot in range(slots[FORWARD][microbatch] + 2, slots[INPUT][microbatch] - 1):
                    left[slot] -= memory.stages[0].moved_bytes
            if max(left) <= bound and all(
                slots[INPUT][microbatch] - slots[FORWARD][microbatch] > 3 for microbatch in chosen
            ):
                return size
    return None


@pytest.mark.parametrize(("halves", "after"), [(0.0, 2), *((0.8, after) for after in range(4))])
@pytest.mark.parametrize("seed", range(30))
def test_a_plan_takes_as_few_evictions_as_trying_all(seed: int, halves: float, after: int) -> None:
    """W may need less or more than F saved; what can be evicted always has the same size."""
    schedule, memory = random_schedule(seed, halves), memory_of([2, 2], [2, 2], [after, after])
    for bound in range(2, max(slow_curve(schedule, 0, memory))):
        expected = fewest(schedule, bound, memory)
        try:
            plan = plan_evictions(schedule, 0, bound, memory)
        except OverBound:
            assert expected is None
            continue
        assert sum(action.kind is Kind.EVICT for actions in plan.values() for action in actions) == expected


@pytest.mark.parametrize(
    ("memory", "reason"),
    [
        (memory_of([10] * 3), "sizes of 3 stages, but the schedule has 2"),
        (memory_of([10, 10], [10, 11]), "stage 1: moved_bytes 11 must lie between 0 and saved_bytes 10"),
        (memory_of([10, 10], None, [10, -1]), "stage 1: after_input_bytes is -1"),
        (memory_of([10, 0]), "stage 1: saved_bytes is 0"),
    ],
)
def test_sizes_that_cannot_be(memory: Memory, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        balance_within(random_schedule(0), ActivationBudget((99, 99), memory))
