"""Time the reductions of gradients over replicas, once everything else is timed.

In: a Schedule, costs, times, busy ports. Out: `Reduced`.

A stage's gradients are complete with the end of its last backward on every rank that has a replica of it. Lazily they
are reduced behind all computations of these ranks, eagerly as soon as they are complete, beside what is computed
(Megatron's `--overlap-grad-reduce`). In buckets they are complete one after the other, evenly over the last backward,
and each is reduced then; where replicas of a stage are on several ranks of the schedule, all are at its end. The
replicas of a pair of ranks have one queue, for their reductions share a communicator: the one that is complete first
goes first.

Nobody waits for a reduction but the update, so it gives way: one that runs beside computations pauses while a message
or a transfer passes one of its ports. Replicas that are not in the schedule, those of data parallelism, are part of the
seconds that costs give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from bpipe.schedule.action import OF_THE_WEIGHTS
from bpipe.schedule.schedule import Schedule
from bpipe.simulate.cost import Costs, Number, StageCost, ports
from bpipe.simulate.report import Reduced, Timed

# When a port carries something.
Busy = Mapping[int, Sequence[tuple[Number, Number]]]


class _Complete(NamedTuple):
    """A stage's gradients: when the last of their replicas is complete, when they may be reduced, and from when on its
    buckets are."""

    complete_s: Number
    stage: int
    ready_s: Number
    begun_s: Number


def reductions(
    schedule: Schedule, costs: Costs, computations: Sequence[Sequence[Timed]], clocks: Sequence[Number], busy: Busy
) -> tuple[tuple[Reduced, ...], ...]:
    """Return, by rank, the reductions that it has a part in, in order.

    `clocks[rank]`: when the rank has computed everything.
    """
    found: list[list[Reduced]] = [[] for _ in schedule.ranks]
    for ranks, queue in _queues(schedule, costs, [_completed(row) for row in computations], clocks).items():
        between = costs.replicas_apart or any(costs.links.crosses(ranks[0], other) for other in ranks)
        taken = _merged([times for rank in ranks for port in ports(rank, between) for times in busy.get(port, ())])
        free: Number = 0
        for _, stage, ready, begun in sorted(queue):
            start, free = _reduced(costs.of(stage), begun, ready, free, taken)
            for rank in ranks:
                found[rank].append(Reduced(stage, start, free))
    return tuple(map(tuple, found))


def _reduced(
    cost: StageCost, begun: Number, ready: Number, free: Number, taken: Sequence[tuple[Number, Number]]
) -> tuple[Number, Number]:
    """Return when the first bucket's reduction begins, and when the last one's is over."""
    start = None
    for number in range(1, cost.buckets + 1):
        complete = ready if number == cost.buckets else begun + Fraction(number, cost.buckets) * (ready - begun)
        at = max(complete, free)
        start = at if start is None else start
        free = _over(at, cost.reduction_s if cost.buckets == 1 else Fraction(1, cost.buckets) * cost.reduction_s, taken)
    assert start is not None, "there is a bucket"
    return start, free


def _queues(
    schedule: Schedule, costs: Costs, completed: Sequence[Mapping[int, Timed]], clocks: Sequence[Number]
) -> dict[tuple[int, ...], list[_Complete]]:
    """By the ranks that have a part in them, the stages whose gradients are reduced."""
    queues: dict[tuple[int, ...], list[_Complete]] = {}
    for stage in range(costs.num_stages):
        cost = costs.of(stage)
        ranks = tuple(sorted(set(schedule.layout.replicas(stage))))
        # A pipe without a micro-batch completes nothing, and has its gradients, zeros, at once.
        last = [completed[rank][stage] for rank in ranks if stage in completed[rank]]
        complete = max((one.end_s for one in last), default=0)
        if cost.reduction_s:
            ready = complete if costs.eager else max(clocks[rank] for rank in ranks)
            begun = last[0].start_s if costs.eager and len(ranks) == len(last) == 1 else ready
            queues.setdefault(ranks, []).append(_Complete(complete, stage, ready, begun))
    return queues


def _completed(row: Sequence[Timed]) -> dict[int, Timed]:
    """The last of each stage's backwards on a rank."""
    return {timed.action.stage: timed for timed in row if timed.action.kind in OF_THE_WEIGHTS}


def _merged(times: list[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Return the times in which any is busy, in order, none touching another."""
    merged: list[tuple[Number, Number]] = []
    for start, end in sorted(times):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _over(now: Number, left: Number, taken: Sequence[tuple[Number, Number]]) -> Number:
    """When what begins now and lasts so long beside nothing is over."""
    for start, end in taken:
        if end <= now:
            continue
        if now + left <= start:
            break
        left -= max(0, start - now)
        now = end
    return now + left
