"""Two pipes over the same ranks, in opposite directions.

In: sizes, costs, rules of choice. Out: a Layout, every rank's order.

The first pipe's chunks go up the ranks and down again, in turn; the second pipe is its mirror image, so rank p - 1 - r
has replicas of the stages that rank r has. Micro-batches take the pipes in turn, and where both take equally many,
orders are mirror images, too.

Up to p micro-batches make a *unit*: the k-th of each pipe starts two slots behind the one before, and the pipes meet in
no slot. More of them are cut into units that follow each other, or a rank chooses anew each time it is free (`listed`),
a `PipesRule` says how. Where neither is as short as the family can be, everything is moved later and earlier within
what ranks may hold (`mirrored`). Source of the unit: Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural
Networks with Bidirectional Pipelines", 2021; of its chunks: Wu et al., "BitPipe: Bidirectional Interleaved Pipeline
Parallelism for Accelerating Large Models Training", 2024. Knows no schedule by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import ceil
from typing import NamedTuple

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.clock import length
from bpipe.schedule.families.family import ALIKE, UnitCosts
from bpipe.schedule.families.mirrored import shift_both_ways
from bpipe.schedule.families.timing import StageTicks, stage_ticks, work_of
from bpipe.schedule.layout import Layout

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
# Beyond so many computations the units alone are moved: what a rule chose would take seconds more.
_MANY = 40_000


class Weights(NamedTuple):
    """Weights of a computation: for each micro-batch of its pipe before it, each chunk, and each stage of its chunk
    before its own."""

    age: int
    chunk: int
    depth: int


@dataclass(frozen=True, slots=True)
class PipesRule:
    """Rule by which ranks choose.

    A rank that holds fewer micro-batches of a chunk than it may computes a forward, else a backward.

    `willing(rank)`, where given, is fewer: from so many on it computes a forward only where no backward may start. Of
    several forwards, and of several backwards, it takes the one that weighs least.
    """

    forwards: Weights
    backwards: Weights
    willing: Callable[[int], int] | None = None


def layout(num_ranks: int, num_chunks: int) -> Layout:
    """Return the layout of bidirectional pipelines. Raises ValueError for an odd number of ranks."""
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
    """Return the least that the first rank holds of both pipes: all stages in a full pipeline, half as many with
    fewer units."""
    return (
        num_chunks * num_ranks
        if num_microbatches >= 2 * num_ranks
        else num_chunks * min(num_ranks, num_microbatches) // 2
    )


def shortest(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    costs: UnitCosts,
    most: Sequence[int],
    rules: Sequence[PipesRule],
    bubble: Fraction,
) -> Sequence[Sequence[Action]]:
    """Return the fastest of all orders tried: units, what the rules choose, orders for equal costs, and all these
    shifted.

    A rank holds at most `most[rank]` micro-batches of a chunk. `bubble`: the bubble in forwards' time, with a forward
    of 1 and a backward of 2, at which the search stops.
    """
    placed, at = layout(num_ranks, num_chunks), stage_ticks(costs, num_chunks)
    forward, backward = at.lasts[_FORWARD], at.lasts[_BACKWARD]
    alike = backward == 2 * forward and not at.hop
    best = ceil((3 * num_microbatches + bubble) * num_chunks * forward) if alike else 0
    in_a_row = units(placed, num_ranks, num_microbatches)
    work = work_of(placed, num_microbatches, in_a_row, at)
    found = ChosenOrders(in_a_row, length(work))
    for rule in rules:
        if found.ticks > best:
            found = _shorter(found, schedule_by_rule(placed, num_microbatches, at, most, rule))
    if costs != ALIKE:
        usual = shortest(num_ranks, num_microbatches, num_chunks, ALIKE, most, rules, bubble)
        found = _shorter(found, ChosenOrders(usual, length(work_of(placed, num_microbatches, usual, at))))
    chosen = found.orders
    # The pipes are mirror images only where they take equally many.
    if found.ticks > best and not num_microbatches % 2:
        found = _shorter(found, ChosenOrders(*shift_both_ways(work, placed, most, best)))
        if found.ticks > best and chosen is not in_a_row and len(work.actions) <= _MANY:
            found = _shorter(
                found, ChosenOrders(*shift_both_ways(work_of(placed, num_microbatches, chosen, at), placed, most, best))
            )
    return found.orders


def _shorter(found: ChosenOrders, other: ChosenOrders | None) -> ChosenOrders:
    return found if other is None or found.ticks <= other.ticks else other


def units(placed: Layout, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """Return the orders of one unit behind the other."""
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    there, back = _known(placed.num_stages, num_microbatches)
    for first in range(0, num_microbatches, num_ranks):
        slots: list[list[tuple[int, int, Action]]] = [[] for _ in orders]
        for microbatch in range(first, min(first + num_ranks, num_microbatches)):
            behind = (microbatch - first) // 2 * 2
            for stage in range(placed.num_stages):
                row = slots[placed.rank_of(stage, microbatch)]
                row.append((stage + behind, microbatch, there[stage][microbatch]))
                row.append((2 * placed.num_stages - 1 - stage + behind, microbatch, back[stage][microbatch]))
        for order, row in zip(orders, slots, strict=True):
            order += [action for _, _, action in sorted(row)]
    return orders


def _known(num_stages: int, num_microbatches: int) -> tuple[list[Sequence[Action]], list[Sequence[Action]]]:
    """By stage and micro-batch, forwards and backwards."""
    stages = range(num_stages)
    there, back = ([by_microbatch(stage, kind, num_microbatches) for stage in stages] for kind in (_FORWARD, _BACKWARD))
    return there, back


class ChosenOrders(NamedTuple):
    """Every rank's order, and how many ticks it takes."""

    orders: Sequence[Sequence[Action]]
    ticks: int


def schedule_by_rule(
    placed: Layout, num_microbatches: int, at: StageTicks, most: Sequence[int], rule: PipesRule
) -> ChosenOrders | None:
    """Return what the ranks choose; None where the rule makes them wait for each other."""
    ranks = _Choosing(placed, num_microbatches, at, most, rule)
    ranks.go()
    done = sum(map(len, ranks.orders)) == 2 * placed.num_stages * num_microbatches
    return ChosenOrders(ranks.orders, max(ranks.free)) if done else None


class _Choosing:
    """The ranks while they choose. `ready[rank]` are the forwards, and the backwards, that may start, as heaps."""

    def __init__(
        self, placed: Layout, num_microbatches: int, at: StageTicks, most: Sequence[int], rule: PipesRule
    ) -> None:
        self.placed, self.at, self.most = placed, at, most
        num_ranks = len(most)
        self.weights = {_FORWARD: rule.forwards, _BACKWARD: rule.backwards}
        self.last_stage = placed.num_stages - 1
        self.willing = most if rule.willing is None else [rule.willing(rank) for rank in range(num_ranks)]
        self.ready: list[dict[Kind, list[tuple[int, int, int, Action]]]] = [
            {_FORWARD: [], _BACKWARD: []} for _ in range(num_ranks)
        ]
        self.held = [0] * num_ranks
        self.free = [0] * num_ranks
        self.orders: list[list[Action]] = [[] for _ in range(num_ranks)]
        # (when, how manieth, what may start then, or the rank that is free again)
        self.events: list[tuple[int, int, Action | int]] = []
        self.numbers = count()
        self.there, self.back = _known(placed.num_stages, num_microbatches)
        for microbatch in range(num_microbatches):
            self._tell(0, self.there[0][microbatch])

    def go(self) -> None:
        while self.events:
            now = self.events[0][0]
            awake = set()
            while self.events and self.events[0][0] == now:
                _, _, what = heapq.heappop(self.events)
                awake.add(what if isinstance(what, int) else self._arrive(what))
            for rank in awake:
                if self.free[rank] <= now:
                    self._choose(rank, now)

    def _tell(self, when: int, what: Action | int) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), what))

    def _arrive(self, action: Action) -> int:
        rank = self.placed.rank_of_action(action)
        begins = self.placed.rank_of(0, action.microbatch)
        chunk, depth = divmod(action.stage, len(self.orders))
        weights = self.weights[action.kind]
        key = weights.age * (action.microbatch // self.placed.num_pipes) + weights.chunk * chunk + weights.depth * depth
        # Of two alike, the one whose pipe begins nearer: so mirror images choose alike.
        heapq.heappush(self.ready[rank][action.kind], (key, abs(rank - begins), action.microbatch, action))
        return rank

    def _choose(self, rank: int, now: int) -> None:
        forwards, backwards = self.ready[rank].values()
        held = self.held[rank]
        if forwards and (held < self.willing[rank] or (held < self.most[rank] and not backwards)):
            chosen = forwards
        elif backwards:
            chosen = backwards
        else:
            return
        action = heapq.heappop(chosen)[-1]
        self.orders[rank].append(action)
        end = self.free[rank] = now + self.at.lasts[action.kind]
        self._tell(end, rank)
        stage, microbatch = action.stage, action.microbatch
        if action.kind is _FORWARD:
            self.held[rank] += 1
            last = stage == self.last_stage
            following = self.back[stage][microbatch] if last else self.there[stage + 1][microbatch]
        else:
            # Nothing else happens here before the end.
            self.held[rank] -= 1
            if stage == 0:
                return
            following = self.back[stage - 1][microbatch]
        hop = self.at.hop if self.placed.rank_of_action(following) != rank else 0
        self._tell(end + hop, following)
