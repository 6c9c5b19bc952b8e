"""Forward-only schedules, with which a model is evaluated.

They have any number of micro-batches, even if the training schedule knows only one. A rank goes by waves: a stage's
forward of a micro-batch is in the wave after that of the stage before it, and in a wave later stages come first, so
that nothing accumulates before them. If the embedding is in shards, all ranks begin the wave of a micro-batch's first
forward with its IF. If the output layer is, all have its S in the wave after the last stage's forward and its T in the
next one, when the losses are known; no T makes a gradient, as with algorithm 2. The rules for schedules do not hold
here.
"""

from collections.abc import Iterator
from dataclasses import replace

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.layout import Layout, Vocabulary
from bpipe.schedule.schedule import Schedule


def forwards_only(layout: Layout, num_microbatches: int) -> Schedule:
    """Return every stage's forward of every micro-batch, each stage's in order, and every shard's IF, S and T."""
    if layout.vocabulary is not Vocabulary.WHOLE:
        layout = replace(layout, vocabulary=Vocabulary.TWO)
    num_ranks = len({rank for placement in layout.placements for rank in placement})
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    for wave in range(layout.num_stages + num_microbatches + 1):
        for action in _wave(layout, num_ranks, wave):
            if 0 <= action.microbatch < num_microbatches:
                orders[layout.rank_of_action(action)].append(action)
    return place("forwards", num_microbatches, layout, orders)


def _wave(layout: Layout, num_ranks: int, wave: int) -> Iterator[Action]:
    """Yield the computations of one wave, each stage a micro-batch after the one before it; some do not exist."""
    if layout.input_shards:
        yield from (Action(rank, Kind.INPUT_FORWARD, wave) for rank in range(num_ranks))
    for stage in reversed(range(layout.num_stages)):
        yield Action(stage, Kind.FORWARD, wave - stage)
    if layout.vocabulary is not Vocabulary.WHOLE:
        for kind, microbatch in (
            (Kind.SHARD_BACKWARD, wave - layout.num_stages - 1),
            (Kind.SHARD_FORWARD, wave - layout.num_stages),
        ):
            yield from (Action(rank, kind, microbatch) for rank in range(num_ranks))
