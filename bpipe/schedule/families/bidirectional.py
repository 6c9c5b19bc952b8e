"""Two pipes over the same ranks, in opposite directions.

The first pipe's chunks go up the ranks and down again, in turn; the second pipe is its mirror image, so rank p - 1 - r
has replicas of the stages of rank r. Micro-batches take the pipes in turn, and if both take equally many, orders are
mirror images, too.

Up to p micro-batches make a *unit*: the k-th of each pipe starts two slots after the one before, and the pipes meet in
no slot. More of them are cut into units that follow each other, or a rank chooses by a `PipesRule` each time it is
free. If neither is as short as the family can be, everything is moved later and earlier within what ranks may hold.
Source of the unit: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional
Pipelines", 2021; of its chunks: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating
Large Models Training", 2024.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import ceil
from typing import NamedTuple

from bpipe.schedule.action import Action, Kind, by_microbatch, of_microbatch
from bpipe.schedule.families.family import ALIKE, Family, FamilyOptions, UnitCosts
from bpipe.schedule.families.shift import Shifts, Slack
from bpipe.schedule.families.timing import StageTicks, Work, length, stage_ticks, work_of
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout
from bpipe.schedule.memory import counting
from bpipe.schedule.program import Exchange

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
# With more computations only the units are moved: to move what a rule chose would take seconds more.
_MANY = 40_000
# More moves changed nothing that was tried with up to 16 ranks.
_MOVES = 8
# Computations looked at, about a second and a half.
_MOST_VISITS = 150_000


class Weights(NamedTuple):
    """Weights of a computation: per earlier micro-batch of its pipe, per chunk, and per earlier stage of its chunk."""

    age: int
    chunk: int
    depth: int


@dataclass(frozen=True, slots=True)
class PipesRule:
    """Rule by which ranks choose.

    A rank that holds fewer micro-batches of a chunk than it may computes a forward, else a backward. If `willing(rank)`
    is given, a rank that holds that many computes a forward only if no backward may start. Of several forwards, and of
    several backwards, it takes the one that weighs least.
    """

    forwards: Weights
    backwards: Weights
    willing: Callable[[int], int] | None = None


def layout(num_ranks: int, num_chunks: int) -> Layout:
    """Return the layout of bidirectional pipelines.

    Raises ValueError if the number of ranks is odd.
    """
    if num_ranks % 2:
        nearest = " or ".join(str(even) for even in (num_ranks - 1, num_ranks + 1) if even)
        reason = "the one in the middle would have both replicas of its stages"
        raise ValueError(f"two pipes need an even number of ranks, not {num_ranks}, because {reason}: use {nearest}")
    up = tuple(range(num_ranks))
    first = tuple(rank for chunk in range(num_chunks) for rank in (reversed(up) if chunk % 2 else up))
    return Layout((first, tuple(num_ranks - 1 - rank for rank in first)))


def from_ends(rank: int, num_ranks: int) -> int:
    """Return how many ranks are between this one and the nearer end."""
    return min(rank, num_ranks - 1 - rank)


def first_of_two(num_ranks: int, num_microbatches: int, num_chunks: int, _: int) -> int:
    """Return the least that the first rank holds of both pipes: all stages in a full pipeline, else half as many."""
    is_full = num_microbatches >= 2 * num_ranks
    return num_chunks * num_ranks if is_full else num_chunks * min(num_ranks, num_microbatches) // 2


def shortest(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    costs: UnitCosts,
    limits: Sequence[int],
    rules: Sequence[PipesRule],
    bubble: Fraction,
) -> Sequence[Sequence[Action]]:
    """Return the fastest of all orders tried: units, what the rules choose, orders for equal costs, and all these
    shifted.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Micro-batches of an iteration, of both pipes.
        num_chunks: Chunks per rank and pipe.
        costs: Durations of forwards and backwards.
        limits: Most micro-batches of a chunk that each rank holds.
        rules: Rules by which ranks may choose their next computation.
        bubble: The bubble in forwards' time, with a forward of 1 and a backward of 2, at which the search stops.
    """
    placed, ticks = layout(num_ranks, num_chunks), stage_ticks(costs, num_chunks)
    forward, backward = ticks.lasts[_FORWARD], ticks.lasts[_BACKWARD]
    alike = backward == 2 * forward and not ticks.hop
    goal = ceil((3 * num_microbatches + bubble) * num_chunks * forward) if alike else 0

    def work(orders: Sequence[Order]) -> Work[int]:
        return work_of(placed, num_microbatches, orders, ticks)

    in_a_row = units(placed, num_ranks, num_microbatches)
    unit_work = work(in_a_row)
    best = ChosenOrders(in_a_row, length(unit_work))
    for rule in rules:
        if best.ticks > goal:
            best = _shorter(best, _Choosing(placed, num_microbatches, ticks, limits, rule).chosen())
    if costs != ALIKE:
        usual = shortest(num_ranks, num_microbatches, num_chunks, ALIKE, limits, rules, bubble)
        best = _shorter(best, ChosenOrders(usual, length(work(usual))))
    chosen = best.orders
    # The pipes are mirror images only if they take equally many micro-batches.
    if best.ticks > goal and not num_microbatches % 2:
        best = _shorter(best, _shifted(unit_work, placed, limits, goal))
        if best.ticks > goal and chosen is not in_a_row and sum(map(len, chosen)) <= _MANY:
            best = _shorter(best, _shifted(work(chosen), placed, limits, goal))
    return best.orders


def _shorter(best: ChosenOrders, candidate: ChosenOrders | None) -> ChosenOrders:
    return best if candidate is None or best.ticks <= candidate.ticks else candidate


def _shifted(work: Work[int], placed: Layout, limits: Sequence[int], goal: int) -> ChosenOrders:
    """Return the shortest orders found from mirrored ones by moving everything later, then earlier (`shift`).

    Mirror images do the same at the same time, so half of the ranks represent all, as if both pipes were folded in the
    middle: what rank p - 1 - r makes of a micro-batch, rank r makes of the other pipe's.
    """
    rows = work.rows[: len(work.rows) // 2]
    number = sum(map(len, rows))
    job_of = {action: job for job, (action,) in enumerate(work.actions[:number])}

    def image(job: int) -> int:
        """Return the job or, of the other half, its mirror image, from which a message takes as long."""
        return job if job < number else job_of[_mirrored(work.actions[job][0])]

    needed = [[(image(maker), lag) for maker, lag in needed] for needed in work.needed[:number]]
    half = Work(work.actions[:number], work.rank[:number], work.lasts[:number], needed, rows)
    moves = min(_MOVES, _MOST_VISITS // number)
    ticks, moved = Shifts(half, counting(placed.num_stages), limits[: len(rows)]).to_and_fro(Slack(), moves, goal)
    orders = [[half.actions[job][0] for job in row] for row in (rows if moved is None else moved)]
    return ChosenOrders([*orders, *([*map(_mirrored, order)] for order in reversed(orders))], ticks)


def _mirrored(action: Action) -> Action:
    return of_microbatch(action, action.microbatch ^ 1)


def units(placed: Layout, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the orders of one unit after the other."""
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    forwards, backwards = _actions(placed.num_stages, num_microbatches)
    for first in range(0, num_microbatches, num_ranks):
        slots: list[list[tuple[int, int, Action]]] = [[] for _ in orders]
        for microbatch in range(first, min(first + num_ranks, num_microbatches)):
            delay = (microbatch - first) // 2 * 2
            for stage in range(placed.num_stages):
                row = slots[placed.rank_of(stage, microbatch)]
                row.append((stage + delay, microbatch, forwards[stage][microbatch]))
                row.append((2 * placed.num_stages - 1 - stage + delay, microbatch, backwards[stage][microbatch]))
        for order, row in zip(orders, slots, strict=True):
            order += [action for _, _, action in sorted(row)]
    return orders


def _actions(num_stages: int, num_microbatches: int) -> tuple[list[Sequence[Action]], ...]:
    """Return forwards and backwards, each by stage and micro-batch."""
    kinds = (_FORWARD, _BACKWARD)
    return tuple([by_microbatch(stage, kind, num_microbatches) for stage in range(num_stages)] for kind in kinds)


class ChosenOrders(NamedTuple):
    """Every rank's order, and how many ticks it takes."""

    orders: Sequence[Sequence[Action]]
    ticks: int


class _Choosing:
    """The ranks while they choose. `ready[rank]` are the forwards, and the backwards, that may start, as heaps."""

    def __init__(
        self, placed: Layout, num_microbatches: int, ticks: StageTicks, limits: Sequence[int], rule: PipesRule
    ) -> None:
        self.placed, self.ticks, self.limits = placed, ticks, limits
        num_ranks = len(limits)
        self.weights = {_FORWARD: rule.forwards, _BACKWARD: rule.backwards}
        self.last_stage, self.total = placed.num_stages - 1, 2 * placed.num_stages * num_microbatches
        self.willing = limits if rule.willing is None else [rule.willing(rank) for rank in range(num_ranks)]
        self.ready: list[dict[Kind, list[tuple[int, int, int, Action]]]] = [
            {_FORWARD: [], _BACKWARD: []} for _ in range(num_ranks)
        ]
        self.held = [0] * num_ranks
        self.free = [0] * num_ranks
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        # (time, number, the action that may start then, or the rank that is free again)
        self.events: list[tuple[int, int, Action | int]] = []
        self.numbers = count()
        self.forwards, self.backwards = _actions(placed.num_stages, num_microbatches)
        for microbatch in range(num_microbatches):
            self._add_event(0, self.forwards[0][microbatch])

    def chosen(self) -> ChosenOrders | None:
        """Return what the ranks choose; None if the rule makes them wait for each other."""
        while self.events:
            now = self.events[0][0]
            awake = set()
            while self.events and self.events[0][0] == now:
                _, _, event = heapq.heappop(self.events)
                awake.add(event if isinstance(event, int) else self._arrive(event))
            for rank in awake:
                if self.free[rank] <= now:
                    self._choose(rank, now)
        is_complete = sum(map(len, self.orders)) == self.total
        return ChosenOrders(self.orders, max(self.free)) if is_complete else None

    def _add_event(self, time: int, event: Action | int) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), event))

    def _arrive(self, action: Action) -> int:
        rank = self.placed.rank_of_action(action)
        begins = self.placed.rank_of(0, action.microbatch)
        chunk, depth = divmod(action.stage, len(self.orders))
        weights = self.weights[action.kind]
        key = weights.age * (action.microbatch // self.placed.num_pipes) + weights.chunk * chunk + weights.depth * depth
        # Of two with one weight, the one whose pipe begins nearer, so that mirror images choose alike.
        heapq.heappush(self.ready[rank][action.kind], (key, abs(rank - begins), action.microbatch, action))
        return rank

    def _choose(self, rank: int, now: int) -> None:
        forwards, backwards = self.ready[rank].values()
        held = self.held[rank]
        if forwards and (held < self.willing[rank] or (held < self.limits[rank] and not backwards)):
            chosen = forwards
        elif backwards:
            chosen = backwards
        else:
            return
        action = heapq.heappop(chosen)[-1]
        self.orders[rank].append(action)
        end = self.free[rank] = now + self.ticks.lasts[action.kind]
        self._add_event(end, rank)
        stage, microbatch = action.stage, action.microbatch
        if action.kind is _FORWARD:
            self.held[rank] += 1
            last = stage == self.last_stage
            following = self.backwards[stage][microbatch] if last else self.forwards[stage + 1][microbatch]
        else:
            # The rank does nothing else before the end, so it may count as given back at once.
            self.held[rank] -= 1
            if stage == 0:
                return
            following = self.backwards[stage - 1][microbatch]
        hop = self.ticks.hop if self.placed.rank_of_action(following) != rank else 0
        self._add_event(end + hop, following)


# (num_ranks, num_chunks) -> most micro-batches of a chunk per rank, rules to try, and the bubble of the shortest order.
_Choice = Callable[[int, int], tuple[Sequence[int], Sequence[PipesRule], Fraction]]


def _family(name: str, summary: str, choice: _Choice, fill: int, chunks: bool = False) -> Family:
    """Return a family of two pipes with whole backwards; `chunks` tells whether a rank has several in each."""

    def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> Sequence[Order]:
        return shortest(num_ranks, num_microbatches, num_chunks, options.costs, *choice(num_ranks, num_chunks))

    return Family(
        name,
        layout,
        orders,
        Exchange.POSTED,
        min_chunks=2 if chunks else 1,
        max_chunks=None if chunks else 1,
        fill=fill,
        ahead=first_of_two,
        num_pipes=2,
        summary=summary,
    )


def _chimera(num_ranks: int, num_chunks: int) -> tuple[list[int], list[PipesRule], Fraction]:
    """A rank holds at most p micro-batches, of both pipes together.

    Of m = p, one unit, rank r holds p / 2 + 1 + min(r, p - 1 - r): the ranks in the middle hold most, and mirror images
    alike. With a forward of 1 and a backward of 2 an iteration of a multiple of p micro-batches takes 3 m + 2 (p - 2).
    With more than p micro-batches ranks compute a forward whenever there is room for it. Source: Li and Hoefler, 2021.
    """
    return [num_ranks] * num_ranks, [PipesRule(Weights(4, 0, 1), Weights(4, 0, 1))], Fraction(2 * (num_ranks - 2))


def _mixpipe(num_ranks: int, num_chunks: int) -> tuple[list[int], list[PipesRule], Fraction]:
    """Rank r holds at most p + 1 + min(r, p - 1 - r) micro-batches, of both pipes together: the middle ranks 3 p / 2.

    With a forward of 1 and a backward of 2 an iteration of 2 p micro-batches, 3 p and so on takes 3 m + 3 (p - 2) / 2.
    Up to p micro-batches are Chimera's unit unless something is shorter. Source: Zhang et al., "MixPipe: Efficient
    Bidirectional Pipeline Parallelism for Training Large-Scale Models", 2023, which regulates how many are let in; this
    slope is a reading of it.
    """
    limits = [num_ranks + 1 + from_ends(rank, num_ranks) for rank in range(num_ranks)]
    return limits, [PipesRule(Weights(8, 0, -1), Weights(8, 0, 1))], Fraction(3 * (num_ranks - 2), 2)


def _bitpipe(num_ranks: int, num_chunks: int) -> tuple[list[int], list[PipesRule], Fraction]:
    """A rank holds at most p micro-batches of its share, of both pipes together; with two chunks each pipe is a V.

    With a forward of 1 and a backward of 2, of all chunks, m = p micro-batches, one unit, take 3 m + 2 (p - 2) / v, and
    so do 2 p, 3 p and 4 p for p up to 16, except for a third of a forward with p = 16, v = 3 and m = 64. The best rule
    depends on p and m: rules prefer deeper forwards, and backwards of the last chunk or the oldest. Source: Wu et al.,
    2024; the rules are our own.
    """
    last_chunk_first, oldest_first = Weights(1, -64, 0), Weights(1, 0, 0)
    rules = [
        # The first of two equally long orders is taken: this rule sends least that is not needed soon.
        PipesRule(Weights(4 * num_ranks, num_ranks, -16), oldest_first),
        PipesRule(Weights(4 * num_ranks, num_ranks, -8), last_chunk_first),
        PipesRule(Weights(8, -16, -6), oldest_first),
    ]
    return [num_chunks * num_ranks] * num_ranks, rules, Fraction(2 * (num_ranks - 2), num_chunks)


def _bitpipe_early(num_ranks: int, num_chunks: int) -> tuple[list[int], list[PipesRule], Fraction]:
    """A rank holds at most p + (min(r, p - 1 - r) + 2) / v micro-batches of its share.

    With two chunks these are 9.5 of 8 ranks and 19.5 of 16; the paper says 3 (p - 1) / 2. With a forward of 1 and a
    backward of 2, of all chunks, an iteration of 2 p, 3 p or 4 p micro-batches takes 3 m + 3 (p - 2) / 2 v for p up to
    16, at times up to half a forward more with three or four chunks of more than 10 ranks: a quarter less waiting than
    BitPipe's. One unit, of p micro-batches, is BitPipe's unless something is shorter. Source: Wu et al., 2024; the
    rules are our own.
    """
    willing = [num_chunks * num_ranks + from_ends(rank, num_ranks) for rank in range(num_ranks)]
    rule = PipesRule(Weights(4, 0, -10), Weights(2, 6, 13), willing.__getitem__)
    return [count + 2 for count in willing], [rule], Fraction(3 * (num_ranks - 2), 2 * num_chunks)


TWO_PIPES = (
    _family(
        "chimera",
        "Chimera: two pipes in opposite directions, with one stage of each per rank",
        _chimera,
        fill=2,
    ),
    _family("mixpipe", "MixPipe: Chimera's two pipes with more micro-batches admitted", _mixpipe, fill=3),
    _family(
        "bitpipe",
        "BitPipe: two pipes in opposite directions, each with several chunks per rank that go up and down the ranks in turn",
        _bitpipe,
        fill=2,
        chunks=True,
    ),
    _family(
        "bitpipe-early",
        "BitPipe with early forwarding: admits more micro-batches, most of them on the ranks in the middle",
        _bitpipe_early,
        fill=3,
        chunks=True,
    ),
)
