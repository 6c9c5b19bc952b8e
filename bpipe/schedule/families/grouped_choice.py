"""Make orders of grouped interleaving for a bound.

In: sizes, costs, a `RankLimit`. Out: orders, those that take least time first.

A pair that shares its memory pays for what its ranks hold together, so ranks are held to that, and not each to its own.
How micro-batches are split into groups and how ranks choose is searched: a few splits with two manners of choosing,
then the best of them in every direction; the published order is among them. Below groups of p / 2, beats are tried
besides. Nothing is random, and the number of orders tried depends on sizes alone. Whether pairs keep the bound,
transfers included, is for `balance.pairs` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import ceil, floor

from bpipe.schedule.action import Action
from bpipe.schedule.clock import length
from bpipe.schedule.families.family import FamilyOptions, OrderChoice, RankLimit, UnitCosts
from bpipe.schedule.families.interleaved import layout
from bpipe.schedule.families.list_scheduler import ChoiceRule, Discipline, ListSchedule, actions_of, schedule_list
from bpipe.schedule.families.periodic import Period, periodic_orders
from bpipe.schedule.families.timing import stage_ticks, work_of
from bpipe.schedule.families.turns import evenly, groups_of, spread, tapered, turns

# Computations listed in one choice at most, for p ranks so many times p squared: about a second at p = 8, a few from p
# = 16 on.
_MOST_COMPUTATIONS, _BY_RANKS = 2_000_000, 8_000
# Orders tried, whatever their size.
_FEWEST_ORDERS, _MOST_ORDERS = 12, 160
# How many of the best are varied.
_VARIED = 3
_ROUNDS = 2
_TURN, _SOFT, _GREEDY = Discipline.TURN, Discipline.SOFT, Discipline.GREEDY


@dataclass(frozen=True, slots=True)
class OrderHeuristic:
    """A heuristic by which ranks choose, for any sizes.

    `extra` is added to the published caps; None means no caps. `tail` names one of `_tail`. `early`: only the first
    half of the ranks has caps. `spare`: how much of what a pair may hold is left for what is under way; None for no
    common limit, as published. `slope`: caps that fall by so much a rank and average the bound, instead of the
    published ones, which fall by one.
    """

    extra: int | None
    discipline: Discipline
    tail: str
    spare: int | None = 1
    patient: bool = False
    early: bool = False
    slope: Fraction | None = None

    @property
    def description(self) -> str:
        """The heuristic in words, for logs."""
        turns = {_TURN: "I, W and F in turn", _SOFT: "in turn where that can start", _GREEDY: "I, else F, else W"}[
            self.discipline
        ]
        if self.spare is None:
            return f"ranks keep the published limits, {turns}"
        return f"pairs share one limit, {turns}"


PUBLISHED = tuple(OrderHeuristic(0, discipline, "none", None) for discipline in Discipline)
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
    # Where ranks wait for nobody's turn, pairs hand over to their later ranks sooner.
    OrderHeuristic(0, _GREEDY, "slanted", slope=Fraction(2, 3)),
    OrderHeuristic(0, _GREEDY, "slanted", slope=Fraction(3, 4)),
    OrderHeuristic(-1, _GREEDY, "slanted", slope=Fraction(2, 3)),
)
_BEATS = tuple(product(((0, 2), (0, 4), (2, 4), (0, 2, 4)), ((0, 2), (0, 4), (2, 4)), (0, 2)))


def orders_within(
    num_ranks: int, num_microbatches: int, num_chunks: int, limit: RankLimit, options: FamilyOptions
) -> Iterator[tuple[OrderChoice, list[list[Action]]]]:
    """Yield orders for a bound, each with its description."""
    tried = _HeuristicSearch(num_ranks, num_microbatches, num_chunks, options.costs, limit)
    for sizes, rule, listed in tried.search():
        yield OrderChoice(sizes, rule), actions_of(listed, turns(sizes, num_chunks))


class _HeuristicSearch:
    """What has been tried: `found` holds it by split and manner, `beaten` the orders in beats."""

    def __init__(
        self, num_ranks: int, num_microbatches: int, num_chunks: int, costs: UnitCosts, limit: RankLimit
    ) -> None:
        self.p, self.m, self.v, self.limit = num_ranks, num_microbatches, num_chunks, limit
        self.at = stage_ticks(costs, num_chunks)
        # What is left for whole groups: the pair's slope, and what W needs beyond what its F saved, aside.
        above = limit.bound - Fraction(num_ranks + 1, 2) - max(Fraction(), limit.after_input - 1)
        self.group = max(Fraction(1), above / (num_chunks - 1)) if num_chunks > 1 else Fraction(num_microbatches)
        most = min(_MOST_COMPUTATIONS, _BY_RANKS * num_ranks**2) // (3 * num_ranks * num_microbatches * num_chunks)
        self.left = min(_MOST_ORDERS, max(_FEWEST_ORDERS, most))
        self.found: dict[tuple[tuple[int, ...], OrderHeuristic], ListSchedule] = {}
        self.beaten: list[tuple[tuple[int, ...], ListSchedule]] = []

    def search(self) -> Iterator[tuple[tuple[int, ...], str, ListSchedule]]:
        splits = self._splits()
        for size in {min(self.m, max(1, floor(self.group) - less)) for less in (0, 1)}:
            self._try(product([groups_of(self.m, size)], PUBLISHED))
        self._try(product(splits, _MANNERS[:2]))
        if 2 * min(splits[0]) < self.p and self.v > 1:
            self._try_beats()
        for _ in range(_ROUNDS):
            for sizes, _ in self._best():
                self._try(product([sizes], _MANNERS))
            for _, manner in self._best():
                self._try(product(splits, [manner]))
        every = [(sizes, "in beats", listed) for sizes, listed in self.beaten]
        every += [(sizes, manner.description, listed) for (sizes, manner), listed in self.found.items()]
        # Of orders that take equally long one is enough, if it is the same order.
        return iter({(one[0], one[2].kinds): one for one in sorted(every, key=lambda one: one[2].makespan)}.values())

    def _best(self) -> list[tuple[tuple[int, ...], OrderHeuristic]]:
        return sorted(self.found, key=lambda key: self.found[key].makespan)[:_VARIED]

    def _try(self, keys: Iterable[tuple[tuple[int, ...], OrderHeuristic]]) -> None:
        for sizes, manner in keys:
            if self.left and (sizes, manner) not in self.found:
                self.left -= 1
                listed = schedule_list(
                    turns(sizes, self.v), self.p, self.at, self._rule(manner, max(sizes)), self.limit.after_input
                )
                if listed is not None:
                    self.found[sizes, manner] = listed

    def _rule(self, manner: OrderHeuristic, group: int) -> ChoiceRule:
        caps = [self._cap(manner, group, rank) + (manner.extra or 0) for rank in range(self.p)]
        uncapped = 0 if manner.extra is None else self.p // 2 if manner.early else self.p
        caps[uncapped:] = [self.m * self.v] * (self.p - uncapped)
        together = None if manner.spare is None else 2 * self.limit.bound - manner.spare
        return ChoiceRule(tuple(caps), self._tail(manner.tail), manner.discipline, together, manner.patient)

    def _cap(self, manner: OrderHeuristic, group: int, rank: int) -> int:
        if manner.slope is None:
            return (self.v - 1) * group + self.p - rank
        return floor(self.limit.bound + manner.slope * (Fraction(self.p - 1, 2) - rank))

    def _tail(self, name: str) -> tuple[int, ...]:
        ranks = range(self.p)
        tails = {
            "none": [0] * self.p,
            "slanted": [2 * rank // 3 for rank in ranks],
            "short": [2 * self.v] * self.p,
            "long": [max(0, 8 * self.v - 2 * rank) for rank in ranks],
        }
        return tuple(tails[name])

    def _splits(self) -> list[tuple[int, ...]]:
        """Ways to split the micro-batches into groups, the most promising first, each once."""
        if self.v == 1:
            return [(self.m,)]
        fewest = max(1, ceil(self.m / self.group))
        made: list[tuple[int, ...] | None] = []
        for more in (0, 1, 2, -1, 3):
            groups = min(max(1, fewest + more), self.m)
            made.append(evenly(self.m, groups))
            if more in (0, 1):
                made += [tapered(self.m, groups, Fraction(share, 10)) for share in (1, 2, 3)]
                made.append(spread(self.m, groups))
            if more == 3:
                made.append(evenly(self.m, groups)[::-1])
        return list(dict.fromkeys(sizes for sizes in made if sizes is not None))

    def _try_beats(self) -> None:
        """Orders in beats for groups from p / 3 to p / 2, as many as the budget leaves."""
        stages, at = layout(self.p, self.v), self.at
        for size in range(-(-self.p // 3), self.p // 2 + 1):
            if size > min(self.m, ceil(self.group)):
                continue
            sizes = groups_of(self.m, size)
            taken = turns(sizes, self.v)
            for forwards, backwards, later in _BEATS:
                if self.left <= _FEWEST_ORDERS:
                    return
                self.left -= 1
                kinds = periodic_orders(
                    taken, self.p, Period(forwards, backwards, later, (self.v - 1) * size + self.p + 1)
                )
                if kinds is not None:
                    listed = ListSchedule(tuple(map(tuple, kinds)), Fraction())
                    ticks = length(work_of(stages, self.m, actions_of(listed, taken), at))
                    self.beaten.append((sizes, ListSchedule(listed.kinds, Fraction(ticks, at.per_unit))))
