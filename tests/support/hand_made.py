"""Orders that no family has, balanced schedules with late loads, and the levels of waiting that every plan passes."""

from dataclasses import replace

from bpipe.schedule.action import READING, Action, Key, Kind
from bpipe.schedule.check.deadlock import WaitLevel
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.layout import one_pipe
from bpipe.schedule.schedule import Schedule, Slot

# All levels except CUDA_LAUNCH_BLOCKING=1, under which the receives of our own loop block their host.
PLANNED_WAITS = tuple(waits for waits in WaitLevel if waits <= WaitLevel.ONE_QUEUE)
BACK = (Kind.LOAD, Kind.RETURN)
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def v_flat(p: int, m: int) -> Schedule:
    """Return a V with split backwards and all forwards first: no rank ever holds less, and first chunks wait long."""
    orders = []
    for rank in range(p):
        stages = rank, 2 * p - 1 - rank
        forwards = [Action(stage, F, k) for stage in stages for k in range(m)]
        halves = [Action(stage, kind, k) for stage in reversed(stages) for k in range(m) for kind in (I, W)]
        orders.append([*forwards, *halves])
    return place("v-flat", m, one_pipe((*range(p), *reversed(range(p)))), orders)


def far_ahead() -> Schedule:
    """Return six stages on three ranks: rank 1 takes stage 0's second output after the first has gone around twice.

    Meanwhile rank 0 has made four outputs.
    """
    m, layout = 4, one_pipe((0, 1, 2, 0, 2, 1))

    def all_of(*passes: tuple[int, Kind]) -> list[Action]:
        return [Action(stage, kind, k) for k in range(m) for stage, kind in passes]

    orders = [
        [*all_of((0, F)), *all_of((3, F)), *all_of((3, B), (0, B))],
        [*all_of((1, F), (5, F)), *all_of((5, B), (1, B))],
        [*all_of((2, F), (4, F)), *all_of((4, B), (2, B))],
    ]
    return place("far-ahead", m, layout, orders)


HOST_FIRST = """\
# bpipe schedule=1f1b microbatches=3 stage_to_rank=0,1 partners=1,0
0F0,0F1,0F2,,1HOST2 0EVICT2,0B0 1RETURN2 0LOAD2,0B1,0B2
,1F0,1F1,1F2,1B0 0HOST2 1EVICT2,1B1 0RETURN2 1LOAD2,1B2,
"""


def host_first() -> Schedule:
    """Return a schedule in which two ranks evict to each other, and each starts to host before it evicts."""
    return read_csv(HOST_FIRST)


def with_late_loads(schedule: Schedule) -> Schedule:
    """Return the schedule with every load and its other end in the slot before its backward, as late as possible."""
    needed: dict[Key, int] = {}
    for row in schedule.ranks:
        for slot, cell in enumerate(row):
            for action in cell.computations:
                if action.kind in READING:
                    needed.setdefault(action.key, slot)
    return replace(schedule, ranks=tuple(_late(row, needed) for row in schedule.ranks))


def _late(row: tuple[Slot, ...], needed: dict[Key, int]) -> tuple[Slot, ...]:
    loads: dict[int, list[Action]] = {}
    for action in (action for cell in row for action in cell.transfers if action.kind in BACK):
        loads.setdefault(needed[action.key] - 1, []).append(action)
    return tuple(
        replace(
            cell,
            transfers=(*loads.get(slot, ()), *(action for action in cell.transfers if action.kind not in BACK)),
        )
        for slot, cell in enumerate(row)
    )
