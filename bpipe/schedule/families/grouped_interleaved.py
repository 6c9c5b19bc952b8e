"""Grouped interleaving: chunks round robin, groups of any size, backwards in halves.

Stage s is on rank s % p, as in interleaved 1F1B, and groups of g micro-batches take turns through the chunks, here also
fewer than p of them. Rank r runs (v - 1) g + p - r forwards ahead, the most micro-batches of a chunk that it holds, and
then I, W and F in turn. What ranks hold thus falls evenly from first to last, each pair holds the same together, and
balancing levels it: to (v - 1) g + (p + 1) / 2, and the one on its way. From g = p / 2 on the pipeline runs at its full
rate; with fewer, ranks wait. If a small last group would make ranks in strict turns wait for ever, or only longer, they
take what can start: the order is that of the fastest discipline at the given costs. A smaller last group costs time,
not memory. Cut into k slices a rank runs k - 1 further ahead, and groups are of whole micro-batches and at least p / 2
slices. Source of the order: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory
Optimization", 2025.
"""

import enum
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, product
from math import ceil, floor
from typing import NamedTuple

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.families.family import ALIKE, Family, FamilyOptions, UnitCosts
from bpipe.schedule.families.interleaved import layout
from bpipe.schedule.families.shards import BESIDE_HALVES, further_forwards, further_within
from bpipe.schedule.families.timing import NEVER, StageTicks, length, stage_ticks, work_of
from bpipe.schedule.families.turns import (
    NONE,
    Turns,
    WarmUp,
    evenly,
    groups_of,
    in_slices,
    spread,
    tapered,
    turns,
    warm_up,
)
from bpipe.schedule.layout import microbatches_of
from bpipe.schedule.program import Exchange

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
    turns: Turns, num_ranks: int, ticks: StageTicks, rule: ChoiceRule, shorter_than: Fraction | None = None
) -> ListSchedule | None:
    """Return what the ranks choose; None if the rule makes them wait for each other, or it is not `shorter_than` a
    makespan.

    Args:
        turns: The order in which each rank meets its computations.
        num_ranks: Ranks of the pipeline.
        ticks: Durations, by stage and kind.
        rule: Which computation a rank takes of those that are ready.
        shorter_than: A makespan; None accepts any.
    """
    run = _Ranks(turns, num_ranks, ticks, rule)
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
    """The ranks while they choose what to compute next, event by event.

    The k-th F needs the k-th of the rank before or, on the first rank, that of the last rank for the chunk before; the
    k-th I the other way around; the k-th W comes after the k-th I. So each of the three is in turn order on every rank,
    and ranks choose only between kinds. A rank holds a micro-batch from the start of its F to the end of its W.
    `forwards[r]` and `inputs[r]` are the ends of the F and I that rank r has started.
    """

    def __init__(self, turns: Turns, num_ranks: int, ticks: StageTicks, rule: ChoiceRule) -> None:
        self.last = num_ranks - 1
        self.total, self.before, self.own = len(turns.forwards), turns.before, turns.own
        self.hop = ticks.hop if num_ranks > 1 else 0
        self.durations = {kind: ticks.lasts[kind] for kind in (_F, _I, _W)}
        self.caps, self.together = rule.caps, NEVER if rule.together is None else rule.together
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
        held = self.held[rank] + 1
        if held > self.caps[rank] and self.total - len(self.forwards[rank]) > self.tails[rank]:
            return False
        mirror = self.last - rank
        return held + (self.held[mirror] if mirror != rank else held) <= self.together

    def _start(self, rank: int, kind: Kind, now: int) -> None:
        end = now + self.durations[kind]
        self.kinds[rank].append(kind)
        self.free[rank] = end
        self.held[rank] += kind is _F
        self._wake(end, rank, int(kind is _W))
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


# Most computations listed in one choice, in all and times the square of the number of ranks: about a second with 8
# ranks, a few from 16 on.
_MOST_COMPUTATIONS, _BY_RANKS = 2_000_000, 8_000
# Orders tried, whatever their size.
_FEWEST_ORDERS, _MOST_ORDERS = 12, 160
# Number of the best that are varied, and rounds of variation.
_VARIED, _ROUNDS = 3, 2
# Slots of a period of orders in beats.
_PERIOD = 6
_TURN, _SOFT, _GREEDY = Discipline.TURN, Discipline.SOFT, Discipline.GREEDY


def usual_group(num_ranks: int) -> int:
    """Return p / 2, rounded up: no smaller group keeps a pipeline at its full rate."""
    return -(-num_ranks // 2)


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[list[Action]]:
    """Return interleaved orders in groups of the size asked."""
    slices, costs = options.slices, options.costs
    usual = usual_group(microbatches_of(num_ranks, slices))
    group = min(usual if options.group_size is None else options.group_size, num_microbatches)
    taken = turns(groups_of(num_microbatches, group), num_chunks, slices)
    ticks = stage_ticks(costs, num_chunks * slices)
    caps = tuple((num_chunks - 1) * group * slices + slices - 1 + num_ranks - rank for rank in range(num_ranks))
    whole = num_microbatches % group == 0
    in_step = None
    if slices > 1 and whole:
        # In groups of fewer slices than ranks, backwards that begin as soon as they can are out of step with the ranks
        # before.
        in_step = [_in_turn(rank, num_ranks, taken, cap) for rank, cap in enumerate(caps)]
        if costs == ALIKE:
            return in_step
    # At equal costs no other discipline is shorter for whole groups that fill the pipeline, as a test finds for all
    # sizes that it tries.
    strict = costs == ALIKE and whole and 2 * group * slices >= num_ranks
    shortest = _shortest(taken, num_ranks, ticks, caps, (Discipline.TURN,) if strict else tuple(Discipline))
    if in_step is not None:
        work = work_of(layout(num_ranks, num_chunks), num_microbatches * slices, in_step, ticks)
        if length(work) <= shortest.makespan * ticks.per_unit:
            return in_step
    return actions_of(shortest, taken)


def _shortest(
    taken: Turns, num_ranks: int, ticks: StageTicks, caps: tuple[int, ...], disciplines: tuple[Discipline, ...]
) -> ListSchedule:
    """Return the shortest schedule that one of these disciplines makes."""
    shortest = None
    for discipline in disciplines:
        rule, least = ChoiceRule(caps, (0,) * num_ranks, discipline), None if shortest is None else shortest.makespan
        shortest = schedule_list(taken, num_ranks, ticks, rule, shorter_than=least) or shortest
    assert shortest is not None, "who takes what can start never waits for ever"
    return shortest


def _in_turn(rank: int, num_ranks: int, taken: Turns, warm_up_forwards: int) -> list[Action]:
    """Return one rank's order by slices: a warm-up, and then I, W and F in turn."""
    last = taken.num_chunks - 1
    forwards = [Action(chunk * num_ranks + rank, Kind.FORWARD, number) for chunk, number in taken.forwards]
    order, left = forwards[:warm_up_forwards], iter(forwards[warm_up_forwards:])
    for chunk, number in taken.forwards:
        stage = (last - chunk) * num_ranks + rank
        order += [
            Action(stage, Kind.BACKWARD_INPUT, number),
            Action(stage, Kind.BACKWARD_WEIGHT, number),
            *islice(left, 1),
        ]
    return in_slices([order], taken.slices)[0]


def _ahead(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> int:
    """Return a group through all chunks but the last and one micro-batch through that, p of them in a full pipeline."""
    full = num_microbatches >= 3 * -(-num_ranks // group) * group
    return (num_chunks - 1) * min(group, num_microbatches) + (num_ranks if full else 1)


def _warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> WarmUp:
    """Return what each rank may hold, with which it begins."""
    return warm_up(
        [(num_chunks - 1) * group + num_ranks - rank for rank in range(num_ranks)], num_microbatches, num_chunks, group
    )


def _sliced_warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int | None, slices: int) -> WarmUp:
    """Return what each rank holds if groups are whole; in others ranks take what can start, so nothing is known."""
    size = min(group or usual_group(microbatches_of(num_ranks, slices)), num_microbatches)
    together, is_whole = size * slices, num_microbatches % size == 0
    lengths = [(num_chunks - 1) * together + slices - 1 + num_ranks - rank for rank in range(num_ranks)]
    return warm_up(lengths if is_whole else [0] * num_ranks, num_microbatches * slices, num_chunks, together)


@dataclass(frozen=True, slots=True)
class OrderHeuristic:
    """A heuristic by which ranks choose, for any sizes.

    Attributes:
        extra: Added to the published caps; None for no caps.
        discipline: What comes next.
        tail: Name of a tail in `_rule`.
        spare: How much of what a pair may hold is left for what is on its way; None for no common limit, as published.
        patient: As in `ChoiceRule`.
        early: Whether only the first half of the ranks has caps.
        slope: Caps fall by this per rank and average the bound; None for the published ones, which fall by one.
    """

    extra: int | None
    discipline: Discipline
    tail: str
    spare: int | None = 1
    patient: bool = False
    early: bool = False
    slope: Fraction | None = None


_PUBLISHED = tuple(OrderHeuristic(0, discipline, "none", None) for discipline in Discipline)
_MANNERS = (
    OrderHeuristic(0, _TURN, "slanted"),
    OrderHeuristic(0, _SOFT, "slanted", patient=True),
    OrderHeuristic(0, _TURN, "none", 0),
    OrderHeuristic(1, _TURN, "slanted"),
    OrderHeuristic(0, _TURN, "short"),
    OrderHeuristic(None, _SOFT, "slanted", patient=True),
    OrderHeuristic(None, _SOFT, "short", patient=True),
    OrderHeuristic(0, _SOFT, "long", patient=True),
    OrderHeuristic(0, _GREEDY, "none", patient=True),
    OrderHeuristic(1, _GREEDY, "none"),
    OrderHeuristic(None, _GREEDY, "none"),
    OrderHeuristic(0, _SOFT, "none", patient=True),
    OrderHeuristic(1, _SOFT, "short", patient=True),
    OrderHeuristic(0, _SOFT, "short", patient=True),
    OrderHeuristic(0, _SOFT, "slanted", early=True),
    OrderHeuristic(1, _GREEDY, "none", 0),
    OrderHeuristic(0, _TURN, "short", early=True),
    OrderHeuristic(0, _SOFT, "slanted", 0, patient=True),
    OrderHeuristic(0, _TURN, "slanted", 0, patient=True),
    OrderHeuristic(1, _SOFT, "slanted", patient=True, early=True),
    # Without turns, pairs pass their room on to their later ranks sooner.
    OrderHeuristic(0, _GREEDY, "slanted", slope=Fraction(2, 3)),
    OrderHeuristic(0, _GREEDY, "slanted", slope=Fraction(3, 4)),
    OrderHeuristic(-1, _GREEDY, "slanted", slope=Fraction(2, 3)),
)
_BEATS = tuple(product(((0, 2), (0, 4), (2, 4), (0, 2, 4)), ((0, 2), (0, 4), (2, 4)), (0, 2)))


def orders_within(
    num_ranks: int, num_microbatches: int, num_chunks: int, bound: int, options: FamilyOptions
) -> Iterator[tuple[tuple[int, ...], list[list[Action]]]]:
    """Yield orders for a bound, fastest first, each with the sizes of its groups.

    A pair that shares its memory is limited by what its ranks hold together, so the search limits that instead of each
    rank. It searches how micro-batches are split into groups and how ranks choose: a few splits with two manners of
    choosing, then the best of them in every direction; the published order is among them. For groups below p / 2, it
    also tries orders in beats. Nothing is random, and the number of orders tried depends on sizes alone.
    `balance.pairs` decides whether pairs keep the bound, transfers included.
    """
    search = _HeuristicSearch(num_ranks, num_microbatches, num_chunks, options.costs, bound)
    for sizes, listed in search.search():
        yield sizes, actions_of(listed, turns(sizes, num_chunks))


class _HeuristicSearch:
    """The orders tried so far by split and manner, and those in beats."""

    def __init__(self, num_ranks: int, num_microbatches: int, num_chunks: int, costs: UnitCosts, bound: int) -> None:
        self.p, self.m, self.v, self.bound = num_ranks, num_microbatches, num_chunks, bound
        self.ticks = stage_ticks(costs, num_chunks)
        # What is left for whole groups besides the pair's slope.
        above = bound - Fraction(num_ranks + 1, 2)
        self.group = max(Fraction(1), above / (num_chunks - 1)) if num_chunks > 1 else Fraction(num_microbatches)
        orders = min(_MOST_COMPUTATIONS, _BY_RANKS * num_ranks**2) // (3 * num_ranks * num_microbatches * num_chunks)
        self.left = min(_MOST_ORDERS, max(_FEWEST_ORDERS, orders))
        self.tried: dict[tuple[tuple[int, ...], OrderHeuristic], ListSchedule] = {}
        self.beaten: list[tuple[tuple[int, ...], ListSchedule]] = []

    def search(self) -> Iterable[tuple[tuple[int, ...], ListSchedule]]:
        splits = self._splits()
        for size in {min(self.m, max(1, floor(self.group) - less)) for less in (0, 1)}:
            self._try(product([groups_of(self.m, size)], _PUBLISHED))
        self._try(product(splits, _MANNERS[:2]))
        if 2 * min(splits[0]) < self.p and self.v > 1:
            self._try_beats()
        for _ in range(_ROUNDS):
            for sizes, _ in self._best():
                self._try(product([sizes], _MANNERS))
            for _, manner in self._best():
                self._try(product(splits, [manner]))
        orders = [*self.beaten, *((sizes, listed) for (sizes, _), listed in self.tried.items())]
        # Equal orders are returned once.
        return dict.fromkeys(sorted(orders, key=lambda order: order[1].makespan))

    def _best(self) -> list[tuple[tuple[int, ...], OrderHeuristic]]:
        return sorted(self.tried, key=lambda key: self.tried[key].makespan)[:_VARIED]

    def _try(self, keys: Iterable[tuple[tuple[int, ...], OrderHeuristic]]) -> None:
        for sizes, manner in keys:
            if self.left and (sizes, manner) not in self.tried:
                self.left -= 1
                taken, rule = turns(sizes, self.v), self._rule(manner, max(sizes))
                listed = schedule_list(taken, self.p, self.ticks, rule)
                if listed is not None:
                    self.tried[sizes, manner] = listed

    def _rule(self, manner: OrderHeuristic, group: int) -> ChoiceRule:
        caps = [self._cap(manner, group, rank) + (manner.extra or 0) for rank in range(self.p)]
        uncapped = 0 if manner.extra is None else self.p // 2 if manner.early else self.p
        caps[uncapped:] = [self.m * self.v] * (self.p - uncapped)
        together = None if manner.spare is None else 2 * self.bound - manner.spare
        tails = {
            "none": [0] * self.p,
            "slanted": [2 * rank // 3 for rank in range(self.p)],
            "short": [2 * self.v] * self.p,
            "long": [max(0, 8 * self.v - 2 * rank) for rank in range(self.p)],
        }
        return ChoiceRule(tuple(caps), tuple(tails[manner.tail]), manner.discipline, together, manner.patient)

    def _cap(self, manner: OrderHeuristic, group: int, rank: int) -> int:
        if manner.slope is None:
            return (self.v - 1) * group + self.p - rank
        return floor(self.bound + manner.slope * (Fraction(self.p - 1, 2) - rank))

    def _splits(self) -> list[tuple[int, ...]]:
        """Return ways to split the micro-batches into groups, the most promising first, each once."""
        if self.v == 1:
            return [(self.m,)]
        fewest = max(1, ceil(self.m / self.group))
        splits: list[tuple[int, ...] | None] = []
        for more in (0, 1, 2, -1, 3):
            groups = min(max(1, fewest + more), self.m)
            splits.append(evenly(self.m, groups))
            if more in (0, 1):
                splits += [tapered(self.m, groups, Fraction(share, 10)) for share in (1, 2, 3)]
                splits.append(spread(self.m, groups))
            if more == 3:
                splits.append(evenly(self.m, groups)[::-1])
        return list(dict.fromkeys(sizes for sizes in splits if sizes is not None))

    def _try_beats(self) -> None:
        """Try orders in beats for groups from p / 3 to p / 2, as many as the budget allows."""
        largest = min(self.p // 2, self.m, ceil(self.group))
        for size in range(-(-self.p // 3), largest + 1):
            sizes = groups_of(self.m, size)
            taken = turns(sizes, self.v)
            for forwards, backwards, later in _BEATS:
                if self.left <= _FEWEST_ORDERS:
                    return
                self.left -= 1
                period = _Period(forwards, backwards, later, (self.v - 1) * size + self.p + 1)
                entries = _entries(taken, self.p, period)
                if entries is not None:
                    kinds = tuple(_row(rank, self.p, *entries) for rank in range(self.p))
                    orders = actions_of(ListSchedule(kinds, Fraction()), taken)
                    length_ticks = length(work_of(layout(self.p, self.v), self.m, orders, self.ticks))
                    self.beaten.append((sizes, ListSchedule(kinds, Fraction(length_ticks, self.ticks.per_unit))))


class _Period(NamedTuple):
    """A periodic pattern of computations of equal length, for groups too small for turns.

    If groups have fewer than p / 2 micro-batches, ranks that take I, W and F in turn wait for each other. Here time
    goes in periods of six slots, two of them for forwards. A forward enters rank 0 in an even slot and moves a rank per
    slot; the first halves of backwards go the other way in slots of the other parity, so they never wait for each
    other. Weights' halves fill the first free slots. If durations differ, the order is the same and takes longer.

    Attributes:
        forwards: Slots of a period in which forwards enter the first rank.
        backwards: Slots in which backwards enter the last.
        later: Slots by which backwards begin later than they could.
        ahead: Most micro-batches of a chunk that the first rank holds.
    """

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]
    later: int
    ahead: int


def _entries(taken: Turns, num_ranks: int, period: _Period) -> tuple[list[int], list[int]] | None:
    """Return the slots in which forwards start on the first rank, and first halves on the last; None if the first rank
    may hold too little to go on."""
    total, before, own = len(taken.forwards), taken.before, taken.own
    forwards: list[int] = []
    inputs: list[int] = []
    slot = given_back = idle = 0
    while len(inputs) < total:
        idle += 1
        # A forward's room is given back when the W directly after its I is over.
        while given_back < len(inputs) and inputs[given_back] + num_ranks + 1 <= slot:
            given_back += 1
        number = len(forwards)
        in_beat = number < total and slot % _PERIOD in period.forwards and number - given_back < period.ahead
        if in_beat and _has_passed(forwards, before[number], slot - num_ranks):
            forwards.append(slot)
            idle = 0
        number = len(inputs)
        if (slot - num_ranks) % _PERIOD in period.backwards and own[number] < len(forwards):
            first = max(forwards[own[number]], forwards[own[0]] + period.later) + num_ranks
            if first <= slot and _has_passed(inputs, before[number], slot - num_ranks):
                inputs.append(slot)
                idle = 0
        if idle > 2 * (num_ranks + _PERIOD):
            return None
        slot += 1
    return forwards, inputs


def _has_passed(entered: Sequence[int], number: int, latest: int) -> bool:
    """Whether the computation that must be through all ranks, if there is one, entered by the latest slot."""
    return number == NONE or entered[number] <= latest


def _row(rank: int, num_ranks: int, forwards: Sequence[int], inputs: Sequence[int]) -> tuple[Kind, ...]:
    row = {slot + rank: Kind.FORWARD for slot in forwards}
    own_inputs = [slot + num_ranks - 1 - rank for slot in inputs]
    row.update(dict.fromkeys(own_inputs, Kind.BACKWARD_INPUT))
    free = 0
    for slot in own_inputs:
        free = max(free, slot + 1)
        while free in row:
            free += 1
        row[free] = Kind.BACKWARD_WEIGHT
    return tuple(row[slot] for slot in sorted(row))


GROUPED = Family(
    "grouped-interleaved",
    layout,
    orders,
    Exchange.POSTED,
    max_chunks=None,
    takes_groups=True,
    takes_slices=True,
    usual_group=usual_group,
    splits=True,
    fill=3,
    ahead=_ahead,
    warm_up=_warm_up,
    sliced_warm_up=_sliced_warm_up,
    within=orders_within,
    sharded=further_forwards(orders, BESIDE_HALVES),
    sharded_within=further_within(orders_within, BESIDE_HALVES),
    summary="Grouped interleaving: chunks round robin, groups of any size, backwards in halves",
)
