"""The rules that a schedule must keep, one function each; a broken rule raises a `ScheduleError` that shows the place.

`RULES` lists them in the order in which they run; a rule may rely on those before it.

With two pipes, both ranks of a pair have replicas of the same stages, whose gradients are summed between them bucket by
bucket. Floating point sums depend on their order, and the reductions of a pair meet only if both ranks reach them in
one order. Two pipes cannot be mirror images if the first has one micro-batch more: such a schedule can be shown and
simulated, but no training has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bpipe.schedule.action import COMPUTE, OF_THE_INPUT, OF_THE_WEIGHTS, SHARDS, Action, Kind
from bpipe.schedule.check.case import NOWHERE, Case, Rule, ScheduleError, Spots
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.transfers import (
    check_bounds,
    check_hosts,
    check_other_ends,
    check_pair_order,
    check_residency,
)
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.layout import MOST_PIPES, TWO_PIPES, reversed_slice
from bpipe.schedule.memory import SHARE_DECIMALS
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
# What runs once for every micro-batch, and in order: forwards, what passes gradients on, and what completes the
# gradients of weights.
_PASSES = (frozenset({Kind.FORWARD}), OF_THE_INPUT, OF_THE_WEIGHTS)
# Names of rules that several functions raise.
_SHAPE, _ONCE, _SLICES, _SHARDS = "shape", "each computation once", "order of slices", "order of shards"


def check(schedule: Schedule, exchange: Exchange = Exchange.POSTED) -> None:
    """Raise ScheduleError for the first rule that the schedule breaks when run with this exchange."""
    case = Case(schedule, exchange)
    for rule in RULES:
        rule(case)


def check_shape(case: Case) -> None:
    """Check that all ranks have equally many slots and that these can hold all stages and micro-batches."""
    schedule, ranks = case.schedule, case.schedule.num_ranks
    if ranks == 0 or schedule.num_microbatches < 1:
        counts = f"{ranks} ranks, {schedule.num_microbatches} micro-batches"
        raise ScheduleError(_SHAPE, f"{counts}: there must be at least one of each")
    if schedule.layout.num_pipes > MOST_PIPES:
        raise ScheduleError(_SHAPE, f"there are {schedule.layout.num_pipes} pipes: {TWO_PIPES}")
    lengths = [len(row) for row in schedule.ranks]
    if len(set(lengths)) != 1:
        shorter = lengths.index(min(lengths))
        reason = f"rank {shorter} has {min(lengths)} slots, but others have {max(lengths)}: fill it up with bubbles"
        raise ScheduleError(_SHAPE, reason, shorter)
    # Tables of this size follow: a file must not make them larger than itself.
    if schedule.num_stages * schedule.num_microbatches > ranks * lengths[0]:
        sizes = f"{schedule.num_stages} stages of {schedule.num_microbatches} micro-batches"
        raise ScheduleError(_SHAPE, f"{sizes} do not fit into {ranks} x {lengths[0]} slots")


def check_head(case: Case) -> None:
    """Check that stages are evenly distributed, each rank has one bound, and `after_input` can be written."""
    schedule, ranks = case.schedule, case.schedule.num_ranks
    for placement in schedule.layout.placements:
        counts = [placement.count(rank) for rank in range(ranks)]
        if len(set(counts)) != 1 or not counts[0] or sum(counts) != schedule.num_stages:
            reason = f"stage_to_rank {placement} must give each of the {ranks} ranks equally many stages"
            raise ScheduleError(_SHAPE, reason)
    if schedule.bounds is not None and len(schedule.bounds) != ranks:
        raise ScheduleError(_SHAPE, f"{len(schedule.bounds)} bounds for {ranks} ranks: give one for each")
    share = schedule.after_input
    if share < 0 or (share * 10**SHARE_DECIMALS).denominator != 1:
        limits = f"a share of at least 0 with at most {SHARE_DECIMALS} decimals"
        raise ScheduleError(_SHAPE, f"after_input {share} must be {limits}")


def check_once(case: Case) -> None:
    """Check that every stage and shard computes each micro-batch once in each pass, on its rank; fills `case.spots`."""
    schedule, width = case.schedule, case.schedule.num_microbatches
    size = schedule.num_stages * width
    shards = {kind: [NOWHERE] * (schedule.num_ranks * width) for kind in schedule.layout.shard_kinds}
    spots = case.spots = Spots([NOWHERE] * size, [NOWHERE] * size, [NOWHERE] * size, shards)
    tables = {
        _FORWARD: (spots.forward,),
        _BACKWARD: (spots.need, spots.release),
        _INPUT: (spots.need,),
        _WEIGHT: (spots.release,),
        **{kind: (slots,) for kind, slots in shards.items()},
    }
    limits = {kind: len(slots[0]) // width for kind, slots in tables.items()}
    rank_of = schedule.layout.rank_of_action
    for rank, row in enumerate(schedule.ranks):
        for slot, cell in enumerate(row):
            if cell.overlapped is not None:
                _check_pair(case, rank, slot, cell)
            for action in cell.computations:
                kind, stage, microbatch = action.kind, action.stage, action.microbatch
                in_range = 0 <= stage < limits.get(kind, 0) and 0 <= microbatch < width
                if not in_range or rank_of(action) != rank:
                    raise _misplaced(case, rank, slot, action, limits.get(kind))
                key = stage * width + microbatch
                for slots in tables[kind]:
                    if slots[key] != NOWHERE:
                        raise case.error(_ONCE, rank, slot, action, f"already computed in slot {slots[key]}")
                    slots[key] = slot
    _check_complete(case)


def _check_pair(case: Case, rank: int, slot: int, cell: Slot) -> None:
    first, second = cell.compute, cell.overlapped
    if first is None or first.kind is not _FORWARD or second is None or second.kind not in (_BACKWARD, _INPUT):
        reason = f"{first or 'nothing'} and {second} cannot overlap: only a forward and a backward can, in this order"
        raise case.error(_ONCE, rank, slot, second, reason)


def _misplaced(case: Case, rank: int, slot: int, action: Action, num_stages: int | None) -> ScheduleError:
    """Return the error of an action that no stage or shard computes, or that of another rank."""
    width = case.schedule.num_microbatches
    if num_stages is None:
        split = action.kind in COMPUTE
        reason = "belongs to a split vocabulary, but here it is whole" if split else "is not a computation"
        return case.error(_ONCE, rank, slot, action, f"{action.kind.value} {reason}")
    if not 0 <= action.stage < num_stages or not 0 <= action.microbatch < width:
        reason = f"there are only stages 0 to {num_stages - 1} and micro-batches 0 to {width - 1}"
        return case.error(_ONCE, rank, slot, action, reason)
    owner = case.schedule.layout.rank_of_action(action)
    return case.error(_ONCE, rank, slot, action, f"stage {action.stage} belongs to rank {owner}", (owner,))


def _check_complete(case: Case) -> None:
    """Check that no computation of any stage or shard is missing."""
    schedule, spots = case.schedule, case.spots
    shards = {kind.value: slots for kind, slots in spots.shards.items()}
    for kinds, slots in {"F": spots.forward, "B or I": spots.need, "B or W": spots.release, **shards}.items():
        if NOWHERE in slots:
            place, microbatch = divmod(slots.index(NOWHERE), schedule.num_microbatches)
            whose, owner = ("rank", place) if kinds in shards else ("stage", schedule.layout.rank_of(place, microbatch))
            reason = f"{whose} {place} has no {kinds} of micro-batch {microbatch} in any slot"
            raise case.error(_ONCE, owner, len(schedule.ranks[owner]) - 1, None, reason)


def check_forward_first(case: Case) -> None:
    """Check that every forward comes before its backward, and BACKWARD_INPUT before BACKWARD_WEIGHT."""
    spots, width = case.spots, case.schedule.num_microbatches
    for key, (forward, need, release) in enumerate(zip(spots.forward, spots.need, spots.release, strict=True)):
        if forward < need <= release:
            continue
        rank = case.schedule.layout.rank_of(*divmod(key, width))
        late, early = (forward, need) if forward >= need else (need, release)
        before, after = case.at(rank, early, key), case.at(rank, late, key)
        raise case.error("forward before backward", rank, early, before, f"{after} comes only in slot {late}")


def check_needs(case: Case) -> None:
    """Check that no computation comes before those that make its operands."""
    spots, width = case.spots, case.schedule.num_microbatches
    dependencies = Dependencies(case.schedule.layout, width)
    made_in = [*spots.forward, *spots.need, *[NOWHERE] * (dependencies.num_values - dependencies.first_shared)]
    for kind, slots in spots.shards.items():
        for key, slot in enumerate(slots):
            value = dependencies.value_of(Action(key // width, kind, key % width))
            if value != NOTHING:
                made_in[value] = max(made_in[value], slot)
    for kind, slots in {_FORWARD: spots.forward, _BACKWARD: spots.need, **spots.shards}.items():
        for key in range(0, len(slots), width):
            first = dependencies.first_operand_of(kind, key // width)
            for microbatch in range(width) if first != NOTHING else ():
                if made_in[first + microbatch] >= slots[key + microbatch]:
                    action = Action(key // width, kind, microbatch)
                    raise _too_early(case, dependencies, action, slots[key + microbatch])


def _too_early(case: Case, dependencies: Dependencies, action: Action, slot: int) -> ScheduleError:
    """Return the error of a computation that comes before the last of those that make its operand."""
    schedule, value = case.schedule, dependencies.operand_of(action)
    other_slot, other_rank, operand = max(
        (
            (made_in, rank, maker)
            for rank in dependencies.route(value).makers
            for made_in, maker in schedule.computations(rank)
            if dependencies.value_of(maker) == value
        ),
        key=lambda maker: maker[0],
    )
    rank = schedule.layout.rank_of_action(action)
    needing = schedule.ranks[rank][slot].computations
    early = next(computation for computation in needing if dependencies.operand_of(computation) == value)
    reason = f"needs {operand}, which rank {other_rank} computes in slot {other_slot}"
    return case.error("stage order", rank, slot, early, reason, (other_rank,))


def check_slices(case: Case) -> None:
    """Check that every stage computes a micro-batch's slices forward from the first on, and backward from the last.

    A slice attends to the keys and values of the slices before it, and gives their gradients back to them.
    """
    schedule, slices = case.schedule, case.schedule.layout.slices
    if slices == 1:
        return
    width, spots = schedule.num_microbatches, case.spots
    if slices < 1 or width % slices:
        raise ScheduleError(_SLICES, f"{width} slices do not make whole micro-batches of {slices} slices")
    if schedule.layout.num_pipes > 1:
        pipes = f"{slices} slices on {schedule.layout.num_pipes} pipes"
        raise ScheduleError(_SLICES, f"{pipes}: slices are supported on one pipe only, use slices=1")
    for key in (key for key in range(schedule.num_stages * width) if key % slices):
        rank = schedule.layout.rank_of(*divmod(key, width))
        forward, before = spots.forward[key], spots.forward[key - 1]
        if forward <= before:
            reason = f"attends to the previous slice, whose forward comes only in slot {before}"
            raise case.error(_SLICES, rank, forward, case.at(rank, forward, key), reason)
        need, need_before = spots.need[key], spots.need[key - 1]
        if need_before <= need:
            reason = f"needs gradients of its keys from the next slice, whose backward comes only in slot {need}"
            raise case.error(_SLICES, rank, need_before, case.at(rank, need_before, key - 1), reason)


def check_shard_order(case: Case) -> None:
    """Check that all ranks compute output shards in one order, and input shards by micro-batch, so collectives meet."""
    first: list[tuple[int, Action]] = []
    for rank in range(case.schedule.num_ranks) if case.spots.shards else ():
        shards = [(slot, action) for slot, action in case.schedule.computations(rank) if action.kind in SHARDS]
        for kind in (Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD):
            _check_by_microbatch(case, rank, [(slot, action) for slot, action in shards if action.kind is kind])
        kinds = (Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD)
        outputs = [(slot, action) for slot, action in shards if action.kind in kinds]
        first = first or outputs
        for (_, expected), (slot, action) in zip(first, outputs, strict=True):
            if (action.kind, action.microbatch) != (expected.kind, expected.microbatch):
                reason = f"rank 0 has {expected} there: all ranks need the same order"
                raise case.error(_SHARDS, rank, slot, action, reason, (0,))


def _check_by_microbatch(case: Case, rank: int, of_kind: Sequence[tuple[int, Action]]) -> None:
    for (_, before), (slot, after) in pairwise(of_kind):
        if after.microbatch < before.microbatch:
            reason = f"comes after {before}: {after.kind.value} must follow the order of micro-batches"
            raise case.error(_SHARDS, rank, slot, after, reason)


def check_sum_order(case: Case) -> None:
    """Check that both replicas of a stage add up gradients in the same order, on which their last bits depend."""
    schedule, release, width = case.schedule, case.spots.release, case.schedule.num_microbatches
    for stage in range(schedule.num_stages) if schedule.layout.num_pipes == 2 else ():
        of_stage = release[stage * width : (stage + 1) * width]
        first, second = (sorted(range(pipe, width, 2), key=of_stage.__getitem__) for pipe in (0, 1))
        for microbatch, twin in zip(first, second, strict=False):
            if microbatch // 2 != twin // 2:
                (rank, other), slot = schedule.layout.replicas(stage), of_stage[twin]
                reason = (
                    f"adds to the gradients of stage {stage} where its other replica, on rank {rank}, adds those of "
                    f"micro-batch {microbatch}: here it must be {microbatch + 1}, because both replicas must add in "
                    "the same order"
                )
                action = case.at(other, slot, stage * width + twin)
                raise case.error("order of gradient sums", other, slot, action, reason, (rank,))


def check_reduction_order(case: Case) -> None:
    """Check that two ranks with replicas of the same stages complete gradients in one order: reductions must meet."""
    if not _has_equal_pipes(case.schedule):
        return
    layout, width = case.schedule.layout, case.schedule.num_microbatches
    # By rank and that of the other replicas: slot, stage and micro-batch in which gradients are complete, in order.
    completed: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for stage in range(layout.num_stages):
        of_stage = case.spots.release[stage * width : (stage + 1) * width]
        for pipe, rank in enumerate(layout.replicas(stage)):
            last = max(range(pipe, width, 2), key=of_stage.__getitem__)
            completed.setdefault((rank, layout.replicas(stage)[1 - pipe]), []).append((of_stage[last], stage, last))
    for (rank, other), own in completed.items():
        theirs = completed[other, rank] if other < rank else own
        for (slot, stage, microbatch), (_, expected, _) in zip(sorted(own), sorted(theirs), strict=True):
            if stage != expected:
                reason = (
                    f"completes the gradients of stage {stage} at the point where rank {other}, which has the other "
                    f"replica, completes those of stage {expected}: reductions between the two would not meet"
                )
                action = case.at(rank, slot, stage * width + microbatch)
                raise case.error("order of reductions", rank, slot, action, reason, (other,))


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
            mirrored = "the second pipe must be the first one's mirror image"
            reason = f"stage {stage} is on ranks {rank} and {other}, but {mirrored}"
            raise ScheduleError(rule, f"{reason}: put it on ranks {rank} and {last - rank}", rank)
    for rank in range(schedule.num_ranks // 2) if _has_equal_pipes(schedule) else ():
        other = last - rank
        both = zip(schedule.computations(rank), schedule.computations(other), strict=True)
        for (_, expected), (slot, action) in both:
            image = Action(expected.stage, expected.kind, expected.microbatch ^ 1)
            if action != image:
                where = f"is where rank {rank} has {expected}"
                reason = f"{where}: here it must be {image}, because the two ranks are mirror images"
                raise case.error(rule, other, slot, action, reason, (rank,))


def _has_equal_pipes(schedule: Schedule) -> bool:
    """Whether there are two pipes with equally many micro-batches."""
    return schedule.layout.num_pipes == 2 and schedule.num_microbatches % 2 == 0


def check_no_deadlock(case: Case) -> None:
    """Check that every rank reaches its end at the level of waiting that every schedule must tolerate."""
    # Our executor's sends never wait, and it receives in the order of sending. If only messages between two ranks pass,
    # the operand of a computation was sent from an earlier slot, as rules before have checked, so no rank gets stuck.
    if case.exchange is Exchange.POSTED and case.schedule.hosts is None and not case.schedule.layout.shard_kinds:
        return
    check_waits(case.schedule, WaitLevel.IN_EVERY_OPERATION, case.exchange)


def check_waits(schedule: Schedule, waits: WaitLevel, exchange: Exchange, differing: bool = False) -> None:
    """Check that a schedule does not get stuck at one level of waiting, which may be stricter than the rules'."""
    blocked = blocked_ranks(schedule, waits, exchange, differing=differing)
    if blocked:
        first = min(blocked, key=lambda rank: rank.slot)
        others = ", ".join(f"rank {rank.rank} for rank {rank.peer} at slot {rank.slot}" for rank in blocked[:8])
        action = schedule.ranks[first.rank][first.slot].compute
        reason = f"waits for {first.message}, which rank {first.peer} never reaches (waiting: {others})"
        raise Case(schedule).error("no deadlock", first.rank, first.slot, action, reason, (first.peer,))


def check_microbatch_order(schedule: Schedule) -> None:
    """Check that every rank takes the micro-batches of each of its stages in order, in each pass.

    With several pipes a rank takes only its replica's micro-batches, in order. Only training needs this rule, to
    compute the same bits as Megatron's own schedules: their loops take the micro-batches of every stage in order,
    forwards, which draw data and random numbers, and backwards, whose sums in floating point depend on their order. If
    a backward is split, the inputs' half at once adds to the weights whose gradients cost nothing to compute, and the
    weights' half to all others, so each half keeps the order. The slices of a micro-batch come last to first.

    Raises ScheduleError, which names the first computation that is late.
    """
    slices = schedule.layout.slices

    def turn(action: Action) -> int:
        """Return the place of a pass among those of its stage and kind."""
        return action.microbatch if action.kind is Kind.FORWARD else reversed_slice(action.microbatch, slices)

    for rank in range(schedule.num_ranks):
        latest: dict[tuple[int, frozenset[Kind]], Action] = {}
        for slot, action in schedule.computations(rank):
            for kinds in (kinds for kinds in _PASSES if action.kind in kinds):
                before = latest.setdefault((action.stage, kinds), action)
                if turn(before) > turn(action):
                    reason = (
                        f"comes after {before}, but Megatron's own schedules compute a stage's micro-batches in "
                        "order, so gradient sums would differ in their last bits. Reorder the file; it can be "
                        "shown and simulated as it is"
                    )
                    raise Case(schedule).error("order of micro-batches", rank, slot, action, reason)
                latest[action.stage, kinds] = action


RULES: tuple[Rule, ...] = (
    check_shape,
    check_head,
    check_hosts,
    check_once,
    check_forward_first,
    check_needs,
    check_slices,
    check_shard_order,
    check_sum_order,
    check_reduction_order,
    check_mirror_images,
    check_other_ends,
    check_residency,
    check_bounds,
    check_pair_order,
    check_no_deadlock,
)
