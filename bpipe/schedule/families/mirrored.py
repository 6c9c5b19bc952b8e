"""Make orders of two pipes shorter by moving everything later, then earlier, mirror images alike.

In: `Work`. Out: every rank's order.

Mirror images do the same at the same time, so half of the ranks stand for all, as if both pipes were one that is folded
in the middle: what rank p - 1 - r makes of a micro-batch, rank r makes of the other of two. How things move is
`shift`'s. Knows no schedule by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.schedule.action import Action, of_microbatch
from bpipe.schedule.clock import Work
from bpipe.schedule.families.shift import Shifts, Slack
from bpipe.schedule.layout import Layout
from bpipe.schedule.memory import counting

# More changed nothing that was tried with up to 16 ranks.
_MOVES = 8
# Computations looked at, about a second and a half.
_MOST_VISITS = 150_000
_AT_ONCE = Slack()


def shift_both_ways(
    work: Work[int], placed: Layout, most: Sequence[int], goal: int
) -> tuple[Sequence[Sequence[Action]], int]:
    """Return the shortest orders found from mirrored ones, and their ticks; ends at the goal.

    Rank r holds at most `most[r]` micro-batches of a chunk, as it does before.
    """
    half = _halved(work)
    moves = min(_MOVES, _MOST_VISITS // len(half.actions))
    ticks, rows = Shifts(half, counting(placed.num_stages), most[: len(half.rows)]).to_and_fro(_AT_ONCE, moves, goal)
    found = [[half.actions[job][0] for job in row] for row in (half.rows if rows is None else rows)]
    return [*found, *([_mirrored(one) for one in order] for order in reversed(found))], ticks


def _mirrored(one: Action) -> Action:
    return of_microbatch(one, one.microbatch ^ 1)


def _halved(work: Work[int]) -> Work[int]:
    """Return the first half of the ranks alone.

    A message from a rank of the other half comes from its mirror image, and takes as long.
    """
    rows = work.rows[: len(work.rows) // 2]
    number = sum(map(len, rows))
    job_of = {(one.stage, one.kind, one.microbatch): job for job, (one,) in enumerate(work.actions[:number])}

    def here(job: int) -> int:
        if job < number:
            return job
        one = work.actions[job][0]
        return job_of[one.stage, one.kind, one.microbatch ^ 1]

    needed = [[(here(maker), lag) for maker, lag in needed] for needed in work.needed[:number]]
    return Work(work.actions[:number], work.rank[:number], work.lasts[:number], needed, rows)
