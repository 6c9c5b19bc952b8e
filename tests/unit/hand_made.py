"""Orders that no file of the product knows, made by the rules of their papers: two pipes.

In: sizes. Out: a layout and one order a rank. They show what a schedule can be said to be.
"""

from __future__ import annotations

from bpipe.generate.place import place
from bpipe.ir.action import Action, Kind
from bpipe.ir.layout import Layout, one_pipe
from bpipe.ir.schedule import Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


def v_flat(p: int, m: int) -> Schedule:
    """Every forward before any backward, in V shape: no rank holds less at any time, and a first chunk is long alone. In halves."""
    orders = []
    for rank in range(p):
        stages = rank, 2 * p - 1 - rank
        forwards = [Action(stage, F, k) for stage in stages for k in range(m)]
        halves = [Action(stage, kind, k) for stage in reversed(stages) for k in range(m) for kind in (I, W)]
        orders.append([*forwards, *halves])
    return place("v-flat", m, one_pipe((*range(p), *reversed(range(p)))), orders)


def far_ahead() -> Schedule:
    """Six stages on three ranks; rank 1 takes the second output of the first stage only when the first has come around twice.

    Meanwhile rank 0 has made four.
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


def chimera(p: int) -> Schedule:
    """The unit of two pipes, N = p: slots by a closed formula, a backward twice as long as a forward. Li and Hoefler, 2021."""
    layout = Layout((tuple(range(p)), tuple(reversed(range(p)))))
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(p)]
    for pipe, placement in enumerate(layout.placements):
        for stage, rank in enumerate(placement):
            for j in range(p // 2):
                microbatch = 2 * j + pipe
                rows[rank].append((stage + 2 * j, Action(stage, F, microbatch)))
                rows[rank].append((2 * p - 1 - stage + 2 * j, Action(stage, B, microbatch)))
    orders = [[action for _, action in sorted(row, key=lambda one: (one[0], one[1].microbatch))] for row in rows]
    return place("chimera", p, layout, orders)
