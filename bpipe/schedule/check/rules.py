"""Judge a schedule: one function a rule.

In: any Schedule. Out: nothing, or a `ScheduleError` that names the place and shows it.

`RULES` holds them in the order in which they run; a rule may rely on those before it. Knows no tensors, no seconds, and
not who made the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from bpipe.schedule.action import COMPUTE, SHARDS, Action, Kind
from bpipe.schedule.check.case import NOWHERE, Case, Rule, ScheduleError, Spots
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.replicas import check_mirror_images, check_reduction_order, check_sum_order
from bpipe.schedule.check.slices import check_slices
from bpipe.schedule.check.transfers import (
    check_bounds,
    check_host_buffers,
    check_hosts,
    check_other_ends,
    check_pair_order,
    check_residency,
)
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.layout import MOST_PIPES, TWO_PIPES
from bpipe.schedule.memory import SHARE_DECIMALS
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
_SHARD_FORWARD, _SHARD_BACKWARD = Kind.SHARD_FORWARD, Kind.SHARD_BACKWARD
_INPUT_FORWARD, _INPUT_BACKWARD = Kind.INPUT_FORWARD, Kind.INPUT_BACKWARD
# Names of rules that several functions raise.
_ONCE, _SHARD_ORDER = "each computation once", "order of shards"


def check(schedule: Schedule, exchange: Exchange = Exchange.POSTED) -> None:
    """Raise ScheduleError for the first rule the schedule breaks.

    `exchange` is that of whoever is to run it; by default our executor's.
    """
    case = Case(schedule, exchange)
    for rule in RULES:
        rule(case)


def check_shape(case: Case) -> None:
    """Check that all ranks have equally many slots and that these can hold all stages and micro-batches."""
    schedule, rule = case.schedule, "shape"
    ranks = schedule.num_ranks
    if ranks == 0 or schedule.num_microbatches < 1:
        raise ScheduleError(
            rule, f"{ranks} ranks, {schedule.num_microbatches} micro-batches: there must be at least one of each"
        )
    if schedule.layout.num_pipes > MOST_PIPES:
        raise ScheduleError(rule, f"there are {schedule.layout.num_pipes} pipes: {TWO_PIPES}")
    lengths = [len(row) for row in schedule.ranks]
    if len(set(lengths)) != 1:
        shorter = lengths.index(min(lengths))
        raise ScheduleError(
            rule,
            f"rank {shorter} has {min(lengths)} slots, but others have {max(lengths)}: fill it up with bubbles",
            shorter,
        )
    # Tables of this size follow: a file must not make them larger than itself.
    if schedule.num_stages * schedule.num_microbatches > ranks * lengths[0]:
        raise ScheduleError(
            rule,
            f"{schedule.num_stages} stages of {schedule.num_microbatches} micro-batches do not fit into {ranks} x "
            f"{lengths[0]} slots",
        )


def check_head(case: Case) -> None:
    """Check that stages are evenly shared out, that each rank has one bound, and that `after_input` is a share that
    can be written."""
    schedule, rule, ranks = case.schedule, "shape", case.schedule.num_ranks
    for placement in schedule.layout.placements:
        owned = [placement.count(rank) for rank in range(ranks)]
        if len(set(owned)) != 1 or not owned[0] or sum(owned) != schedule.num_stages:
            raise ScheduleError(
                rule, f"stage_to_rank {placement} must give each of the {ranks} ranks equally many stages"
            )
    if schedule.bounds is not None and len(schedule.bounds) != ranks:
        raise ScheduleError(rule, f"{len(schedule.bounds)} bounds for {ranks} ranks: give one for each")
    share = schedule.after_input
    if share < 0 or (share * 10**SHARE_DECIMALS).denominator != 1:
        raise ScheduleError(
            rule, f"after_input {share} must be a share of at least 0 with at most {SHARE_DECIMALS} decimals"
        )


def check_once(case: Case) -> None:
    """Check that every stage computes each micro-batch forward once and backward once, on its own rank, with every
    shard. Fill `case.spots`."""
    schedule, width, spots = case.schedule, case.schedule.num_microbatches, _empty_spots(case.schedule)
    filled = {
        _FORWARD: (spots.forward,),
        _BACKWARD: (spots.need, spots.release),
        _INPUT: (spots.need,),
        _WEIGHT: (spots.release,),
    }
    filled |= {kind: (slots,) for kind, slots in spots.shards.items()}
    limits = {kind: len(slots[0]) // width for kind, slots in filled.items()}
    rank_of = schedule.layout.rank_of_action
    for rank, slot, compute in _computations(case):
        kind, stage, microbatch = compute.kind, compute.stage, compute.microbatch
        if kind not in filled:
            what = "belongs to a split vocabulary, but here it is whole" if kind in COMPUTE else "is not a computation"
            raise case.error(_ONCE, rank, slot, compute, f"{kind.value} {what}")
        num_stages = limits[kind]
        if not 0 <= stage < num_stages or not 0 <= microbatch < width:
            raise case.error(
                _ONCE,
                rank,
                slot,
                compute,
                f"there are only stages 0 to {num_stages - 1} and micro-batches 0 to {width - 1}",
            )
        if (owner := rank_of(compute)) != rank:
            raise case.error(_ONCE, rank, slot, compute, f"stage {stage} belongs to rank {owner}", (owner,))
        key = stage * width + microbatch
        for slots in filled[kind]:
            if slots[key] != NOWHERE:
                raise case.error(_ONCE, rank, slot, compute, f"already computed in slot {slots[key]}")
            slots[key] = slot
    _check_complete(case, spots)
    case.spots = spots


def _computations(case: Case) -> Iterator[tuple[int, int, Action]]:
    """Yield rank, slot and computation, slot by slot. Raises ScheduleError for two that cannot overlap."""
    for rank, row in enumerate(case.schedule.ranks):
        for slot, cell in enumerate(row):
            if cell.overlapped is not None:
                _check_pair(case, rank, slot, cell)
            if cell.compute is not None:
                yield rank, slot, cell.compute
            if cell.overlapped is not None:
                yield rank, slot, cell.overlapped


def _empty_spots(schedule: Schedule) -> Spots:
    width = schedule.num_microbatches
    size = schedule.num_stages * width
    shards = {kind: [NOWHERE] * (schedule.num_ranks * width) for kind in schedule.layout.shard_kinds}
    return Spots([NOWHERE] * size, [NOWHERE] * size, [NOWHERE] * size, shards)


def _check_complete(case: Case, spots: Spots) -> None:
    """No computation of any stage or shard is missing."""
    schedule = case.schedule
    stages = {"F": spots.forward, "B or I": spots.need, "B or W": spots.release}
    shards = {kind.value: slots for kind, slots in spots.shards.items()}
    for kinds, slots in (stages | shards).items():
        if NOWHERE in slots:
            place, microbatch = divmod(slots.index(NOWHERE), schedule.num_microbatches)
            whose, owner = ("rank", place) if kinds in shards else ("stage", schedule.layout.rank_of(place, microbatch))
            reason = f"{whose} {place} has no {kinds} of micro-batch {microbatch} in any slot"
            raise case.error(_ONCE, owner, len(schedule.ranks[owner]) - 1, None, reason)


def _check_pair(case: Case, rank: int, slot: int, cell: Slot) -> None:
    first, second = cell.compute, cell.overlapped
    if first is None or first.kind is not _FORWARD or second is None or second.kind not in (_BACKWARD, _INPUT):
        what = f"{first or 'nothing'} and {second} cannot overlap: only a forward and a backward can, in this order"
        raise case.error(_ONCE, rank, slot, second, what)


def check_forward_first(case: Case) -> None:
    """Check that every forward comes before its backward, and BACKWARD_INPUT before BACKWARD_WEIGHT."""
    rule, spots, width = "forward before backward", case.spots, case.schedule.num_microbatches
    for key, (forward, need, release) in enumerate(zip(spots.forward, spots.need, spots.release, strict=True)):
        if forward < need <= release:
            continue
        rank = case.schedule.layout.rank_of(*divmod(key, width))
        late, early = (forward, need) if forward >= need else (need, release)
        before, after = case.at(rank, early, key), case.at(rank, late, key)
        raise case.error(rule, rank, early, before, f"{after} comes only in slot {late}")


def check_needs(case: Case) -> None:
    """Check that no computation comes before those that make its operands: forwards after the stage before,
    backwards after the stage behind."""
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
            if first == NOTHING:
                continue
            for microbatch in range(width):
                if made_in[first + microbatch] >= slots[key + microbatch]:
                    raise _too_early(
                        case, dependencies, Action(key // width, kind, microbatch), slots[key + microbatch]
                    )


def _too_early(case: Case, dependencies: Dependencies, action: Action, slot: int) -> ScheduleError:
    """Return a computation that stands before the last of those that make its operands."""
    value, rows = dependencies.operand_of(action), case.schedule.ranks
    makers = [
        (at, rank, one)
        for rank in dependencies.route(value).makers
        for at, cell in enumerate(rows[rank])
        for one in cell.computations
    ]
    other_slot, other_rank, needed = max(
        (maker for maker in makers if dependencies.value_of(maker[2]) == value), key=lambda maker: maker[0]
    )
    rank = case.schedule.layout.rank_of_action(action)
    mine = next(one for one in rows[rank][slot].computations if dependencies.operand_of(one) == value)
    reason = f"needs {needed}, which rank {other_rank} computes in slot {other_slot}"
    return case.error("stage order", rank, slot, mine, reason, (other_rank,))


def check_shard_order(case: Case) -> None:
    """Check that all ranks compute shards of the output layer in one order, and input shards by micro-batch, so that
    collectives meet."""
    if not case.spots.shards:
        return
    first: list[tuple[int, Action]] = []
    for rank, row in enumerate(case.schedule.ranks):
        shards = [(slot, one) for slot, cell in enumerate(row) for one in cell.computations if one.kind in SHARDS]
        for kind in (_INPUT_FORWARD, _INPUT_BACKWARD):
            _check_by_microbatch(case, rank, [(slot, one) for slot, one in shards if one.kind is kind])
        outputs = [(slot, one) for slot, one in shards if one.kind in (_SHARD_FORWARD, _SHARD_BACKWARD)]
        first = first or outputs
        for (_, expected), (slot, one) in zip(first, outputs, strict=True):
            if (one.kind, one.microbatch) != (expected.kind, expected.microbatch):
                reason = f"rank 0 has {expected} there: all ranks need the same order"
                raise case.error(_SHARD_ORDER, rank, slot, one, reason, (0,))


def _check_by_microbatch(case: Case, rank: int, of_kind: Sequence[tuple[int, Action]]) -> None:
    for (_, before), (slot, after) in pairwise(of_kind):
        if after.microbatch < before.microbatch:
            raise case.error(
                _SHARD_ORDER,
                rank,
                slot,
                after,
                f"comes after {before}: {after.kind.value} must follow the order of micro-batches",
            )


def check_no_deadlock(case: Case) -> None:
    """Check that every rank reaches its end at every level of waiting that the schedule must stand."""
    # Our executor's sends wait for nobody, and it receives in the order of sending. Where only messages pass, between
    # two ranks, what a computation needs was sent from an earlier slot, as rules before saw: slot by slot every rank
    # goes on.
    if case.exchange is Exchange.POSTED and case.schedule.hosts is None and not case.schedule.layout.shard_kinds:
        return
    _check_waits(case, WaitLevel.IN_EVERY_OPERATION)


def check_waits(schedule: Schedule, waits: WaitLevel, exchange: Exchange, differing: bool = False) -> None:
    """Check that a schedule does not get stuck at one level of waiting: a run may be stricter than what every schedule
    must stand."""
    _check_waits(Case(schedule, exchange), waits, differing)


def _check_waits(case: Case, waits: WaitLevel, differing: bool = False) -> None:
    blocked = blocked_ranks(case.schedule, waits, case.exchange, differing=differing)
    if blocked:
        first = min(blocked, key=lambda one: one.slot)
        others = ", ".join(f"rank {one.rank} for rank {one.peer} at slot {one.slot}" for one in blocked[:8])
        action = case.schedule.ranks[first.rank][first.slot].compute
        reason = f"waits for {first.message}, which rank {first.peer} never reaches (waiting: {others})"
        raise case.error("no deadlock", first.rank, first.slot, action, reason, (first.peer,))


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
    check_host_buffers,
    check_bounds,
    check_pair_order,
    check_no_deadlock,
)
