"""The rules for a schedule's transfers, one function each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bpipe.schedule.action import TRANSFER, Action, Key, Kind
from bpipe.schedule.check.case import NOWHERE, Case, ScheduleError
from bpipe.schedule.hosts import Host, Hosts, device_ranks, write_host
from bpipe.schedule.memory import live_counts, plain
from bpipe.schedule.schedule import Schedule

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
            reason = f"holds {plain(counts[slot])} micro-batches, but its bound is {bound}"
            raise case.error("bound", rank, slot, schedule.ranks[rank][slot].compute, reason)


def check_pair_order(case: Case) -> None:
    """Check that both ends of a pair start the transfers of one direction in the same order."""
    hosts = case.schedule.hosts or ()
    for rank, of_rank in enumerate(hosts):
        others = sorted({*device_ranks(of_rank), *_guests(hosts, rank)})
        for slot, cell in enumerate(case.schedule.ranks[rank]):
            sent = [transfer for transfer in cell.transfers if transfer.kind is _EVICT or transfer.kind is _RETURN]
            for other in others if len(sent) > 1 else ():
                _check_received(case, rank, slot, sent, other)


def _check_received(case: Case, rank: int, slot: int, sent: Sequence[Action], other: int) -> None:
    """Check that `other` receives its part of what is sent in the same order."""
    ends = {action.other_end: action for action in sent}
    received = [ends[end] for end in case.schedule.ranks[other][slot].transfers if end in ends]
    for action, expected in zip([action for action in sent if action in received], received, strict=True):
        if expected != action:
            reason = f"here rank {other} expects the other end of {expected.other_end}, not of this"
            raise case.error("order on a pair", rank, slot, action, reason)


def _transfers(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield every rank's transfers, each with its rank and slot."""
    return ((rank, slot, action) for rank in range(schedule.num_ranks) for slot, action in schedule.transfers(rank))
