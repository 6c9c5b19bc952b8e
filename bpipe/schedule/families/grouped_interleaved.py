"""Grouped interleaving: chunks round robin, groups of any size, backwards in halves.

Stage s is on rank s % p, as in interleaved 1F1B, and groups of g micro-batches take turns through the chunks, here also
fewer than p of them. Rank r runs (v - 1) g + p - r forwards ahead, the most micro-batches of a chunk that it holds, and
then I, W and F in turn. What ranks hold thus falls evenly from first to last, each pair holds the same together, and
balancing levels it: to (v - 1) g + (p + 1) / 2, and the one on its way. From g = p / 2 on the pipeline runs at its full
rate; with fewer, ranks wait. If a small last group would make ranks in strict turns wait for ever, or only longer, they
take what can start: the order is that of the fastest discipline at the given costs. A smaller last group costs time,
not memory. Cut into k slices a rank runs k - 1 further ahead, and groups are of whole micro-batches and at least p / 2
slices. Source of the order: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory
Optimization", 2025.
"""

from __future__ import annotations

from itertools import islice

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.clock import length
from bpipe.schedule.families.family import ALIKE, Family, FamilyOptions
from bpipe.schedule.families.grouped_choice import orders_within
from bpipe.schedule.families.interleaved import layout
from bpipe.schedule.families.list_scheduler import ChoiceRule, Discipline, ListSchedule, actions_of, schedule_list
from bpipe.schedule.families.run_ahead import BESIDE_HALVES, further_forwards, further_within
from bpipe.schedule.families.timing import StageTicks, stage_ticks, work_of
from bpipe.schedule.families.turns import Turns, WarmUp, groups_of, in_slices, turns, warm_up
from bpipe.schedule.layout import Layout, microbatches_of
from bpipe.schedule.program import Exchange


def usual_group(num_ranks: int) -> int:
    """Return p / 2, rounded up: no smaller group keeps a pipeline at its full rate."""
    return -(-num_ranks // 2)


def orders(num_ranks: int, num_microbatches: int, num_chunks: int, options: FamilyOptions) -> list[list[Action]]:
    """Return interleaved orders in groups of the size asked."""
    slices, costs = options.slices, options.costs
    usual = usual_group(microbatches_of(num_ranks, slices))
    group = min(usual if options.group_size is None else options.group_size, num_microbatches)
    taken, ticks = (
        turns(groups_of(num_microbatches, group), num_chunks, slices),
        stage_ticks(costs, num_chunks * slices),
    )
    caps = tuple((num_chunks - 1) * group * slices + slices - 1 + num_ranks - rank for rank in range(num_ranks))
    whole = num_microbatches % group == 0
    in_step = None
    if slices > 1 and whole:
        # In groups of fewer slices than ranks who begins backwards as soon as they can start is out of step with the
        # ranks before.
        in_step = [_in_turn(rank, num_ranks, taken, cap) for rank, cap in enumerate(caps)]
        if costs == ALIKE:
            return in_step
    # Whole groups that fill the pipeline are never shorter otherwise at equal costs: so a test finds for all sizes that
    # it tries.
    strict = costs == ALIKE and whole and 2 * group * slices >= num_ranks
    shortest = _shortest(taken, num_ranks, ticks, caps, (Discipline.TURN,) if strict else tuple(Discipline))
    most = shortest.makespan * ticks.per_unit
    if in_step is not None and _ticks(in_step, layout(num_ranks, num_chunks), taken, ticks) <= most:
        return in_step
    return actions_of(shortest, taken)


def _shortest(
    taken: Turns, num_ranks: int, ticks: StageTicks, caps: tuple[int, ...], disciplines: tuple[Discipline, ...]
) -> ListSchedule:
    """Return the shortest schedule that one of these disciplines makes."""
    shortest = None
    for discipline in disciplines:
        rule, least = ChoiceRule(caps, (0,) * num_ranks, discipline), None if shortest is None else shortest.makespan
        shortest = schedule_list(taken, num_ranks, ticks, rule, shorter_than=least) or shortest
    assert shortest is not None, "who takes what can start never waits for ever"
    return shortest


def _ticks(in_step: list[list[Action]], placed: Layout, taken: Turns, ticks: StageTicks) -> int:
    return length(work_of(placed, len(taken.forwards) // taken.num_chunks, in_step, ticks))


def _in_turn(rank: int, num_ranks: int, taken: Turns, warm_up_forwards: int) -> list[Action]:
    """Return one rank's order by slices: a warm-up, and then I, W and F in turn."""
    last = taken.num_chunks - 1
    forwards = [Action(chunk * num_ranks + rank, Kind.FORWARD, number) for chunk, number in taken.forwards]
    order, left = forwards[:warm_up_forwards], iter(forwards[warm_up_forwards:])
    for chunk, number in taken.forwards:
        stage = (last - chunk) * num_ranks + rank
        order += [
            Action(stage, Kind.BACKWARD_INPUT, number),
            Action(stage, Kind.BACKWARD_WEIGHT, number),
            *islice(left, 1),
        ]
    return in_slices([order], taken.slices)[0]


def _ahead(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> int:
    """Return a group through all chunks but the last and one micro-batch through that, p of them in a full pipeline."""
    full = num_microbatches >= 3 * -(-num_ranks // group) * group
    return (num_chunks - 1) * min(group, num_microbatches) + (num_ranks if full else 1)


def _warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int) -> WarmUp:
    """Return what each rank may hold, with which it begins."""
    return warm_up(
        [(num_chunks - 1) * group + num_ranks - rank for rank in range(num_ranks)], num_microbatches, num_chunks, group
    )


def _sliced_warm_up(num_ranks: int, num_microbatches: int, num_chunks: int, group: int | None, slices: int) -> WarmUp:
    """Return what each rank holds if groups are whole; nothing is known of others, as ranks then take what can
    start."""
    size = min(group or usual_group(microbatches_of(num_ranks, slices)), num_microbatches)
    together, is_whole = size * slices, num_microbatches % size == 0
    lengths = [(num_chunks - 1) * together + slices - 1 + num_ranks - rank for rank in range(num_ranks)]
    return warm_up(lengths if is_whole else [0] * num_ranks, num_microbatches * slices, num_chunks, together)


FAMILY = Family(
    "grouped-interleaved",
    layout,
    orders,
    Exchange.POSTED,
    max_chunks=None,
    takes_groups=True,
    takes_slices=True,
    usual_group=usual_group,
    splits=True,
    fill=3,
    ahead=_ahead,
    warm_up=_warm_up,
    sliced_warm_up=_sliced_warm_up,
    within=orders_within,
    sharded=further_forwards(orders, BESIDE_HALVES),
    sharded_within=further_within(orders_within, BESIDE_HALVES),
    summary="Grouped interleaving: chunks round robin, groups of any size, backwards in halves",
)
