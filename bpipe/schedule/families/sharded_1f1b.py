"""1F1B whose vocabulary is in shards on all ranks. In: number of micro-batches, a layout. Out: every rank's order.

Between the last stage's forward of a micro-batch and its backward every rank computes its shard, S, and T, and waits
for the others': each barrier lengthens the way of a micro-batch by an interval, so a rank runs ahead by one forward
more for each. With algorithm 1 there are two (statistics, then the gradient), and a rank saves p - rank + 2
micro-batches; with algorithm 2 there is one, and it saves p - rank + 1. Interlaced, all ranks compute S and T at the
same time and do nothing else in between, so all must be at the same point of an interval. What is left of it has room
for F B on one rank and B F on the next: a forward takes half an interval from rank to rank, a backward, which is
longer, a whole one. Together that is half as much again as in 1F1B: rank 0 saves 1.5 p micro-batches, rounded up.
Source: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.family import FamilyOptions, Orders, ShardedOrders
from bpipe.schedule.families.run_ahead import BESIDE_WHOLE, further_forwards
from bpipe.schedule.families.shards import fit_shards
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.layout import Layout, Vocabulary


def sharded(orders: Orders) -> ShardedOrders:
    """Return 1F1B's `orders` with shards: with everything that runs beside shards, and with nothing."""
    running_ahead = further_forwards(orders, BESIDE_WHOLE)

    def made(
        num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions, layout: Layout
    ) -> Sequence[Order]:
        if layout.vocabulary is not Vocabulary.INTERLACED:
            return running_ahead(num_ranks, num_microbatches, num_chunks, options, layout)
        own = [list(_interlaced(rank, num_ranks, num_microbatches)) for rank in range(num_ranks)]
        return fit_shards(layout, num_microbatches, own, options.costs)

    return made


def _interlaced(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    """By intervals, each of which begins with S and T of one micro-batch on all ranks; the last rank has F before B
    in its own."""
    distance = num_ranks - 1 - rank
    forward_first = distance % 2 == 0
    everything = range(num_microbatches)
    # In the interval of a micro-batch's S the last rank computes its backward, and in the one before its forward.
    placed = [(k, 0, Action(rank, Kind.SHARD_FORWARD, k)) for k in everything]
    placed += [(k, 1, Action(rank, Kind.SHARD_BACKWARD, k)) for k in everything]
    placed += [
        (k - 1 - (distance + 1) // 2, 2 if forward_first else 3, Action(rank, Kind.FORWARD, k)) for k in everything
    ]
    placed += [(k + distance, 3 if forward_first else 2, Action(rank, Kind.BACKWARD, k)) for k in everything]
    placed.sort(key=lambda one: one[:2])
    return (action for _, _, action in placed)
