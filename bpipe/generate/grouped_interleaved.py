"""Grouped interleaving: chunks round robin, groups of any size, backwards in halves.

In: sizes, costs. Out: every rank's order.

Stage s is on rank s % p, as in interleaved 1F1B, and groups of g micro-batches take turns through the chunks, here also
fewer than p of them. Rank r runs (v - 1) g + p - r forwards ahead, and then I, W and F in turn: that is the most
micro-batches of a chunk that it holds. So what ranks hold falls evenly from first to last, each pair holds the same
together, and balancing levels it: to (v - 1) g + (p + 1) / 2, and the one that is under way. From g = p / 2 on the
pipeline runs at its full rate; with fewer, ranks wait. Where a small last group would make ranks that keep strict turns
wait for ever, or only longer, they take what can start: the order is that of the fastest discipline at the given costs.
A last group of fewer costs time, not memory. Source of the order: Wan et al., "PipeOffload: Improving Scalability of
Pipeline Parallelism with Memory Optimization", 2025.
"""

from __future__ import annotations

from bpipe.generate.ahead import BESIDE_HALVES, further_forwards, further_within
from bpipe.generate.family import ALIKE, Family, FamilyOptions
from bpipe.generate.grouped_choice import orders_within
from bpipe.generate.interleaved import layout
from bpipe.generate.list_scheduler import ChoiceRule, Discipline, actions_of, schedule_list
from bpipe.generate.timing import stage_ticks
from bpipe.generate.turns import WarmUp, groups_of, turns, warm_up
from bpipe.ir.action import Action
from bpipe.ir.program import Exchange


def usual_group(num_ranks: int) -> int:
    """Return p / 2, rounded up: no smaller group keeps a pipeline at its full rate."""
    return -(-num_ranks // 2)


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[list[Action]]:
    """Return interleaved orders with groups of the size that is asked."""
    group = min(usual_group(num_ranks) if options.group_size is None else options.group_size, num_microbatches)
    taken, at = turns(groups_of(num_microbatches, group), num_chunks), stage_ticks(options.costs, num_chunks)
    caps = tuple((num_chunks - 1) * group + num_ranks - rank for rank in range(num_ranks))
    shortest = None
    # Whole groups that fill the pipeline are never shorter otherwise at equal costs: so a test finds for all sizes that
    # it tries.
    strict = options.costs == ALIKE and num_microbatches % group == 0 and 2 * group >= num_ranks
    for discipline in (Discipline.TURN,) if strict else Discipline:
        rule, least = ChoiceRule(caps, (0,) * num_ranks, discipline), None if shortest is None else shortest.makespan
        shortest = schedule_list(taken, num_ranks, at, rule, shorter_than=least) or shortest
    assert shortest is not None, "who takes what can start never waits for ever"
    return actions_of(shortest, taken)


def _ahead(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> int:
    """Return a group through all chunks but the last, and one micro-batch through that: nothing is back sooner.

    In a full pipeline p of them.
    """
    full = num_microbatches >= 3 * -(-num_ranks // group) * group
    return (num_chunks - 1) * min(group, num_microbatches) + (num_ranks if full else 1)


def _warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> WarmUp:
    """What each rank may hold, with which it begins."""
    return warm_up(
        [(num_chunks - 1) * group + num_ranks - rank for rank in range(num_ranks)], num_microbatches, num_chunks, group
    )


FAMILY = Family(
    "grouped-interleaved",
    layout,
    orders,
    Exchange.POSTED,
    max_chunks=None,
    takes_groups=True,
    usual_group=usual_group,
    splits=True,
    fill=3,
    ahead=_ahead,
    warm_up=_warm_up,
    within=orders_within,
    sharded=further_forwards(orders, BESIDE_HALVES),
    sharded_within=further_within(orders_within, BESIDE_HALVES),
)
