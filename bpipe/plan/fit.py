"""A plan within budgets, and lines or JSON that say who hosts for whom, how much, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import buffer_bytes, moved_bytes
from bpipe.config.flags.values import budget_text
from bpipe.schedule.host_buffers import (
    Residency,
    host_buffers,
    host_memory_buffers,
    hosts_of,
    num_buffers_for,
    num_host_memory_buffers,
    residencies_by_host,
)
from bpipe.schedule.hosts import device_ranks, uses_host_memory
from bpipe.schedule.memory import Memory, num_transfers
from bpipe.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan within budgets."""

    how: BalanceConfig
    """Configuration that balances the schedule."""
    schedule: Schedule
    """The balanced schedule."""
    memory: Memory
    """Memory of a micro-batch of every stage, with the part that moves."""
    budget_bytes: tuple[int, ...]
    alone_bytes: tuple[int, ...]
    """Bytes that each device would need without evictions."""
    need_bytes: tuple[int, ...]
    """Bytes that each device needs."""
    exposed_s: tuple[float, ...] | None = None
    """Seconds per iteration that each rank waits for transfers, if costs are known."""
    unjudged: str | None = None
    """Why waits were not simulated although costs are known."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that leave all ranks in an iteration."""
        return sum(self.sent_bytes(rank) for rank in range(self.schedule.num_ranks))

    def sent_bytes(self, rank: int) -> int:
        """Return bytes that leave one rank in an iteration."""
        return self.residency_bytes(hosts_of(self.schedule, rank))

    @property
    def own_bytes(self) -> tuple[int, ...]:
        """Bytes of each device's host buffers in its node's memory."""
        ranks = range(self.schedule.num_ranks)
        return tuple(
            buffer_bytes(self.schedule, host_memory_buffers(self.schedule, rank), self.memory) for rank in ranks
        )

    def residency_bytes(self, residencies: Iterable[Residency]) -> int:
        """Return bytes that leave with these residencies."""
        return moved_bytes(residencies, self.memory)


def plan_values(fit: Fit) -> dict[str, Any]:
    """Return the plan as JSON values."""
    schedule = fit.schedule
    return {
        "budget_bytes": list(fit.budget_bytes),
        "alone_bytes": list(fit.alone_bytes),
        "need_bytes": list(fit.need_bytes),
        "moved_bytes": fit.moved_bytes,
        **({} if fit.exposed_s is None else {"exposed_s": list(fit.exposed_s)}),
        **({} if fit.unjudged is None else {"unjudged": fit.unjudged}),
        **({"own_bytes": list(fit.own_bytes)} if uses_host_memory(schedule.hosts) else {}),
        "hosts": [
            {
                "rank": rank,
                "host": host.rank,
                "evictions": len(residencies),
                "moved_bytes": fit.residency_bytes(residencies),
            }
            for rank in range(schedule.num_ranks)
            for host, residencies in residencies_by_host(schedule, rank).items()
            if fit.residency_bytes(residencies)
        ],
    }


def plan_lines(fit: Fit, basis: str = "by prediction") -> list[str]:
    """Return lines that say who hosts for whom, how much, and why."""
    schedule, budgets = fit.schedule, fit.budget_bytes
    head = f"{basis} within {budget_text(budgets)} GiB per device"
    senders = [rank for rank in range(schedule.num_ranks) if num_transfers(schedule, rank).evictions]
    if not senders:
        fullest = max(range(schedule.num_ranks), key=lambda rank: fit.alone_bytes[rank] - budgets[rank])
        return [
            f"{head}: nothing has to leave, rank {fullest} is the fullest with "
            f"{budget_text([fit.alone_bytes[fullest]])} GiB"
        ]
    summary = [f"{head}: {budget_text([fit.moved_bytes])} GiB are evicted per iteration"]
    return [*summary, *(_hosting(fit, rank) for rank in senders), *_waiting(fit)]


def _part(fit: Fit, residencies: Sequence[Residency]) -> str:
    """Return the size of each part as text; empty if whole micro-batches move."""
    sizes = {fit.memory.size(residency.stage, residency.microbatch).moved_bytes for residency in residencies}
    if not {residency.stage for residency in residencies} & set(fit.how.parts):
        return ""
    return f"{'up to ' if len(sizes) > 1 else ''}{budget_text([max(sizes)])} GiB of each of "


def _waiting(fit: Fit) -> list[str]:
    if fit.unjudged is not None:
        return [
            f"whether transfers end before they are needed was not looked at, and none is issued earlier: "
            f"{fit.unjudged}"
        ]
    waits = ", ".join(
        f"rank {rank} {seconds:.3f} s" for rank, seconds in enumerate(fit.exposed_s or ()) if seconds >= 0.0005
    )
    earlier = ", issued earlier where there is room" if fit.how.windows is not None else ""
    return [f"not every transfer ends before it is needed{earlier}: waits in an iteration {waits}"] if waits else []


def _hosting(fit: Fit, rank: int) -> str:
    schedule, by_host = fit.schedule, residencies_by_host(fit.schedule, rank)
    total = schedule.num_microbatches * len(schedule.layout.stages_of(rank))
    counted = "micro-batches" if schedule.layout.slices == 1 else "slices of micro-batches"
    parts = []
    for host, residencies in by_host.items():
        if host.on_device:
            place, count = f"rank {host.rank}", num_buffers_for(schedule, host.rank)[rank]
            size_bytes = buffer_bytes(schedule, host_buffers(schedule, host.rank), fit.memory, rank)
        else:
            place, count, size_bytes = "its own node", num_host_memory_buffers(schedule, rank), fit.own_bytes[rank]
        parts.append(
            f"{place} hosts {_part(fit, residencies)}{len(residencies)} of its {total} {counted}, in "
            f"{count} host buffer{'s' * (count > 1)} of {budget_text([size_bytes])} GiB in all"
        )
    needs = [budget_text([fit.need_bytes[holder]]) for holder in (rank, *device_ranks(by_host))]
    need = f"they need {', '.join(needs[:-1])} and {needs[-1]} GiB" if len(needs) > 1 else f"it needs {needs[0]} GiB"
    return f"rank {rank} would need {budget_text([fit.alone_bytes[rank]])} GiB; {', '.join(parts)}: {need}"
