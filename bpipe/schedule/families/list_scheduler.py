"""List scheduling: ranks choose what to compute next, event by event.

Stage s is on rank s % p and backwards are split: the k-th forward F needs the k-th of the rank before or, on the first
rank, that of the last rank for the chunk before; the k-th I the other way around; the k-th W comes after the k-th I. So
each of the three is in turn order on every rank, and ranks choose only between kinds. A rank holds a micro-batch from
the start of its F to the end of its W.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass
from fractions import Fraction

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.families.timing import NEVER, StageTicks
from bpipe.schedule.families.turns import NONE, Turns, in_slices

_F, _I, _W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


class Discipline(enum.Enum):
    """Rule of what a rank computes from its first I on, while more forwards are left than its tail."""

    TURN = "turn"  # I, W, F in turn, and it waits for each
    SOFT = "soft"  # the same, and where the one whose turn it is cannot start, I, else F, else W
    GREEDY = "greedy"  # I, else F, else W


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Rule by which ranks choose.

    Attributes:
        caps: Rank r holds at most `caps[r]` micro-batches of a chunk.
        tails: Except once at most `tails[r]` of its forwards are left.
        discipline: What comes next.
        together: The most that a rank and its mirror image p - 1 - r hold; a rank in the middle holds half of it.
        patient: Whether, when it is nobody's turn, no F and no W starts if the next I arrives within half of its
            duration.
    """

    caps: tuple[int, ...]
    tails: tuple[int, ...]
    discipline: Discipline = Discipline.TURN
    together: int | None = None
    patient: bool = False


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """Result of list scheduling: what each rank computes, in order, and the makespan in units of the costs."""

    kinds: tuple[tuple[Kind, ...], ...]
    makespan: Fraction


def schedule_list(
    turns: Turns,
    num_ranks: int,
    ticks: StageTicks,
    rule: ChoiceRule,
    after_input: Fraction = Fraction(1),
    shorter_than: Fraction | None = None,
) -> ListSchedule | None:
    """Return what the ranks choose; None if the rule makes them wait for each other, or it is not `shorter_than` a
    makespan.

    Args:
        turns: The order in which each rank meets its computations.
        num_ranks: Ranks of the pipeline.
        ticks: Durations, by stage and kind.
        rule: Which computation a rank takes of those that are ready.
        after_input: Share of a micro-batch that is held between I and W.
        shorter_than: A makespan; None accepts any.
    """
    run = _Ranks(turns, num_ranks, ticks, rule, after_input)
    if shorter_than is not None:
        # A rank ends when all its computations and all its waits are over.
        run.most_idle = int(shorter_than * ticks.per_unit) - run.total * sum(run.durations.values())
    run.go()
    if min(run.done_weights) < len(turns.forwards):
        return None
    return ListSchedule(tuple(map(tuple, run.kinds)), Fraction(max(run.free), ticks.per_unit))


def actions_of(listed: ListSchedule, taken: Turns) -> list[list[Action]]:
    """Return the order of every rank, with stages and micro-batches."""
    num_ranks, chunks = len(listed.kinds), range(taken.num_chunks)
    num_microbatches = max(microbatch for _, microbatch in taken.forwards) + 1
    orders = []
    for rank, kinds in enumerate(listed.kinds):
        in_turn = {}
        for kind in (_F, _I, _W):
            stages = [chunk * num_ranks + rank for chunk in (chunks if kind is _F else reversed(chunks))]
            actions = [by_microbatch(stage, kind, num_microbatches) for stage in stages]
            in_turn[kind] = iter([actions[chunk][microbatch] for chunk, microbatch in taken.forwards])
        orders.append([next(in_turn[kind]) for kind in kinds])
    return in_slices(orders, taken.slices)


class _Ranks:
    """The ranks while they choose. `forwards[r]`, `inputs[r]`: the ends of the F and I that rank r has started."""

    def __init__(
        self, turns: Turns, num_ranks: int, ticks: StageTicks, rule: ChoiceRule, after_input: Fraction
    ) -> None:
        self.last = num_ranks - 1
        self.total, self.before, self.own = len(turns.forwards), turns.before, turns.own
        self.hop = ticks.hop if num_ranks > 1 else 0
        self.durations = {kind: ticks.lasts[kind] for kind in (_F, _I, _W)}
        whole, after = after_input.denominator, after_input.numerator
        self.whole = whole
        self.takes = {_F: whole, _I: max(0, after - whole), _W: 0}
        self.gives = {_F: 0, _I: max(0, whole - after), _W: after}
        self.caps = [cap * whole for cap in rule.caps]
        self.together = NEVER if rule.together is None else rule.together * whole
        self.tails, self.discipline = rule.tails, rule.discipline
        self.patience = {kind: duration // 2 * rule.patient for kind, duration in self.durations.items()}
        self.forwards: list[list[int]] = [[] for _ in range(num_ranks)]
        self.inputs: list[list[int]] = [[] for _ in range(num_ranks)]
        self.done_weights = [0] * num_ranks
        self.held = [0] * num_ranks
        self.free = [0] * num_ranks
        self.idle, self.most_idle = [0] * num_ranks, NEVER
        self.turn = [_I] * num_ranks
        self.kinds: list[list[Kind]] = [[] for _ in range(num_ranks)]
        # By time: ranks that may go on, and what they give back then. Many events coincide, so only times are a heap.
        self.events = {0: [(rank, 0) for rank in range(num_ranks)]}
        self.times = [0]

    def go(self) -> None:
        events, times, held, free, last = self.events, self.times, self.held, self.free, self.last
        while times:
            now = heapq.heappop(times)
            awake = set()
            for rank, gives in events.pop(now):
                awake.add(rank)
                if gives:
                    held[rank] -= gives
                    awake.add(last - rank)
            # Of two ranks that want a pair's last room, the later one gives its micro-batch back sooner.
            for rank in sorted(awake, reverse=True):
                if free[rank] <= now:
                    kind = self._choice(rank, now)
                    if kind is not None:
                        self.idle[rank] += now - free[rank]
                        if self.idle[rank] >= self.most_idle:
                            return
                        self._start(rank, kind, now)

    def _choice(self, rank: int, now: int) -> Kind | None:
        started = len(self.inputs[rank])
        left = self.total - len(self.forwards[rank])
        if self.discipline is not Discipline.GREEDY and started and left > self.tails[rank]:
            turn = self.turn[rank]
            if self._can(rank, turn, now):
                return turn
            if self.discipline is Discipline.TURN:
                return None
        arrives = self._input_ready(rank)
        if arrives <= now:
            return _I
        for kind in (_F, _W):
            if arrives >= now + self.patience[kind] and self._can(rank, kind, now):
                return kind
        if arrives < NEVER:
            self._wake(arrives, rank)
        return None

    def _wake(self, time: int, rank: int, gives: int = 0) -> None:
        if time not in self.events:
            self.events[time] = []
            heapq.heappush(self.times, time)
        self.events[time].append((rank, gives))

    def _can(self, rank: int, kind: Kind, now: int) -> bool:
        if kind is _I:
            return self._input_ready(rank) <= now
        if kind is _F:
            return self._has_room(rank) and self._forward_ready(rank) <= now
        return self.done_weights[rank] < len(self.inputs[rank])

    def _forward_ready(self, rank: int) -> int:
        number = len(self.forwards[rank])
        if number == self.total:
            return NEVER
        if not rank:
            number = self.before[number]
            if number == NONE:
                return 0
        ends = self.forwards[rank - 1]
        return ends[number] + self.hop if number < len(ends) else NEVER

    def _input_ready(self, rank: int) -> int:
        number = len(self.inputs[rank])
        if number == self.total:
            return NEVER
        if rank < self.last:
            ends = self.inputs[rank + 1]
        elif self.before[number] != NONE:
            number, ends = self.before[number], self.inputs[0]
        else:
            own, ends = self.own[number], self.forwards[rank]
            return ends[own] if own < len(ends) else NEVER
        return ends[number] + self.hop if number < len(ends) else NEVER

    def _has_room(self, rank: int) -> bool:
        held = self.held[rank] + self.whole
        if held > self.caps[rank] and self.total - len(self.forwards[rank]) > self.tails[rank]:
            return False
        mirror = self.last - rank
        return held + (self.held[mirror] if mirror != rank else held) <= self.together

    def _start(self, rank: int, kind: Kind, now: int) -> None:
        end = now + self.durations[kind]
        self.kinds[rank].append(kind)
        self.free[rank] = end
        self.held[rank] += self.takes[kind]
        self._wake(end, rank, self.gives[kind])
        if kind is _W:
            self.done_weights[rank] += 1
            self.turn[rank] = _F
        elif kind is _F:
            self.forwards[rank].append(end)
            self.turn[rank] = _I
            self._wake(end + self.hop, rank + 1 if rank < self.last else 0)
        else:
            self.inputs[rank].append(end)
            self.turn[rank] = _W
            self._wake(end + self.hop, rank - 1 if rank else self.last)
