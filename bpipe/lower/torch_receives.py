"""Say where torch's runtime posts its receives.

In: what each rank's computations need and make, from and for whom, in order. Out: by rank, the values whose receives
stand before its first cell and behind each, a cell being one computation or two that overlap. Knows no schedule by name.

Ranks come in turn, each with its next cell if all that it needs from others has been posted to it. With the cell its
sends are listed on the rank, and their receives at once on the other: so each two ranks have their messages in one
order. Source: `_add_send_recv` in torch.distributed.pipelining.schedules, 2.11 to 2.14, which a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence

# By rank and computation.
Table = Sequence[Sequence[int]]
Received = list[list[list[int]]]


def received_behind_cells(
    cells: Sequence[Sequence[Sequence[int]]],
    needed: Table,
    needed_from: Table,
    made: Table,
    made_for: Table,
    nobody: int,
) -> Received:
    """Return the values that are posted before a rank's first cell and behind each; `cells[rank]` number its
    computations.

    What is never posted, as ranks wait for each other, stands nowhere.
    """
    received: Received = [[[]] for _ in cells]
    posted: list[set[int]] = [set() for _ in cells]
    places = [0] * len(cells)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(cells):
            if places[rank] == len(row):
                continue
            cell = row[places[rank]]
            if any(needed_from[rank][at] != nobody and needed[rank][at] not in posted[rank] for at in cell):
                continue
            moved = True
            places[rank] += 1
            received[rank].append([])
            for at in cell:
                receiver = made_for[rank][at]
                if receiver != nobody:
                    received[receiver][-1].append(made[rank][at])
                    posted[receiver].add(made[rank][at])
    for of_rank, row in zip(received, cells, strict=True):
        of_rank += [[] for _ in range(1 + len(row) - len(of_rank))]
    return received
