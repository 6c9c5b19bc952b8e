"""Let activations come back as late as can be, as a schedule from a file may have it.

In: a balanced Schedule. Out: the same with every load, and its other end, in the slot before its backward.
"""

from dataclasses import replace

from bpipe.schedule.action import READING, Action, Key, Kind
from bpipe.schedule.schedule import Schedule, Slot

BACK = (Kind.LOAD, Kind.RETURN)


def with_late_loads(schedule: Schedule) -> Schedule:
    needed: dict[Key, int] = {}
    for row in schedule.ranks:
        for slot, cell in enumerate(row):
            for action in cell.computations:
                if action.kind in READING:
                    needed.setdefault(action.key, slot)
    return replace(schedule, ranks=tuple(_late(row, needed) for row in schedule.ranks))


def _late(row: tuple[Slot, ...], needed: dict[Key, int]) -> tuple[Slot, ...]:
    back: dict[int, list[Action]] = {}
    for action in (action for cell in row for action in cell.transfers if action.kind in BACK):
        back.setdefault(needed[action.key] - 1, []).append(action)
    return tuple(
        replace(
            cell,
            transfers=(*back.get(slot, ()), *(action for action in cell.transfers if action.kind not in BACK)),
        )
        for slot, cell in enumerate(row)
    )
