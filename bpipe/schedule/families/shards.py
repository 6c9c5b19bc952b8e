"""Shards of the vocabulary, fitted between the computations of every rank's own order.

Each rank keeps its own order and also computes S0 T0 S1 T1 ..., IF0 IF1 ... and IB0 IB1 ...; a simulated execution
decides which comes next: a free rank takes the first, of IF, S or T, IB and its own, whose inputs have arrived. So all
ranks have one order of S and T and one of every sort of input shards, which is the order of their collectives, and
nobody waits for ever: what was executed once completes again. At a fixed place of a rank's own order, S and T would
block while the pipeline fills.

Only the first stage uses the result of an input shard's pass: it starts two forwards of that stage ahead, so that at
most two embeddings wait. Shards count as short and collectives as shorter: an order made so fits shards of any length,
while one made with long shards does not fit short ones.

Between the last stage's forward of a micro-batch and its backward all ranks compute S and T and wait for each other at
barriers, two with algorithm 1 and one with algorithm 2, each no longer than a rank's longest computation. Two ways make
room for that, and every rank holds that much more:

- `further_forwards`: every backward comes after some more forwards of one chunk, in a full pipeline as many halves of
  the barriers' time. For chunks that go round the ranks, where a rank's forwards and backwards take turns one by one.
- `later_microbatch`: the orders of one more micro-batch, in which every backward is that of the micro-batch before.
  What a backward waits for is as far away as before, so nobody waits for ever. For a V, whose turns differ from rank to
  rank, and if the first way makes ranks wait for each other.

An order for a bound is made for that much less, and then runs ahead; or for all of it, and its backwards wait: below
the usual bound the remaining room is worth more than a barrier takes. Timing with the shards decides. If micro-batches
are cut, each slice has shards, in the order of forwards, and slices run further ahead. Source of the problem: Yeung et
al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
"""

import contextlib
import heapq
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import lcm

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.families.family import (
    FamilyOptions,
    Orders,
    OrdersWithin,
    ShardedOrders,
    ShardedOrdersWithin,
    UnitCosts,
)
from bpipe.schedule.families.timing import stage_ticks
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout, Vocabulary

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_S, _T, _IF, _IB = Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD, Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD

# Durations of shards and of a collective, as shares of a rank's forward.
_SHARES = {_S: Fraction(1, 20), _T: Fraction(1, 10), _IF: Fraction(1, 40), _IB: Fraction(1, 20)}
_COLLECTIVE = Fraction(1, 40)
# Most micro-batches by which embeddings are ahead of the first stage.
_AHEAD = 2
# Forwards of a chunk that a barrier needs next to whole backwards, which last as long as two of them.
BESIDE_WHOLE = {Vocabulary.ONE: 2, Vocabulary.TWO: 1}
# And next to halves: a rank comes to both of its shards within one forward, I and W.
BESIDE_HALVES = {Vocabulary.ONE: 1, Vocabulary.TWO: 1}

_UNMADE = 1 << 62


def fit_shards(
    layout: Layout, num_microbatches: int, own: Sequence[Sequence[Action]], costs: UnitCosts
) -> tuple[int, list[list[Action]]]:
    """Return the ticks until all is over, comparable for the same costs and chunks, and every rank's order with its
    shards.

    Args:
        layout: Which rank computes which stage.
        num_microbatches: Micro-batches of an iteration.
        own: Every rank's other computations and, if nothing may run next to them, S and T too.
        costs: Durations, those of shards included.

    Raises:
        ValueError: The ranks' own orders wait for each other.
    """
    run = _SimulatedRanks(layout, num_microbatches, own, costs)
    run.go()
    return max(run.free), run.orders


class _SimulatedRanks:
    """The ranks while they compute.

    `over[value]`: when the value has passed, _UNMADE before its last part has begun.
    """

    def __init__(
        self, layout: Layout, num_microbatches: int, own: Sequence[Sequence[Action]], costs: UnitCosts
    ) -> None:
        ranks, everything = range(len(own)), range(num_microbatches)
        self.dependencies = Dependencies(layout, num_microbatches)
        self.ticks, self.collective = _ticks(costs, layout.num_stages // len(own))
        together = layout.vocabulary is Vocabulary.INTERLACED
        outputs = [] if together or layout.vocabulary is Vocabulary.WHOLE else [_S, _T]
        sorts = ([_IF], outputs, [_IB]) if layout.input_shards else (outputs,)
        # Each rank's queues of computations, in the order in which it looks at them, and its position in each.
        self.queues = [
            [*([Action(rank, kind, k) for k in everything for kind in kinds] for kinds in sorts), own[rank]]
            for rank in ranks
        ]
        self.next = [[0] * len(self.queues[rank]) for rank in ranks]
        self.together = together
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.free = [0] * len(own)
        self.over = [_UNMADE] * self.dependencies.num_values
        self.parts: dict[int, tuple[int, int]] = {}
        # Times at which the first stage began each micro-batch, in order.
        self.begun: list[int] = []
        self.events = [(0, rank) for rank in ranks]

    def go(self) -> None:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now:
                self._choose(rank, now)
        for rank, queues in enumerate(self.queues):
            for queue, position in zip(queues, self.next[rank], strict=True):
                if position < len(queue):
                    raise ValueError(f"the orders of the ranks wait for each other: rank {rank} at {queue[position]}")

    def _choose(self, rank: int, now: int) -> None:
        """Begin the first computation that can; without one, what the rank waits for will wake it."""
        positions, queues = self.next[rank], self.queues[rank]
        order = self.orders[rank]
        between = self.together and order and order[-1].kind is _S
        for number in range(len(queues) - 1 if between else 0, len(queues)):
            position = positions[number]
            if position < len(queues[number]) and self._ready(queues[number][position]) <= now:
                positions[number] = position + 1
                self._begin(rank, queues[number][position], now)
                return

    def _ready(self, action: Action) -> int:
        if action.kind is _IF:
            ahead = action.microbatch - _AHEAD
            if ahead < 0:
                return 0
            return self.begun[ahead] if ahead < len(self.begun) else _UNMADE
        value = self.dependencies.operand_of(action)
        return 0 if value == NOTHING else self.over[value]

    def _begin(self, rank: int, action: Action, now: int) -> None:
        end = self.free[rank] = now + self.ticks[action.kind]
        self.orders[rank].append(action)
        heapq.heappush(self.events, (end, rank))
        if action.kind is _FORWARD and action.stage == 0:
            self.begun.append(now)
            if self.dependencies.layout.input_shards:
                self.events += [(now, other) for other in range(len(self.free))]
                heapq.heapify(self.events)
        value = self.dependencies.value_of(action)
        if value == NOTHING:
            return
        makers, takers = self.dependencies.route(value)
        missing, latest = self.parts.pop(value, (len(makers), 0))
        latest = max(latest, end)
        if missing > 1:
            self.parts[value] = missing - 1, latest
            return
        self.over[value] = latest + (self.collective if len(makers) > 1 or len(takers) > 1 else 0)
        for taker in takers:
            heapq.heappush(self.events, (self.over[value], taker))


def _ticks(costs: UnitCosts, num_chunks: int) -> tuple[dict[Kind, int], int]:
    """Return the durations of computations of one chunk by kind, and of a collective, in whole ticks."""
    stage = stage_ticks(costs, num_chunks)
    forward = Fraction(costs.forward) * stage.per_unit
    exact = {kind: Fraction(ticks) for kind, ticks in stage.lasts.items()}
    exact |= {kind: share * forward for kind, share in _SHARES.items()}
    collective = _COLLECTIVE * forward
    scale = lcm(*(duration.denominator for duration in exact.values()), collective.denominator)
    return {kind: int(duration * scale) for kind, duration in exact.items()}, int(collective * scale)


def further_forwards(orders: Orders, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrders:
    """Return orders that run this many forwards of a chunk further ahead, or one micro-batch if these would block."""
    by_microbatch = later_microbatch(orders)

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        own = orders(num_ranks, num_microbatches, num_chunks, options)
        further = [_further(order, num_forwards[layout.vocabulary]) for order in own]
        try:
            return fit_shards(layout, num_microbatches * options.slices, further, options.costs)[1]
        except ValueError:
            return by_microbatch(num_ranks, num_microbatches, num_chunks, options, layout)

    return sharded


def further_within(orders: OrdersWithin, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrdersWithin:
    """Return orders for a bound that run further ahead, fastest first, without those that would block."""

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, bound: int, options: FamilyOptions, layout: Layout
    ) -> Iterator[tuple[tuple[int, ...], Sequence[Order]]]:
        candidates: list[tuple[int, tuple[int, ...], list[list[Action]]]] = []
        for ahead in (num_forwards[layout.vocabulary], 0):
            for groups, own in orders(num_ranks, num_microbatches, num_chunks, max(1, bound - ahead), options):
                further = [_further(order, ahead) for order in own]
                with contextlib.suppress(ValueError):
                    ticks, fit = fit_shards(layout, num_microbatches, further, options.costs)
                    candidates.append((ticks, groups, fit))
        for _, groups, fit in sorted(candidates, key=lambda candidate: candidate[0]):
            yield groups, fit

    return sharded


def later_microbatch(orders: Orders) -> ShardedOrders:
    """Return orders whose backwards come one micro-batch later."""

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        slices, width = options.slices, num_microbatches * options.slices
        later: list[list[Action]] = []
        for order in orders(num_ranks, num_microbatches + 1, num_chunks, options):
            moved = (
                action if action.kind is _FORWARD else Action(action.stage, action.kind, action.microbatch - slices)
                for action in _actions(order)
            )
            later.append([action for action in moved if 0 <= action.microbatch < width])
        return fit_shards(layout, width, later, options.costs)[1]

    return sharded


def _actions(order: Order) -> list[Action]:
    return [action for action in order if isinstance(action, Action)]


def _further(order: Order, num_forwards: int) -> list[Action]:
    """Return the order with every backward after `num_forwards` more forwards."""
    forwards = [action for action in _actions(order) if action.kind is _FORWARD]
    further: list[Action] = []
    ahead, taken = num_forwards, 0
    for action in _actions(order):
        if action.kind is _FORWARD:
            ahead += 1
        else:
            further += forwards[taken:ahead]
            taken = max(taken, min(ahead, len(forwards)))
            further.append(action)
    return further + forwards[taken:]
