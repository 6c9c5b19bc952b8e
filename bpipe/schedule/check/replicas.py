"""Judge two pipes: their ranks are mirror images, and add up and reduce gradients in one order.

In: a Case. Out: nothing, or an error.

Rules of `rules.RULES`, which has them behind those that fill in where everything is. With one pipe they ask nothing.

Both ranks of a pair have replicas of the same stages, and their gradients are summed between them, bucket by bucket.
Each sum adds floating point numbers, whose last bits depend on the order, and the reductions of a pair meet only if
both ranks come to them in one order. Where the first pipe has one micro-batch more, ranks cannot be mirror images; such
a schedule can be shown and simulated, and no training has it.
"""

from __future__ import annotations

from bpipe.schedule.action import Action
from bpipe.schedule.check.case import Case, ScheduleError
from bpipe.schedule.schedule import Schedule


def check_sum_order(case: Case) -> None:
    """Check that both replicas of a stage add up gradients in the same order.

    A replica with another order differs in its last bits from its twin and from stock training.
    """
    schedule, release, width = case.schedule, case.spots.release, case.schedule.num_microbatches
    if schedule.layout.num_pipes != 2:
        return
    for stage in range(schedule.num_stages):
        of_stage = release[stage * width : (stage + 1) * width]
        first, second = (sorted(range(pipe, width, 2), key=of_stage.__getitem__) for pipe in (0, 1))
        for one, other in zip(first, second, strict=False):
            if one // 2 != other // 2:
                (rank, here), key = schedule.layout.replicas(stage), stage * width + other
                reason = (
                    f"adds to the gradients of stage {stage} where its other replica, on rank {rank}, adds those of "
                    f"micro-batch {one}: "
                    f"here it must be {one + 1}, because both replicas must add in the same order"
                )
                raise case.error(
                    "order of gradient sums",
                    here,
                    of_stage[other],
                    case.at(here, of_stage[other], key),
                    reason,
                    (rank,),
                )


def check_reduction_order(case: Case) -> None:
    """Check that two ranks with replicas of the same stages complete gradients in one order, so that their
    reductions meet."""
    if not _take_equally_many(case.schedule):
        return
    completed = _completed(case)
    for (rank, other), mine in completed.items():
        theirs = completed[other, rank] if other < rank else mine
        for (slot, stage, microbatch), (_, expected, _) in zip(mine, theirs, strict=True):
            if stage != expected:
                reason = (
                    f"completes the gradients of stage {stage} at the point where rank {other}, which has the other "
                    "replica, "
                    f"completes those of stage "
                    f"{expected}: reductions between the two would not meet"
                )
                action = case.at(rank, slot, stage * case.schedule.num_microbatches + microbatch)
                raise case.error("order of reductions", rank, slot, action, reason, (other,))


def _completed(case: Case) -> dict[tuple[int, int], list[tuple[int, int, int]]]:
    """By rank and that of the other replicas: the slots in which gradients are complete, in order, each with its
    stage and micro-batch."""
    layout, width = case.schedule.layout, case.schedule.num_microbatches
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for stage in range(layout.num_stages):
        of_stage = case.spots.release[stage * width : (stage + 1) * width]
        for pipe, rank in enumerate(layout.replicas(stage)):
            last = max(range(pipe, width, 2), key=of_stage.__getitem__)
            found.setdefault((rank, layout.replicas(stage)[1 - pipe]), []).append((of_stage[last], stage, last))
    return {ranks: sorted(stages) for ranks, stages in found.items()}


def check_mirror_images(case: Case) -> None:
    """Check that with two pipes ranks r and p - 1 - r are mirror images: same stages, same order, each with the other
    pipe's micro-batches.

    Then everything that replicas of a stage do together meets, expert parallelism included.
    """
    schedule, rule, last = case.schedule, "mirror images", case.schedule.num_ranks - 1
    if schedule.layout.num_pipes != 2:
        return
    for stage, (rank, other) in enumerate(zip(*schedule.layout.placements, strict=True)):
        if rank + other != last:
            reason = (
                f"stage {stage} is on ranks {rank} and {other}, but the second pipe must be the first one's "
                f"mirror image"
            )
            raise ScheduleError(rule, f"{reason}: put it on ranks {rank} and {last - rank}", rank)
    for rank in range(schedule.num_ranks // 2) if _take_equally_many(schedule) else ():
        other = last - rank
        for (_, expected), (slot, one) in zip(_computed(schedule, rank), _computed(schedule, other), strict=True):
            if (one.kind, one.stage, one.microbatch ^ 1) != (expected.kind, expected.stage, expected.microbatch):
                image = Action(expected.stage, expected.kind, expected.microbatch ^ 1)
                reason = (
                    f"is where rank {rank} has {expected}: here it must be {image}, because the two ranks are mirror "
                    "images"
                )
                raise case.error(rule, other, slot, one, reason, (rank,))


def _take_equally_many(schedule: Schedule) -> bool:
    return schedule.layout.num_pipes == 2 and schedule.num_microbatches % 2 == 0


def _computed(schedule: Schedule, rank: int) -> list[tuple[int, Action]]:
    """In order, each with its slot."""
    return [(slot, one) for slot, cell in enumerate(schedule.ranks[rank]) for one in cell.computations]
