"""Say when Megatron's interleaved loop exchanges where it is told not to overlap.

In: a Schedule and what passes. Out: turns, receives.

The loop goes in turns: a forward of the first ones, a backward of the last ones, between them a forward and the
backward behind it. It exchanges between two turns: `megatron.core.pipeline_parallel.schedules`, without
`overlap_p2p_comm`. Knows no tensors and no seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bpipe.schedule.action import Kind
from bpipe.schedule.schedule import Schedule, Slot

# By rank, the turn of every computation, from 0, in order.
Turns = Sequence[Sequence[int]]


def turns_of(schedule: Schedule) -> list[list[int]]:
    """Return the turns of every rank, last rank first where a rank computes all forwards first: it alternates two
    forwards before the next.

    A rank has one such turn, with its last forward, or, where not even that is left, every computation is a turn of its
    own.
    """
    if any(cell.overlapped for row in schedule.ranks for cell in row):
        return list(map(_turns_of_cells, schedule.ranks))
    return _turns_alone(schedule)


def _turns_alone(schedule: Schedule) -> list[list[int]]:
    """Return the turns where nothing overlaps."""
    kinds = _kinds(schedule)
    leading = [next((at for at, kind in enumerate(row) if kind is not Kind.FORWARD), len(row)) for row in kinds]
    turns = []
    for row, after in zip(kinds, [*leading[1:], 0], strict=True):
        pairs = {at for at in range(len(row) - 1) if row[at] is Kind.FORWARD and row[at + 1] is not Kind.FORWARD}
        if len(pairs) == 1 and after + 1 >= row.count(Kind.FORWARD):
            pairs.clear()
        turns.append(list(accumulate(int(at > 0 and at - 1 not in pairs) for at in range(len(row)))))
    return turns


def received_before(
    schedule: Schedule,
    turns: Turns,
    needed: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int]],
    made: Sequence[Sequence[int]],
) -> list[list[list[int]]]:
    """Return, by rank and turn and for the loop's end, the values received before it.

    Arguments are by rank and computation, in order: what it needs, from which rank (negative: from none), and what it
    makes. Received is what the next turn needs. What closes the ring of ranks is taken as soon as the last rank sends
    it: with larger groups that is earlier.
    """
    received: list[list[list[int]]] = [[[] for _ in range(of_rank[-1] + 2)] for of_rank in turns]
    made_at = [{value: at for at, value in enumerate(of_rank)} for of_rank in made]
    kinds, last = _kinds(schedule), len(turns) - 1
    for rank, row in enumerate(sources):
        for at, source in enumerate(row):
            if source < 0:
                continue
            value, turn = needed[rank][at], turns[rank][at]
            if last > 1 and {rank, source} == {0, last}:
                made_as = kinds[source][: made_at[source][value] + 1]
                nth = made_as.count(made_as[-1]) - 1 + last
                behind = [turns[rank][place] + 1 for place, kind in enumerate(kinds[rank]) if kind is made_as[-1]]
                turn = min([turn, *behind[nth : nth + 1]])
            received[rank][turn].append(value)
    return received


def _kinds(schedule: Schedule) -> list[list[Kind]]:
    return [[one.kind for cell in row for one in cell.computations] for row in schedule.ranks]


def _turns_of_cells(row: Sequence[Slot]) -> list[int]:
    """Where the loop combines them, a turn is a computation or two that overlap."""
    together = [len(cell.computations) for cell in row if cell.compute is not None]
    return [turn for turn, count in enumerate(together) for _ in range(count)]
