"""What parts of a micro-batch could save that differ by transfer: the fewest bytes there can be beside one part for all
of a stage.

Not built: a transfer's bytes follow from its stage in programs, host buffers and on both ends of a pair.
"""

from __future__ import annotations

from itertools import product

import pytest

from bpipe.balance.budget import less_moved
from bpipe.balance.pairs import plan_rank
from bpipe.schedule.action import READING, Kind
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.memory import Memory, live_bytes, memory_of
from bpipe.schedule.schedule import Schedule


def absences(schedule: Schedule, rank: int) -> dict[tuple[int, int], range]:
    """By micro-batch, the slots in which it may be away: as early and as late as transfers can stand."""
    begun: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], range] = {}
    for slot, cell in enumerate(schedule.ranks[rank]):
        for action in cell.computations:
            key = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                begun[key] = slot
            elif action.kind in READING and key not in found:
                found[key] = range(begun[key] + 2, slot - 1)
    return found


def least(schedule: Schedule, rank: int, room: int, memory: Memory) -> int | None:
    """Bytes that leave where each transfer has a part of its own: wherever room lacks, from what is away longest
    after that."""
    curve, away = list(live_bytes(schedule, rank, memory)), absences(schedule, rank)
    left = {key: memory.stages[key[0]].moved_bytes for key in away}
    total = 0
    for slot in range(len(curve)):
        for key in sorted((key for key, slots in away.items() if slot in slots), key=lambda one: -away[one].stop):
            part = min(left[key], max(0, curve[slot] - room))
            left[key] -= part
            total += part
            for later in range(slot, away[key].stop):
                curve[later] -= part
        if curve[slot] > room:
            return None
    return total


def of_all(schedule: Schedule, rank: int, room: int, memory: Memory) -> int | None:
    """Bytes that leave with one part for all of a stage, the best one."""
    parts = tuple(tuple(range(1, size.moved_bytes + 1)) for size in memory.stages)
    plans = [
        (one, plan_rank(schedule, rank, room, one)) for one in (memory, *less_moved(schedule, [rank], memory, parts))
    ]
    return min(
        (
            sum(
                one.stages[action.stage].moved_bytes
                for actions in plan.values()
                for action in actions
                if action.kind is Kind.EVICT
            )
            for one, plan in plans
            if not isinstance(plan, str)
        ),
        default=None,
    )


def brute(schedule: Schedule, rank: int, room: int, memory: Memory) -> int | None:
    """Every part of every micro-batch."""
    curve, away = live_bytes(schedule, rank, memory), absences(schedule, rank)
    found = []
    for parts in product(*(range(memory.stages[stage].moved_bytes + 1) for stage, _ in away)):
        gone = dict(zip(away, parts, strict=True))
        if all(held - sum(gone[key] for key in away if slot in away[key]) <= room for slot, held in enumerate(curve)):
            found.append(sum(parts))
    return min(found, default=None)


@pytest.mark.parametrize(("name", "p", "m"), [("1f1b", 3, 5), ("1f1b", 4, 6), ("zb-h1", 3, 4)])
def test_the_fewest_are_the_fewest(name: str, p: int, m: int) -> None:
    plain, memory = FAMILIES[name].generate(p, m, 1), memory_of([2] * p, [2] * p)
    tried = [(room, least(plain, 0, room, memory)) for room in range(2, 2 * p + 1)]
    assert tried == [(room, brute(plain, 0, room, memory)) for room in range(2, 2 * p + 1)]
    assert any(sent for _, sent in tried)


# Layers a stage, room in layers of those that rank 0 holds alone: bytes in layers with one part for all, and with the
# fewest.
SAVED = {
    ("1f1b", 4, 16, 2, 5): (30, 22),
    ("1f1b", 8, 64, 4, 19): (156, 131),
    ("1f1b", 8, 64, 10, 71): (90, 90),
    ("zb-h1", 4, 32, 2, 5): (64, 48),
}


@pytest.mark.parametrize("case", SAVED)
def test_parts_that_differ_by_transfer_could_move_up_to_a_quarter_less(case: tuple[str, int, int, int, int]) -> None:
    name, p, m, layers, room = case
    plain, memory = FAMILIES[name].generate(p, m, 1), memory_of([layers] * p, [layers] * p)
    assert (of_all(plain, 0, room, memory), least(plain, 0, room, memory)) == SAVED[case]
