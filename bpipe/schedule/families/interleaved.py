"""Interleaved and combined 1F1B: several chunks per rank.

Stage s is on rank s % p. Forwards go through the chunks in groups of g micro-batches, by default of p: a group through
the first chunk, the same group through the second, and so on, then the next group. Backwards follow the same list with
the chunks reversed. Warm-up runs 2 * (p - rank - 1) + (v - 1) * g forwards ahead, then a forward and a backward
alternate, then the remaining backwards: Megatron's order. Groups larger than p hold more and send a chunk's outputs
longer before they are needed. Smaller ones would starve the pipeline. If fewer than p micro-batches are left for the
last group, Megatron refuses, and its formula can make ranks wait for each other (p=8, v=2, m=10). Here the last group
is filled up to p, ordered, and the micro-batches that do not exist are left out, which adds no waits. Cut into k
slices, a group is of whole micro-batches and has at least p slices: 1 micro-batch if k is p or more. Source: Narayanan
et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021.
"""

from collections.abc import Sequence
from functools import partial

from bpipe.schedule.action import Action, Kind, by_microbatch
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.shards import BESIDE_WHOLE, further_forwards
from bpipe.schedule.families.turns import WarmUp, chunk_turns, groups_of, in_slices, warm_up
from bpipe.schedule.families.unit_grid import Order, alternate
from bpipe.schedule.layout import Layout, microbatches_of, one_pipe
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Slot


def layout(num_ranks: int, num_chunks: int) -> Layout:
    return one_pipe([stage % num_ranks for stage in range(num_ranks * num_chunks)])


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[list[Action]]:
    """Return interleaved 1F1B of v >= 2 chunks, in groups of the size asked, p by default."""
    slices = options.slices
    sizes = [size * slices for size in group_sizes(num_ranks, num_microbatches, options)]
    group = options.group_size or microbatches_of(num_ranks, slices)
    turns = chunk_turns(sizes, num_chunks)
    ahead = [2 * (num_ranks - rank - 1) + (num_chunks - 1) * group * slices + slices - 1 for rank in range(num_ranks)]
    filled = in_slices([_order(rank, num_ranks, num_chunks, turns, ahead[rank]) for rank in range(num_ranks)], slices)
    width = num_microbatches * slices
    if sum(sizes) == width:
        return filled
    return [[action for action in order if action.microbatch < width] for order in filled]


def group_sizes(num_ranks: int, num_microbatches: int, options: FamilyOptions) -> tuple[int, ...]:
    """Return the sizes of the groups of whole micro-batches; the last may be filled up with some that do not exist.

    Raises ValueError if a group has fewer micro-batches than ranks, or more than there are.
    """
    slices = options.slices
    least = microbatches_of(num_ranks, slices)
    group = least if options.group_size is None else options.group_size
    if options.group_size is not None and not least <= group <= num_microbatches:
        ranks = (
            "pipeline ranks" if slices == 1 else f"pipeline ranks, {num_ranks}, with {slices} slices per micro-batch"
        )
        raise ValueError(
            f"a group of {group} micro-batches is outside {least} to {num_microbatches}: in interleaved 1F1B a group "
            f"has at least as many as there are {ranks}, and at most as many as an iteration has"
        )
    left = num_microbatches % group
    missing = least - left if 0 < left < least else 0
    return groups_of(num_microbatches + missing, group)


def passes(
    rank: int, num_ranks: int, num_chunks: int, turns: Sequence[tuple[int, int]]
) -> tuple[list[Action], list[Action]]:
    """Return a rank's forwards in the order of `turns`, and its backwards, which go through the chunks in reverse."""
    num_microbatches = max(microbatch for _, microbatch in turns) + 1
    stages = range(rank, num_chunks * num_ranks, num_ranks)
    forward, backward = (
        [by_microbatch(stage, kind, num_microbatches) for stage in stages] for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    forwards = [forward[chunk][microbatch] for chunk, microbatch in turns]
    backwards = [backward[num_chunks - 1 - chunk][microbatch] for chunk, microbatch in turns]
    return forwards, backwards


def _order(
    rank: int, num_ranks: int, num_chunks: int, turns: list[tuple[int, int]], warm_up_forwards: int
) -> list[Action]:
    forwards, backwards = passes(rank, num_ranks, num_chunks, turns)
    ahead = min(warm_up_forwards, len(turns))
    warm_up, cool_down = forwards[:ahead], backwards[len(turns) - ahead :]
    return warm_up + alternate(forwards[ahead:], backwards) + cool_down


def _sliced_warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int | None, slices: int) -> WarmUp:
    together = (group or microbatches_of(num_ranks, slices)) * slices
    lengths = [(num_chunks - 1) * together + 2 * (num_ranks - rank) - 1 + slices - 1 for rank in range(num_ranks)]
    return warm_up(lengths, num_microbatches * slices, num_chunks, together)


INTERLEAVED = Family(
    "interleaved-1f1b",
    layout,
    orders,
    Exchange.MEGATRON_INTERLEAVED,
    min_chunks=2,
    max_chunks=None,
    takes_groups=True,
    takes_slices=True,
    usual_group=lambda num_ranks: num_ranks,
    fill=3,
    ahead=lambda p, m, v, g: min(2 * p - 1 + (v - 1) * g, v * (m - m % g)),
    warm_up=partial(_sliced_warm_up, slices=1),
    sliced_warm_up=_sliced_warm_up,
    sharded=further_forwards(orders, BESIDE_WHOLE),
    summary="Interleaved 1F1B: several chunks per rank",
)


def combined_orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[Order]:
    """Return combined 1F1B in groups of the size asked, p by default; ValueError for groups that interleaved 1F1B
    refuses.

    Megatron runs it to hide the all-to-all exchanges of one micro-batch's experts behind the computation of another
    (`--overlap-moe-expert-parallel-comm`). Warm-up is one forward longer than in interleaved 1F1B, so that no backward
    of a pair waits for the forward in it. Each rank thus holds one micro-batch of a chunk more, and during a pair both
    count. Source: `get_pp_rank_microbatches` and `combined_1f1b.py` of megatron-core 0.19.2.
    """
    sizes = group_sizes(num_ranks, num_microbatches, options)
    turns = chunk_turns(sizes, num_chunks)
    ahead = (num_chunks - 1) * (options.group_size or num_ranks) + 1
    return [
        _combined_order(
            passes(rank, num_ranks, num_chunks, turns), ahead + 2 * (num_ranks - rank - 1), num_microbatches
        )
        for rank in range(num_ranks)
    ]


def _combined_order(
    both: tuple[list[Action], list[Action]], warm_up_forwards: int, num_microbatches: int
) -> list[Action | Slot]:
    """Return one rank's order, without micro-batches that do not exist."""
    forwards, backwards = both
    ahead = min(warm_up_forwards, len(forwards))
    pairs = list(zip(forwards[ahead:], backwards, strict=False))
    order: list[Action | Slot] = [*forwards[:ahead]]
    for forward, backward in pairs:
        existing = [item for item in (forward, backward) if item.microbatch < num_microbatches]
        order += [Slot(forward, (), backward)] if len(existing) == 2 else existing
    order += backwards[len(pairs) :]
    return [item for item in order if isinstance(item, Slot) or item.microbatch < num_microbatches]


COMBINED = Family(
    "combined-1f1b",
    layout,
    combined_orders,
    Exchange.MEGATRON_INTERLEAVED,
    min_chunks=2,
    max_chunks=None,
    takes_groups=True,
    usual_group=lambda num_ranks: num_ranks,
    overlaps=True,
    fill=3,
    ahead=lambda p, m, v, g: min(2 * p + (v - 1) * g, v * (m - m % g)),
    summary="Combined 1F1B: interleaved 1F1B whose steady phase runs a forward and a backward at once, layer by layer",
)
