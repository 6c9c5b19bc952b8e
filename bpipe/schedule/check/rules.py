"""The rules that a schedule must keep, one function each; a broken rule raises a `ScheduleError` that shows the place.

`RULES` lists them in the order in which they run; a rule may rely on those before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bpipe.schedule.action import COMPUTE, OF_THE_INPUT, OF_THE_WEIGHTS, SHARDS, TRANSFER, Action, Key, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.dependencies import NOTHING, Dependencies
from bpipe.schedule.files.grid import window
from bpipe.schedule.hosts import Host, Hosts, device_ranks, write_host
from bpipe.schedule.layout import MOST_PIPES, TWO_PIPES, reversed_slice
from bpipe.schedule.memory import live_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule, Slot

NOWHERE = -1


class ScheduleError(ValueError):
    """A schedule that breaks `rule`, with the `rank`, `slot` and `action` to blame, if any, and the grid around."""

    def __init__(
        self, rule: str, message: str, rank: int | None = None, slot: int | None = None, action: Action | None = None
    ) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule, self.rank, self.slot, self.action = rule, rank, slot, action


@dataclass(slots=True)
class Spots:
    """Slots of the computations of every stage and micro-batch, at `stage * num_microbatches + microbatch`, or NOWHERE.

    Attributes:
        forward: Slots of forwards.
        need: Slots of the first computation that reads the saved activations.
        release: Slots of the last one, which is the same for a full backward.
        shards: Slots of shards by kind, at `rank * num_microbatches + microbatch`.
    """

    forward: list[int]
    need: list[int]
    release: list[int]
    shards: Mapping[Kind, list[int]]


@dataclass(slots=True)
class Case:
    """A schedule under check and what its rules share."""

    schedule: Schedule
    exchange: Exchange = Exchange.POSTED
    spots: Spots = field(default_factory=lambda: Spots([], [], [], {}))

    def at(self, rank: int, slot: int, key: int) -> Action | None:
        """Return the computation of stage and micro-batch `key` in this slot, which may have two that overlap."""
        stage_and_microbatch = divmod(key, self.schedule.num_microbatches)
        computations = self.schedule.ranks[rank][slot].computations
        return next((action for action in computations if action.key == stage_and_microbatch), None)

    def error(
        self, rule: str, rank: int, slot: int, action: Action | None, reason: str, lanes: tuple[int, ...] = ()
    ) -> ScheduleError:
        """Return the error at this place; `lanes` are further ranks whose part of the grid explains it."""
        cell = "a bubble" if action is None else str(action)
        grid = window(self.schedule, rank, slot, lanes)
        return ScheduleError(rule, f"rank {rank}, slot {slot}, {cell}: {reason}\n{grid}", rank, slot, action)


Rule = Callable[[Case], None]


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
    """Check that stages are evenly distributed and each rank has one bound."""
    schedule, ranks = case.schedule, case.schedule.num_ranks
    for placement in schedule.layout.placements:
        counts = [placement.count(rank) for rank in range(ranks)]
        if len(set(counts)) != 1 or not counts[0] or sum(counts) != schedule.num_stages:
            reason = f"stage_to_rank {placement} must give each of the {ranks} ranks equally many stages"
            raise ScheduleError(_SHAPE, reason)
    if schedule.bounds is not None and len(schedule.bounds) != ranks:
        raise ScheduleError(_SHAPE, f"{len(schedule.bounds)} bounds for {ranks} ranks: give one for each")


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
        for early, slots, before, reason in (
            (key, spots.forward, key - 1, "attends to the previous slice, whose forward"),
            (key - 1, spots.need, key, "needs gradients of its keys from the next slice, whose backward"),
        ):
            slot, limit = slots[early], slots[before]
            if slot <= limit:
                action = case.at(rank, slot, early)
                raise case.error(_SLICES, rank, slot, action, f"{reason} comes only in slot {limit}")


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


def check_mirror_images(case: Case) -> None:
    """Check that with two pipes ranks r and p - 1 - r are mirror images: same stages, same order, each with the other
    pipe's micro-batches.

    Then both replicas of a stage add up their gradients in the same order, on which the last bits depend, and
    everything that they do together meets: reductions of gradients, and expert parallelism.
    """
    schedule, rule, last = case.schedule, "mirror images", case.schedule.num_ranks - 1
    if schedule.layout.num_pipes != 2:
        return
    for stage, (rank, other) in enumerate(zip(*schedule.layout.placements, strict=True)):
        if rank + other != last:
            mirrored = "the second pipe must be the first one's mirror image"
            reason = f"stage {stage} is on ranks {rank} and {other}, but {mirrored}"
            raise ScheduleError(rule, f"{reason}: put it on ranks {rank} and {last - rank}", rank)
    # With an odd number the first pipe has one more, and orders differ. No training has that.
    for rank in range(schedule.num_ranks // 2) if schedule.num_microbatches % 2 == 0 else ():
        other = last - rank
        both = zip(schedule.computations(rank), schedule.computations(other), strict=True)
        for (_, expected), (slot, action) in both:
            image = Action(expected.stage, expected.kind, expected.microbatch ^ 1)
            if action != image:
                where = f"is where rank {rank} has {expected}"
                reason = f"{where}: here it must be {image}, because the two ranks are mirror images"
                raise case.error(rule, other, slot, action, reason, (rank,))


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


_EVICT, _RETURN, _LOAD = Kind.EVICT, Kind.RETURN, Kind.LOAD


def check_hosts(case: Case) -> None:
    """Check that every host is another rank or the rank's own host memory."""
    rule, num_ranks, hosts = "hosts", case.schedule.num_ranks, case.schedule.hosts
    if hosts is not None and len(hosts) != num_ranks:
        reason = f"hosts are given for {len(hosts)} of {num_ranks} ranks: say where each rank may evict to"
        raise ScheduleError(rule, reason)
    for rank, of_rank in enumerate(hosts or ()):
        for host in of_rank:
            if host.on_device and not (0 <= host.rank < num_ranks and host.rank != rank):
                reason = f"host {write_host(host)} is not another rank from 0 to {num_ranks - 1}"
                raise ScheduleError(rule, f"rank {rank}: {reason}", rank)
            if not host.on_device and host.rank != rank:
                reason = f"it cannot evict to the CPU memory of rank {host.rank}, only to its own"
                raise ScheduleError(rule, f"rank {rank}: {reason}", rank)


def check_other_ends(case: Case) -> None:
    """Check that every transfer has its other end in the same slot of one host, or is to own memory; loads match
    evictions."""
    schedule, rule = case.schedule, "other ends"
    hosts = schedule.hosts or ((),) * schedule.num_ranks
    guests = [_guests(hosts, rank) for rank in range(schedule.num_ranks)]
    residencies: dict[Key, Host] = {}
    for rank, slot, transfer in _transfers(schedule):
        is_evictors = transfer.kind is _EVICT or transfer.kind is _LOAD
        others = hosts[rank] if is_evictors else tuple(map(Host, guests[rank]))
        reason = _unfit(schedule, rank, transfer, others)
        if reason is not None:
            raise case.error(rule, rank, slot, transfer, reason)
        if not is_evictors:
            others = (Host(schedule.layout.rank_of(*transfer.key)),)
        host = _host_with(schedule, others, slot, transfer.other_end)
        if isinstance(host, str):
            raise case.error(rule, rank, slot, transfer, f"{host} {transfer.other_end} in this slot")
        if not is_evictors:
            continue
        before = residencies.setdefault(transfer.key, host)
        if before != host:
            raise case.error(rule, rank, slot, transfer, f"it is with {_name(before)}, not with {_name(host)}")
        if transfer.kind is _LOAD:
            del residencies[transfer.key]


def _guests(hosts: Hosts, rank: int) -> list[int]:
    """Return the ranks that may evict to this one."""
    return [guest for guest, of_rank in enumerate(hosts) if Host(rank) in of_rank]


def _unfit(schedule: Schedule, rank: int, transfer: Action, others: Sequence[Host]) -> str | None:
    """Return why an action cannot be a transfer between this rank and one of `others`, or None."""
    kind, stage, microbatch = transfer.kind, transfer.stage, transfer.microbatch
    if kind not in TRANSFER:
        return f"{kind.value} is not a transfer"
    if not others:
        return f"rank {rank} has no partner"
    owners = (rank,) if kind is _EVICT or kind is _LOAD else device_ranks(others)
    if not 0 <= stage < schedule.num_stages or schedule.layout.rank_of(stage, microbatch) not in owners:
        return f"stage {stage} is not on rank {' or '.join(map(str, owners))}"
    if not 0 <= microbatch < schedule.num_microbatches:
        return f"there are only micro-batches 0 to {schedule.num_microbatches - 1}"
    return None


def _host_with(schedule: Schedule, others: Sequence[Host], slot: int, end: Action) -> Host | str:
    """Return the one host that has the other end in this slot, or host memory; or, in words, why it is not one."""
    devices = device_ranks(others)
    owners = [rank for rank in devices if end in schedule.ranks[rank][slot].transfers]
    if len(owners) == 1:
        return Host(owners[0])
    if owners:
        return f"ranks {' and '.join(map(str, owners))} both have"
    own = next((host for host in others if not host.on_device), None)
    return f"rank {' or '.join(map(str, devices))} has no" if own is None else own


def _name(host: Host) -> str:
    return f"rank {host.rank}" if host.on_device else "the rank's own CPU memory"


def check_residency(case: Case) -> None:
    """Check that evictions take what is finished, loads what is away, and that no computation uses what is away."""
    schedule, spots = case.schedule, case.spots
    away: dict[int, int] = {}
    returned: dict[int, int] = {}
    for rank, slot, transfer in _transfers(schedule):
        key = transfer.stage * schedule.num_microbatches + transfer.microbatch
        reason = None
        if transfer.kind is _EVICT:
            reason = _cannot_leave(slot, spots.forward[key], spots.need[key], away.get(key), returned.get(key, NOWHERE))
            away[key] = slot
        elif transfer.kind is _LOAD:
            reason = _cannot_return(slot, spots.need[key], away.pop(key, slot))
            returned[key] = slot
        if reason is not None:
            raise case.error("activations present", rank, slot, transfer, reason)
    for key, slot in away.items():
        stage, microbatch = divmod(key, schedule.num_microbatches)
        rank, need = schedule.layout.rank_of(stage, microbatch), spots.need[key]
        reason = f"micro-batch {microbatch} was evicted in slot {slot} and is not loaded before this"
        raise case.error("activations present", rank, need, case.at(rank, need, key), reason)


def _cannot_leave(slot: int, forward: int, need: int, left: int | None, returned: int) -> str | None:
    if left is not None:
        return f"it was already evicted in slot {left}"
    if slot <= forward:
        return f"its forward ends in slot {forward}, evict it later"
    if slot <= returned:
        return f"it is still being loaded in slot {returned}"
    return f"its backward is in slot {need}, evict before" if slot >= need else None


def _cannot_return(slot: int, need: int, left: int) -> str | None:
    if left >= slot:
        return "it is not evicted"
    return f"its backward is in slot {need}, load before" if slot >= need else None


def check_bounds(case: Case) -> None:
    """Check that no rank ever holds more micro-batches than its bound."""
    schedule = case.schedule
    for rank, bound in enumerate(schedule.bounds or ()):
        counts = live_counts(schedule, rank)
        if max(counts) > bound:
            slot = next(slot for slot, count in enumerate(counts) if count > bound)
            reason = f"holds {counts[slot]} micro-batches, but its bound is {bound}"
            raise case.error("bound", rank, slot, schedule.ranks[rank][slot].compute, reason)


def check_pair_order(case: Case) -> None:
    """Check that both ends of a pair start the transfers of one direction in the same order."""
    hosts = case.schedule.hosts or ()
    for rank, of_rank in enumerate(hosts):
        others = sorted({*device_ranks(of_rank), *_guests(hosts, rank)})
        for slot, cell in enumerate(case.schedule.ranks[rank]):
            sent = {action.other_end: action for action in cell.transfers if action.kind in (_EVICT, _RETURN)}
            for other in others if len(sent) > 1 else ():
                received = [sent[end] for end in case.schedule.ranks[other][slot].transfers if end in sent]
                for action, expected in zip([own for own in sent.values() if own in received], received, strict=True):
                    if expected != action:
                        reason = f"here rank {other} expects the other end of {expected.other_end}, not of this"
                        raise case.error("order on a pair", rank, slot, action, reason)


def _transfers(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield every rank's transfers, each with its rank and slot."""
    return ((rank, slot, action) for rank in range(schedule.num_ranks) for slot, action in schedule.transfers(rank))


RULES: tuple[Rule, ...] = (
    check_shape,
    check_head,
    check_hosts,
    check_once,
    check_forward_first,
    check_needs,
    check_slices,
    check_shard_order,
    check_mirror_images,
    check_other_ends,
    check_residency,
    check_bounds,
    check_pair_order,
    check_no_deadlock,
)
