"""Shifting: make orders shorter within what every rank may hold.

All computations are moved as late as the end allows, then as early as the start allows, and so on: what a rank did
early for no good reason makes room, and what it waited for moves into it. Project scheduling knows this as
justification or forward-backward improvement (Li and Willis, 1992; Valls, Ballestin and Quintanilla, 2005); the scarce
resource here is memory.

Going through time from one end, a free rank begins the first computation of its order that can begin: its operands are
there, and even if all that it passes over follows in the old order, the rank never holds too much. So nobody waits for
ever. A stage's forwards, I and W each keep the order of their micro-batches. With patience a rank leaves a computation
alone while an earlier one of the order arrives within some share of its duration.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import UnitCosts
from bpipe.schedule.families.timing import NEVER, Work, length, work_at
from bpipe.schedule.layout import Layout
from bpipe.schedule.memory import Memory, counting

# Rounds to and fro; more changed nothing that was tried.
_ROUNDS = 2
# Computations looked at, about two seconds.
_MOST_VISITS = 200_000


class Slack(NamedTuple):
    """Patience: percentages of a computation's duration for which a rank waits when moving later and earlier.

    Without `of_all` only computations that change how much is held may be left alone; I, which others wait for, never
    is.
    """

    late: int = 0
    early: int = 0
    of_all: bool = True


# Each gives other orders, and which is shortest depends on the costs. In this order each further one gains less: after
# all of them 0.03 % of an iteration on average, at twelve costs of V schedules of 4 and 8 ranks.
_PATIENCE = (
    *(Slack(30, 60), Slack(60, 0), Slack(100, 100), Slack(0, 30)),
    *(Slack(30, 60, False), Slack(100, 0, False), Slack(60, 60, False), Slack(0, 60, False)),
)


@dataclass(slots=True)
class _Side:
    """The work as seen from one end of time: the jobs that wait for each job, with lags, and what it takes and
    gives."""

    waits_for: list[int]
    after: list[list[tuple[int, int]]]
    takes: list[int]
    gives: list[int]


class Shifts:
    """The work of all ranks, one computation per job, to be moved to and fro; the first rows must keep to `limits`."""

    def __init__(self, work: Work[int], memory: Memory, limits: Sequence[int]) -> None:
        self.work, self.limits = work, limits
        before: list[list[tuple[int, int]]] = [list(needed) for needed in work.needed]
        # A sort is a stage's computations of a kind, which must keep their order.
        self.sort_of = [0] * len(work.actions)
        self.num_sorts = max((self._sort(row, before) for row in work.rows), default=0)
        after: list[list[tuple[int, int]]] = [[] for _ in work.actions]
        for job, needed in enumerate(before):
            for maker, lag in needed:
                after[maker].append((job, lag))
        changes = [memory.changes[action.kind][memory.place(action)] for (action,) in work.actions]
        takes, gives = [size for size, _ in changes], [size for _, size in changes]
        self.early = _Side([len(needed) for needed in before], after, takes, gives)
        self.late = _Side([len(waiting) for waiting in after], before, gives, takes)

    def _sort(self, row: Sequence[int], before: Sequence[list[tuple[int, int]]]) -> int:
        """Number a rank's sorts, let each job wait for the previous one of its sort, and return the number of sorts."""
        sorts: dict[tuple[object, int], tuple[int, int]] = {}
        for job in row:
            (action,) = self.work.actions[job]
            number, last = sorts.get((action.kind, action.stage), (len(sorts), -1))
            if last >= 0:
                before[job].append((last, 0))
            self.sort_of[job] = number
            sorts[action.kind, action.stage] = number, job
        return len(sorts)

    def earlier(self, rows: Sequence[Sequence[int]], patience: Slack) -> tuple[int, list[list[int]]]:
        """Return the ticks and rows with everything as early as possible."""
        return _Pass(self, self.early, rows, patience.early, patience.of_all).go()

    def later(self, rows: Sequence[Sequence[int]], patience: Slack) -> tuple[int, list[list[int]]]:
        """Return the ticks and rows with everything as late as possible."""
        ticks, mirrored = _Pass(self, self.late, [row[::-1] for row in rows], patience.late, patience.of_all).go()
        return ticks, [row[::-1] for row in mirrored]

    def to_and_fro(self, patience: Slack, moves: int, goal: int) -> tuple[int, list[list[int]] | None]:
        """Return the ticks and rows of the shortest of `moves` moves up to the goal, later first; no rows if none is
        shorter."""
        shortest, best = length(self.work), None
        rows: Sequence[Sequence[int]] = self.work.rows
        for number in range(moves):
            if shortest <= goal:
                break
            ticks, moved = (self.earlier if number % 2 else self.later)(rows, patience)
            if ticks < shortest:
                shortest, best = ticks, moved
            rows = moved
        return shortest, best


class _Pass:
    """One pass through time.

    `heads[rank][sort]`: the next job of its sort, -1 after the last; `passed[rank]`: how far the old row is used up.
    """

    def __init__(self, shifts: Shifts, side: _Side, rows: Sequence[Sequence[int]], patience: int, of_all: bool) -> None:
        work = shifts.work
        self.rank, self.lasts, self.side, self.patience, self.of_all = work.rank, work.lasts, side, patience, of_all
        self.sort_of, self.limits, self.rows = shifts.sort_of, shifts.limits, rows
        self.missing = list(side.waits_for)
        self.ready = [0] * len(work.actions)
        self.place = [0] * len(work.actions)
        self.next_of_sort = [-1] * len(work.actions)
        self.done = bytearray(len(work.actions))
        self.heads = []
        for row in rows:
            heads = [-1] * shifts.num_sorts
            last = [-1] * shifts.num_sorts
            for place, job in enumerate(row):
                self.place[job] = place
                sort = self.sort_of[job]
                if heads[sort] < 0:
                    heads[sort] = job
                else:
                    self.next_of_sort[last[sort]] = job
                last[sort] = job
            self.heads.append(heads)
        self.passed = [0] * len(rows)
        self.held = [0] * len(rows)
        self.free = [0] * len(rows)
        self.moved: list[list[int]] = [[] for _ in rows]

    def go(self) -> tuple[int, list[list[int]]]:
        events = [(0, rank) for rank in range(len(self.rows))]
        free = self.free
        while events:
            now, rank = heapq.heappop(events)
            if free[rank] > now:
                continue
            job, again = self._choice(rank, now)
            if job >= 0:
                self._begin(rank, job, now, events)
            elif again < NEVER:
                heapq.heappush(events, (again, rank))
        assert all(self.done), "the old order is one in which nobody waits for ever"
        return max(free), self.moved

    def _choice(self, rank: int, now: int) -> tuple[int, int]:
        """Return the job that the rank begins, or -1 and the time to look again, NEVER if another rank wakes it."""
        missing, ready, place = self.missing, self.ready, self.place
        can, coming = [], []
        for job in self.heads[rank]:
            if job >= 0 and not missing[job]:
                if ready[job] <= now:
                    can.append((place[job], job))
                else:
                    coming.append((place[job], ready[job]))
        takes = self.side.takes
        for position, job in sorted(can):
            if not takes[job] or self._fits(rank, job, position):
                soonest = self._worth_waiting_for(job, position, now, coming) if coming and self.patience else NEVER
                return (job if soonest == NEVER else -1), soonest
        return -1, min((when for _, when in coming), default=NEVER)

    def _worth_waiting_for(self, job: int, position: int, now: int, coming: Sequence[tuple[int, int]]) -> int:
        """Return when a job before this one in the order can begin if it is worth waiting for, else NEVER."""
        if not self.of_all and self.side.takes[job] == self.side.gives[job]:
            return NEVER
        soonest = min((when for other, when in coming if other < position), default=NEVER)
        return soonest if 100 * (soonest - now) < self.patience * self.lasts[job] else NEVER

    def _fits(self, rank: int, job: int, position: int) -> bool:
        """Whether the rank may take this job first, and all those before it in the old order after it."""
        takes, gives, done, limit = self.side.takes, self.side.gives, self.done, self.limits[rank]
        held = self.held[rank] + takes[job]
        if held > limit:
            return False
        held -= gives[job]
        row = self.rows[rank]
        for place in range(self.passed[rank], position):
            earlier_job = row[place]
            if not done[earlier_job]:
                if held + takes[earlier_job] > limit:
                    return False
                held += takes[earlier_job] - gives[earlier_job]
        return True

    def _begin(self, rank: int, job: int, now: int, events: list[tuple[int, int]]) -> None:
        missing, ready, free, done = self.missing, self.ready, self.free, self.done
        self.heads[rank][self.sort_of[job]] = self.next_of_sort[job]
        self.moved[rank].append(job)
        self.held[rank] += self.side.takes[job] - self.side.gives[job]
        done[job] = 1
        row, passed = self.rows[rank], self.passed[rank]
        while passed < len(row) and done[row[passed]]:
            passed += 1
        self.passed[rank] = passed
        end = free[rank] = now + self.lasts[job]
        heapq.heappush(events, (end, rank))
        for successor, lag in self.side.after[job]:
            missing[successor] -= 1
            when = end + lag
            if when > ready[successor]:
                ready[successor] = when
            owner = self.rank[successor]
            if not missing[successor] and owner != rank:
                heapq.heappush(events, (max(ready[successor], free[owner]), owner))


def shortened(
    layout: Layout, num_microbatches: int, orders: Sequence[Sequence[Action]], limits: Sequence[int], costs: UnitCosts
) -> Sequence[Sequence[Action]]:
    """Return the shortest orders found from these, which keep to the same limits; the same ones if nothing is shorter.

    Args:
        layout: Which rank computes which stage.
        num_microbatches: Micro-batches of an iteration.
        orders: The orders to start from, one per rank.
        limits: Most micro-batches of a chunk that each rank holds; what waits for its W counts whole.
        costs: Durations of forwards and backwards.
    """
    work = work_at(layout, num_microbatches, orders, costs)
    shifts = Shifts(work, counting(layout.num_stages), limits)
    shortest, goal = length(work), _least(work)
    best = None
    tries = max(1, _MOST_VISITS // (2 * _ROUNDS * len(work.actions)))
    for patience in _PATIENCE[: 1 if costs.even else tries]:
        if shortest == goal:
            break
        ticks, rows = shifts.to_and_fro(patience, 2 * _ROUNDS, goal)
        if ticks < shortest:
            shortest, best = ticks, rows
    return orders if best is None else [[work.actions[job][0] for job in row] for row in best]


def _least(work: Work[int]) -> int:
    """Return a lower bound for all orders: a rank's computations after the way of the first forward to it."""
    begins = [0] * len(work.rows)
    for row in work.rows:
        for job in row[:1]:
            rank = work.rank[job]
            begins[rank] = max(
                (begins[work.rank[maker]] + work.lasts[maker] + lag for maker, lag in work.needed[job]), default=0
            )
    return max(begin + sum(work.lasts[job] for job in row) for begin, row in zip(begins, work.rows, strict=True))
