"""Keep the forwards alone: what a model is evaluated with. In: a Layout and a number of micro-batches. Out: a Schedule without backwards.

Any number of micro-batches, also where the schedule that is trained with knows but one. A rank goes by waves: a stage's forward of a
micro-batch is in the wave after that of the stage before it, and in a wave later stages come first, so that nothing piles up in front of
them. Where the embedding is in shards, all ranks begin the wave of a micro-batch's first forward with its IF. Where the output layer is,
all have its S in the wave after the last stage's forward and its T in the one after that, where the losses are known; no T makes a
gradient, as with algorithm 2.
Knows no schedule by name; the rules for schedules do not hold here, every computation of theirs comes back.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.generate.place import place
from bpipe.ir.action import Action, Kind
from bpipe.ir.layout import Layout, Vocabulary
from bpipe.ir.schedule import Schedule


def forwards_only(layout: Layout, num_microbatches: int) -> Schedule:
    """Every stage's forward of every micro-batch, each stage's in their order, and every shard's IF, S and T."""
    shards = layout.vocabulary is not Vocabulary.WHOLE
    if shards:
        layout = replace(layout, vocabulary=Vocabulary.TWO)
    num_ranks = len({rank for placement in layout.placements for rank in placement})
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    for wave in range(layout.num_stages + num_microbatches + 1):
        if layout.input_shards and wave < num_microbatches:
            for rank, order in enumerate(orders):
                order.append(Action(rank, Kind.INPUT_FORWARD, wave))
        for stage in reversed(range(layout.num_stages)):
            if 0 <= wave - stage < num_microbatches:
                orders[layout.rank_of(stage, wave - stage)].append(Action(stage, Kind.FORWARD, wave - stage))
        for kind, behind in ((Kind.SHARD_BACKWARD, 1), (Kind.SHARD_FORWARD, 0)) if shards else ():
            microbatch = wave - layout.num_stages - behind
            if 0 <= microbatch < num_microbatches:
                for rank, order in enumerate(orders):
                    order.append(Action(rank, kind, microbatch))
    return place("forwards", num_microbatches, layout, orders)
