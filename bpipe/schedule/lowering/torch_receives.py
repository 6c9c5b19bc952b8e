"""Say where torch's runtime posts its receives.

In: what each rank's computations need and make, from and for whom, in order. Out: by rank, the values whose receives
stand before its first cell and behind each, a cell being one computation or two that overlap. Knows no schedule by name.

Ranks come in turn, each with its next cell if all that it needs from others has been posted to it. With the cell its
sends are listed on the rank, and their receives at once on the other: so each two ranks have their messages in one
order. Source: `_add_send_recv` in torch.distributed.pipelining.schedules, 2.11 to 2.15, which a test compares.
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
    wanted, sent = _messages(cells, needed, needed_from, nobody), _messages(cells, made, made_for, nobody)
    received: Received = [[[]] for _ in cells]
    posted: list[set[int]] = [set() for _ in cells]
    places = [0] * len(cells)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(cells):
            if places[rank] == len(row) or not posted[rank].issuperset(
                value for value, _ in wanted[rank][places[rank]]
            ):
                continue
            moved = True
            received[rank].append([])
            for value, receiver in sent[rank][places[rank]]:
                received[receiver][-1].append(value)
                posted[receiver].add(value)
            places[rank] += 1
    for of_rank, row in zip(received, cells, strict=True):
        of_rank += [[] for _ in range(1 + len(row) - len(of_rank))]
    return received


def _messages(
    cells: Sequence[Sequence[Sequence[int]]], values: Table, others: Table, nobody: int
) -> list[list[list[tuple[int, int]]]]:
    """Return, by rank and cell, the values that pass between it and other ranks, each with the rank."""
    return [
        [[(values[rank][at], others[rank][at]) for at in cell if others[rank][at] != nobody] for cell in row]
        for rank, row in enumerate(cells)
    ]
