"""Reductions of gradients over replicas, timed once everything else is timed.

A stage's gradients are complete with the end of its last backward on every rank that has a replica of it. Lazily they
are reduced after all computations of these ranks, eagerly as soon as they are complete (Megatron's
`--overlap-grad-reduce`). Buckets are complete one after the other, evenly over the last backward, and each is then
reduced; if replicas of a stage are on several ranks of the schedule, all are complete at its end. The replicas of a
pair of ranks have one queue, because their reductions share a communicator: the first complete goes first.

Only the update waits for a reduction, so it gives way: one that runs during computations pauses while a message or a
transfer passes one of its ports. Replicas of data parallelism, which are not in the schedule, are part of the seconds
that costs give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from bpipe.schedule.action import OF_THE_WEIGHTS
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Number, StageCost, ports
from bpipe.simulate.report import Reduced, Timed

# By port, the times in which it carries something.
Busy = Mapping[int, Sequence[tuple[Number, Number]]]


class _Complete(NamedTuple):
    """A stage's gradients: when all replicas are complete, when they may be reduced, and when its buckets begin."""

    complete_s: Number
    stage: int
    ready_s: Number
    begun_s: Number


def reductions(
    schedule: Schedule, costs: Costs, computations: Sequence[Sequence[Timed]], clocks: Sequence[Number], busy: Busy
) -> tuple[tuple[Reduced, ...], ...]:
    """Return, by rank, the reductions that it has a part in, in order.

    Args:
        clocks: When each rank has computed everything.
    """
    reduced: list[list[Reduced]] = [[] for _ in schedule.ranks]
    completed = [_last_backwards(row) for row in computations]
    for ranks, queue in _queues(schedule, costs, completed, clocks).items():
        between = costs.replicas_apart or any(costs.links.crosses(ranks[0], other) for other in ranks)
        taken = _merged([times for rank in ranks for port in ports(rank, between) for times in busy.get(port, ())])
        free: Number = 0
        for _, stage, ready, begun in sorted(queue):
            start, free = _reduced(costs.of(stage), begun, ready, free, taken)
            for rank in ranks:
                reduced[rank].append(Reduced(stage, start, free))
    return tuple(map(tuple, reduced))


def _reduced(
    cost: StageCost, begun: Number, ready: Number, free: Number, taken: Sequence[tuple[Number, Number]]
) -> tuple[Number, Number]:
    """Return when the first bucket's reduction begins, and when the last one's is over."""
    start = None
    for number in range(1, cost.buckets + 1):
        complete = ready if number == cost.buckets else begun + Fraction(number, cost.buckets) * (ready - begun)
        begin = max(complete, free)
        start = begin if start is None else start
        seconds = cost.reduction_s if cost.buckets == 1 else Fraction(1, cost.buckets) * cost.reduction_s
        free = _over(begin, seconds, taken)
    assert start is not None, "there is a bucket"
    return start, free


def _queues(
    schedule: Schedule, costs: Costs, completed: Sequence[Mapping[int, Timed]], clocks: Sequence[Number]
) -> dict[tuple[int, ...], list[_Complete]]:
    """Return the stages whose gradients are reduced, by the ranks that take part."""
    queues: dict[tuple[int, ...], list[_Complete]] = {}
    for stage in range(costs.num_stages):
        cost = costs.of(stage)
        ranks = tuple(sorted(set(schedule.layout.replicas(stage))))
        # A pipe without a micro-batch completes nothing, and has its gradients, zeros, at once.
        last = [completed[rank][stage] for rank in ranks if stage in completed[rank]]
        complete = max((backward.end_s for backward in last), default=0)
        if cost.reduction_s:
            ready = complete if costs.eager else max(clocks[rank] for rank in ranks)
            begun = last[0].start_s if costs.eager and len(ranks) == len(last) == 1 else ready
            queues.setdefault(ranks, []).append(_Complete(complete, stage, ready, begun))
    return queues


def _last_backwards(row: Sequence[Timed]) -> dict[int, Timed]:
    """Return the last of each stage's backwards on a rank."""
    return {timed.action.stage: timed for timed in row if timed.action.kind in OF_THE_WEIGHTS}


def _merged(times: list[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Return the times in which any is busy, in order and apart from each other."""
    merged: list[tuple[Number, Number]] = []
    for start, end in sorted(times):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _over(now: Number, left: Number, taken: Sequence[tuple[Number, Number]]) -> Number:
    """Return the end of what begins now and takes `left` seconds, if it pauses in these times."""
    for start, end in taken:
        if end <= now:
            continue
        if now + left <= start:
            break
        left -= max(0, start - now)
        now = end
    return now + left
