"""Run ahead of the barriers before the last stage's backward. In: a family's orders. Out: the same with shards.

Between the last stage's forward of a micro-batch and its backward all ranks compute their shards of the vocabulary, S
and T, and wait for each other: no longer than a rank's longest computation lasts, at each of the barriers of which
algorithm 1 has two and algorithm 2 one. Two ways make room for that, and every rank holds so much more:

    further_forwards    Every backward stands behind some more forwards of one chunk, in a full pipeline as many halves of the barriers'
                        time. For chunks that go round the ranks: there a rank's forwards and backwards take turns one by one.
    later_microbatch    The orders of a micro-batch more, in which every backward is that of the micro-batch before. What a backward waits
                        for is as far away as it was, so nobody waits for ever whatever the orders are. For a V, whose turns differ from
                        rank to rank, and where the first way makes ranks wait for each other.

An order that is made for a bound is made for so much less, and then runs ahead; or for all of it, and its backwards
wait. Below the usual bound what is left is worth more than what a barrier takes. Which is faster is seen with the
shards in it. Micro-batches cut into slices have shards of each slice, in the order of their forwards, and what runs
further ahead are slices.

Source of the problem: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. Knows no
schedule by name.
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

# Of a chunk, forwards that a barrier needs beside whole backwards, which last as long as two of them.
BESIDE_WHOLE = {Vocabulary.ONE: 2, Vocabulary.TWO: 1}
# And beside halves: a rank comes to both of its shards within one forward, I and W.
BESIDE_HALVES = {Vocabulary.ONE: 1, Vocabulary.TWO: 1}


def further_forwards(orders: Orders, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrders:
    """Return orders that run this many forwards of a chunk further, or one micro-batch further where ranks would
    wait for each other."""
    by_microbatch = later_microbatch(orders)

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        own = orders(num_ranks, num_microbatches, num_chunks, options)
        further = [_further(_actions(order), num_forwards[layout.vocabulary]) for order in own]
        try:
            return fit_shards(layout, num_microbatches * options.slices, further, options.costs)
        except ValueError:
            return by_microbatch(num_ranks, num_microbatches, num_chunks, options, layout)

    return sharded


def further_within(orders: OrdersWithin, num_forwards: Mapping[Vocabulary, int]) -> ShardedOrdersWithin:
    """Return orders that run further ahead within a bound, fastest first, without those in which ranks wait for each
    other."""

    def sharded(
        num_ranks: int,
        num_microbatches: int,
        num_chunks: int,
        limit: RankLimit,
        options: FamilyOptions,
        layout: Layout,
    ) -> Iterator[tuple[OrderChoice, Sequence[Order]]]:
        found: list[tuple[int, OrderChoice, list[list[Action]]]] = []
        for ahead in (num_forwards[layout.vocabulary], 0):
            left = replace(limit, bound=max(1, limit.bound - ahead))
            for choice, own in orders(num_ranks, num_microbatches, num_chunks, left, options):
                further = [_further(_actions(order), ahead) for order in own]
                with contextlib.suppress(ValueError):
                    ticks, fit = fit_with_ticks(layout, num_microbatches, further, options.costs)
                    found.append((ticks, choice, fit))
        for _, choice, made in sorted(found, key=lambda one: one[0]):
            yield choice, made

    return sharded


def later_microbatch(orders: Orders) -> ShardedOrders:
    """Return orders whose backwards come one micro-batch later."""

    def sharded(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        own, slices = orders(num_ranks, num_microbatches + 1, num_chunks, options), options.slices
        width = num_microbatches * slices
        return fit_shards(layout, width, [_later(_actions(order), width, slices) for order in own], options.costs)

    return sharded


def _actions(order: Order) -> list[Action]:
    return [one for one in order if isinstance(one, Action)]


def _further(order: Sequence[Action], num_forwards: int) -> list[Action]:
    forwards = [one for one in order if one.kind is _FORWARD]
    found: list[Action] = []
    ahead, taken = num_forwards, 0
    for one in order:
        if one.kind is _FORWARD:
            ahead += 1
        else:
            found += forwards[taken:ahead]
            taken = max(taken, min(ahead, len(forwards)))
            found.append(one)
    return found + forwards[taken:]


def _later(order: Sequence[Action], width: int, slices: int) -> list[Action]:
    moved = [one if one.kind is _FORWARD else Action(one.stage, one.kind, one.microbatch - slices) for one in order]
    return [one for one in moved if 0 <= one.microbatch < width]
