"""Combined 1F1B: interleaved 1F1B whose steady phase runs a forward and a backward at once, layer by layer.

Megatron runs it to hide the all-to-all exchanges of one micro-batch's experts behind the computation of another
(`--overlap-moe-expert-parallel-comm`). Warm-up is one forward longer than in interleaved 1F1B, so that no backward of a
pair waits for the forward in it. Each rank thus holds one micro-batch of a chunk more, and during a pair both count.
Source: `get_pp_rank_microbatches` and `combined_1f1b.py` of megatron-core 0.19.2.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.families.family import Family, FamilyOptions
from bpipe.schedule.families.interleaved import group_sizes, layout, passes
from bpipe.schedule.families.turns import chunk_turns
from bpipe.schedule.families.unit_grid import Order
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Slot


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[Order]:
    """Return combined 1F1B in groups of the size asked, p by default; ValueError for groups that interleaved 1F1B
    refuses."""
    sizes = group_sizes(num_ranks, num_microbatches, options)
    turns = chunk_turns(sizes, num_chunks)
    ahead = (num_chunks - 1) * (options.group_size or num_ranks) + 1
    return [
        _order(passes(rank, num_ranks, num_chunks, turns), ahead + 2 * (num_ranks - rank - 1), num_microbatches)
        for rank in range(num_ranks)
    ]


def _order(
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


FAMILY = Family(
    "combined-1f1b",
    layout,
    orders,
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
