"""Plan what leaves each rank so that its micro-batches and host buffers keep a memory budget.

In: a budget as it was given, a schedule without transfers, and what was weighed of every stage. Out: a plan, and lines
that say who hosts for whom. Knows no tensors and no processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes, buffer_bytes
from bpipe.config.flags.budgets import read_gib
from bpipe.plan.budget import Devices, OverBudget, one_budget_a_rank, within
from bpipe.plan.fit import Fit
from bpipe.predict.memory import DeviceBesides
from bpipe.schedule.host_buffers import host_buffers, stages_in_buffers
from bpipe.schedule.memory import Memory as SizesOfStages
from bpipe.schedule.memory import memory_of, moves_anything
from bpipe.schedule.schedule import Schedule
from bpipe.torch.sizes import StageSizes
from bpipe.transport.layout import BufferLayout

# Bytes, GiB as text ("70", "70.5GiB", "70,70,75,79"), or one of these a rank.
Memory = int | str | Sequence[int | str]


def budget_bytes(memory: Memory, num_ranks: int) -> tuple[int, ...]:
    """Return the budget of every rank in bytes. Raises ValueError for what is none."""
    given = [memory] if isinstance(memory, (int, str)) else memory
    found: list[int] = []
    for each in given:
        found += read_gib(each) if isinstance(each, str) else [each]
    if not found or min(found) < 1:
        raise ValueError(
            f"memory {memory!r} is not a number of bytes above 0: give bytes, or GiB as text such as '70GiB'"
        )
    return one_budget_a_rank(found, num_ranks)


@dataclass(frozen=True)
class RankBudgets:
    """A memory budget, and how to balance within it."""

    budget_bytes: tuple[int, ...]
    """Of every rank."""

    how: BalanceConfig
    """Who may host, and the pairs if they are given; no bounds."""

    @staticmethod
    def of(memory: Memory, plain: Schedule, how: BalanceConfig | None, differing: bool) -> RankBudgets:
        """Return the budget that was asked for. Raises ValueError beside options that say otherwise.

        `plain`: the schedule, of which nothing was balanced here.
        """
        refused = None
        if how is None:
            refused = "balance None evicts nothing: give balance=BalanceConfig(), or leave memory out"
        elif how.bounds is not None:
            refused = "bounds and memory exclude each other: give one of them"
        elif differing:
            refused = "it assumes micro-batches of one size, but these differ in size: give bounds"
        elif moves_anything(plain):
            refused = f"schedule {plain.name} is already balanced: leave memory out"
        elif plain.split_stages:
            refused = (
                f"{plain.name} splits backwards, and what torch keeps from dgrad to wgrad is known only once they "
                "have run: give bounds, or use whole backwards (1f1b, interleaved-1f1b)"
            )
        if how is None or refused is not None:
            raise ValueError(f"memory {memory!r}: {refused}")
        return RankBudgets(budget_bytes(memory, plain.num_ranks), how)

    def plan(self, schedule: Schedule, sizes: Mapping[int, StageSizes]) -> Fit:
        """Return the plan that sends only what must leave. Raises ValueError where no plan keeps the budget.

        `sizes`: by stage, of all of them.
        """
        return plan_within(schedule, self.budget_bytes, sizes, self.how)


def plan_within(
    schedule: Schedule,
    budgets: tuple[int, ...],
    sizes: Mapping[int, StageSizes],
    how: BalanceConfig = BalanceConfig(),
) -> Fit:
    """Return the plan within these bytes of every rank. Raises ValueError where there is none."""
    weighed = [sizes[stage] for stage in range(schedule.num_stages)]
    devices = Devices(
        schedule,
        memory_of([each.saved_bytes for each in weighed], [each.moved_bytes for each in weighed]),
        _besides([0] * schedule.num_ranks),
        budgets,
        hosts=how.hosts,
        parts=tuple(each.parts for each in weighed),
    )
    padding = [0] * schedule.num_ranks
    while True:
        try:
            found = within(replace(devices, besides=_besides(padding)), how.partners)
        except OverBudget as error:
            raise ValueError(
                f"memory: {error}. Micro-batches and host buffers are counted. Save less (recomputation, "
                'smaller micro-batches), or allow more hosts: BalanceConfig(hosts="pool"), BalanceConfig(hosts="host")'
            ) from None
        needed = [
            max(before, _padding(found.schedule, found.memory, sizes, rank)) for rank, before in enumerate(padding)
        ]
        if needed == padding:
            return found
        padding = needed


def _besides(working_bytes: Sequence[int]) -> DeviceBesides:
    none = (0,) * len(working_bytes)
    return DeviceBesides(none, tuple(working_bytes), none, Fraction(0))


def need_bytes(schedule: Schedule, sizes: Mapping[int, StageSizes]) -> tuple[int, ...]:
    """Return the most bytes of micro-batches and host buffers on each rank, where all that may leaves."""
    weighed = [sizes[stage] for stage in range(schedule.num_stages)]
    memory = memory_of([each.saved_bytes for each in weighed], [each.moved_bytes for each in weighed])
    return tuple(
        sum(allocated_bytes(schedule, rank, memory)) + _padding(schedule, memory, sizes, rank)
        for rank in range(schedule.num_ranks)
    )


def _padding(schedule: Schedule, memory: SizesOfStages, sizes: Mapping[int, StageSizes], rank: int) -> int:
    """Return bytes by which a rank's host buffers are larger than what they hold, for storages begin where copies
    like it."""
    hosted = host_buffers(schedule, rank)
    lengths = {stage: each.lengths_of(memory.size(stage, 0).moved_bytes) for stage, each in sizes.items()}
    laid_out = BufferLayout.of(stages_in_buffers(hosted), lengths)
    return max(0, laid_out.nbytes - buffer_bytes(schedule, hosted, memory))
