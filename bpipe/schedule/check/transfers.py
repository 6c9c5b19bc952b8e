"""Judge a schedule's transfers: one function a rule. In: a `Case`. Out: nothing, or a `ScheduleError`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bpipe.schedule.action import OTHER_END, TRANSFER, Action, Key, Kind
from bpipe.schedule.check.case import NOWHERE, Case, ScheduleError
from bpipe.schedule.host_buffers import Residencies, Residency, host_buffers, host_memory_buffers
from bpipe.schedule.hosts import Host, Hosts, device_ranks, write_host
from bpipe.schedule.memory import live_counts, plain
from bpipe.schedule.schedule import Schedule, Slot

_EVICT, _HOST, _RETURN, _LOAD = Kind.EVICT, Kind.HOST, Kind.RETURN, Kind.LOAD
# By rank: the buffer that each stay takes.
Assigned = Mapping[int, Mapping[Residency, int]]


def check_hosts(case: Case) -> None:
    """Check that every host is another rank or the rank's own host memory."""
    rule, num_ranks, hosts = "hosts", case.schedule.num_ranks, case.schedule.hosts
    if hosts is not None and len(hosts) != num_ranks:
        raise ScheduleError(
            rule, f"hosts are given for {len(hosts)} of {num_ranks} ranks: say where each rank may evict to"
        )
    for rank, of_rank in enumerate(hosts or ()):
        for host in of_rank:
            if host.on_device and not (0 <= host.rank < num_ranks and host.rank != rank):
                raise ScheduleError(
                    rule, f"rank {rank}: host {write_host(host)} is not another rank from 0 to {num_ranks - 1}", rank
                )
            if not host.on_device and host.rank != rank:
                raise ScheduleError(
                    rule,
                    f"rank {rank}: it cannot evict to the CPU memory of rank {host.rank}, only to its own",
                    rank,
                )


def check_other_ends(case: Case) -> None:
    """Check that every transfer has its other end in the same slot of one host or goes to own memory, and that loads
    come from where evictions went."""
    schedule, rule = case.schedule, "other ends"
    hosts = schedule.hosts or ((),) * schedule.num_ranks
    guests = [_guests(hosts, rank) for rank in range(schedule.num_ranks)]
    residencies: dict[Key, Host] = {}
    for rank, slot, transfer in _transfers(schedule):
        is_evictors = transfer.kind is _EVICT or transfer.kind is _LOAD
        others = hosts[rank] if is_evictors else tuple(map(Host, guests[rank]))
        wrong = _unfit(schedule, rank, transfer, others)
        if wrong is not None:
            raise case.error(rule, rank, slot, transfer, wrong)
        stage, microbatch = transfer.stage, transfer.microbatch
        other = Action(stage, OTHER_END[transfer.kind], microbatch)
        where = _other_end(
            schedule.ranks, others if is_evictors else (Host(schedule.layout.rank_of(stage, microbatch)),), slot, other
        )
        if isinstance(where, str):
            raise case.error(rule, rank, slot, transfer, f"{where} {other} in this slot")
        if not is_evictors:
            continue
        before = residencies.setdefault((stage, microbatch), where)
        if before != where:
            raise case.error(rule, rank, slot, transfer, f"it is with {_place(before)}, not with {_place(where)}")
        if transfer.kind is _LOAD:
            del residencies[stage, microbatch]


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


def _other_end(rows: Sequence[Sequence[Slot]], others: Sequence[Host], slot: int, end: Action) -> Host | str:
    """Which of the others has the other end in this slot, host memory where none has to; or in words, why it is not
    one."""
    reached = device_ranks(others)
    found = [one for one in reached if end in rows[one][slot].transfers]
    if len(found) == 1:
        return Host(found[0])
    if found:
        return f"ranks {' and '.join(map(str, found))} both have"
    own = next((host for host in others if not host.on_device), None)
    return f"rank {' or '.join(map(str, reached))} has no" if own is None else own


def _place(host: Host) -> str:
    return f"rank {host.rank}" if host.on_device else "the rank's own CPU memory"


def check_residency(case: Case) -> None:
    """Check that evictions take what is finished and present, loads take what is away, and no computation uses what
    is away or under way."""
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


def check_host_buffers(case: Case, assigned: Assigned | None = None, own: Assigned | None = None) -> None:
    """Check that no host buffer holds two micro-batches at once, and that no buffer is numbered that is never needed.

    `assigned` and `own` replace the results of `host_buffers` and `host_memory_buffers`.
    """
    schedule = case.schedule
    for rank in range(schedule.num_ranks):
        if _hosts(schedule, rank):
            residencies = host_buffers(schedule, rank) if assigned is None else assigned[rank]
            _check_buffers(case, rank, residencies, (_HOST, _RETURN), "host buffer")
        residencies = host_memory_buffers(schedule, rank) if own is None else own.get(rank, {})
        if residencies:
            most = _check_buffers(case, rank, residencies, (_EVICT, _LOAD), "host buffer in CPU memory")
            if max(residencies.values()) >= most:
                reason = (
                    f"CPU memory has {max(residencies.values()) + 1} host buffers, but at most {most} are ever full "
                    "at once"
                )
                raise case.error("host buffers", rank, 0, None, reason)


def _check_buffers(
    case: Case, rank: int, residencies: Mapping[Residency, int], kinds: tuple[Kind, Kind], what: str
) -> int:
    """Return how many buffers are full at once, at most."""
    begins, ends = kinds
    now = Residencies()
    taken: dict[int, Action] = {}
    most = 0
    for slot, cell in enumerate(case.schedule.ranks[rank]):
        for action in cell.transfers:
            if action.kind is begins:
                residency = now.of(action)
                if begins is _EVICT and residency not in residencies:
                    # It goes to another rank.
                    continue
                index = residencies[residency]
                if index in taken:
                    raise case.error("host buffers", rank, slot, action, f"{what} {index} still holds {taken[index]}")
                taken[index] = action
        most = max(most, len(taken))
        for action in cell.transfers:
            if action.kind is ends and now.of(action) in residencies:
                taken.pop(residencies[now.of(action)], None)
    return most


def check_bounds(case: Case) -> None:
    """Check that no rank ever holds more micro-batches than its bound."""
    schedule = case.schedule
    for rank, bound in enumerate(schedule.bounds or ()):
        counts = live_counts(schedule, rank)
        if max(counts) > bound:
            slot = next(slot for slot, count in enumerate(counts) if count > bound)
            action = schedule.ranks[rank][slot].compute
            raise case.error(
                "bound", rank, slot, action, f"holds {plain(counts[slot])} micro-batches, but its bound is {bound}"
            )


def check_pair_order(case: Case) -> None:
    """Check that both ends of a pair start the transfers of one direction in the same order."""
    hosts = case.schedule.hosts or ()
    for rank, of_rank in enumerate(hosts):
        others = sorted({*device_ranks(of_rank), *_guests(hosts, rank)})
        for slot, cell in enumerate(case.schedule.ranks[rank]):
            if len(cell.transfers) > 1:
                sent = [one for one in cell.transfers if one.kind is _EVICT or one.kind is _RETURN]
                for other in others if len(sent) > 1 else ():
                    _check_received(case, rank, slot, sent, other)


def _check_received(case: Case, rank: int, slot: int, sent: Sequence[Action], other: int) -> None:
    """What `other` receives of this comes in this order."""
    ends = {Action(one.stage, OTHER_END[one.kind], one.microbatch): one for one in sent}
    received = [one for one in case.schedule.ranks[other][slot].transfers if one in ends]
    there = [ends[one] for one in received]
    for action, end in zip([one for one in sent if one in there], received, strict=True):
        if ends[end] != action:
            reason = f"here rank {other} expects the other end of {end}, not of this"
            raise case.error("order on a pair", rank, slot, action, reason)


def _transfers(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    return ((rank, slot, action) for rank in range(schedule.num_ranks) for slot, action in _of_rank(schedule, rank))


def _hosts(schedule: Schedule, rank: int) -> bool:
    return any(action.kind is _HOST for _, action in _of_rank(schedule, rank))


def _of_rank(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action]]:
    return (
        (slot, action) for slot, cell in enumerate(schedule.ranks[rank]) if cell.transfers for action in cell.transfers
    )
