"""Orders that run ahead of the barriers before the last stage's backward.

Between the last stage's forward of a micro-batch and its backward all ranks compute their shards of the vocabulary, S
and T, and wait for each other at barriers, two with algorithm 1 and one with algorithm 2, each no longer than a rank's
longest computation. Two ways make room for that, and every rank holds that much more:

    further_forwards    Every backward comes after some more forwards of one chunk, in a full pipeline as many halves of
        the barriers'
                        time. For chunks that go round the ranks: there a rank's forwards and backwards take turns one
                            by one.
    later_microbatch    The orders of one more micro-batch, in which every backward is that of the micro-batch before.
        What a backward
                        waits for is as far away as before, so nobody waits for ever. For a V, whose turns differ from
                            rank to rank, and if the first way makes ranks wait for each other.

An order made for a bound is made for that much less, and then runs ahead; or for all of it, and its backwards wait:
below the usual bound the remaining room is worth more than a barrier takes. Timing with the shards decides. Micro-
batches cut into slices have shards of each slice, in the order of their forwards, and slices run further ahead.

Source of the problem: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import (
    FamilyOptions,
    OrderChoice,
    Orders,
    OrdersWithin,
    RankLimit,
    ShardedOrders,
    ShardedOrdersWithin,
)
from bpipe.schedule.families.shards import fit_shards, fit_with_ticks
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout, Vocabulary

_FORWARD = Kind.FORWARD

# Forwards of a chunk that a barrier needs next to whole backwards, which last as long as two of them.
BESIDE_WHOLE = {Vocabulary.ONE: 2, Vocabulary.TWO: 1}
# And next to halves: a rank comes to both of its shards within one forward, I and W.
BESIDE_HALVES = {Vocabulary.ONE: 1, Vocabulary.TWO: 1}


def further_forwards(orders: Orders, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrders:
    """Return orders that run this many forwards of a chunk further ahead, or one micro-batch if these would block."""
    by_microbatch = later_microbatch(orders)

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        own = orders(num_ranks, num_microbatches, num_chunks, options)
        further = [_further(order, num_forwards[layout.vocabulary]) for order in own]
        try:
            return fit_shards(layout, num_microbatches * options.slices, further, options.costs)
        except ValueError:
            return by_microbatch(num_ranks, num_microbatches, num_chunks, options, layout)

    return sharded


def further_within(orders: OrdersWithin, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrdersWithin:
    """Return orders for a bound that run further ahead, fastest first, without those that would block."""

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, limit: RankLimit, options: FamilyOptions, layout: Layout
    ) -> Iterator[tuple[OrderChoice, Sequence[Order]]]:
        candidates: list[tuple[int, OrderChoice, list[list[Action]]]] = []
        for ahead in (num_forwards[layout.vocabulary], 0):
            left = replace(limit, bound=max(1, limit.bound - ahead))
            for choice, own in orders(num_ranks, num_microbatches, num_chunks, left, options):
                further = [_further(order, ahead) for order in own]
                with contextlib.suppress(ValueError):
                    ticks, fit = fit_with_ticks(layout, num_microbatches, further, options.costs)
                    candidates.append((ticks, choice, fit))
        for _, choice, fit in sorted(candidates, key=lambda candidate: candidate[0]):
            yield choice, fit

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
        return fit_shards(layout, width, later, options.costs)

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
