"""Plan what leaves each rank so that its micro-batches and host buffers stay within a memory budget.

What a forward of each stage saves, and how much of it can move, is measured before the first step. That trains nothing:
random numbers, buffers and gathered parameters are restored, as by torch's own handshake, which runs forwards and
backwards of the stages to learn shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, compress
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from bpipe.balance.config import BalanceConfig
from bpipe.balance.pairs import allocated_bytes, buffer_bytes
from bpipe.config.flags.values import read_gib
from bpipe.plan.budget import Devices, Fit, OverBudget, one_budget_a_rank, within
from bpipe.predict.memory import DeviceBesides
from bpipe.runtime.capture import Claims, find
from bpipe.runtime.evictor import parts_of
from bpipe.runtime.graph import plain_tensors
from bpipe.schedule.host_buffers import host_buffers, stages_in_buffers
from bpipe.schedule.memory import Memory as SizesOfStages
from bpipe.schedule.memory import memory_of, moves_anything
from bpipe.schedule.schedule import Schedule
from bpipe.transport.distributed import gathered
from bpipe.transport.memory import BufferLayout

# What all micro-batches share may count as the first one's own.
_MICROBATCHES = 2

# The outputs of a forward, which are the roots of its graph, and what the stage received for it.
Ran = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class StageSizes:
    """One micro-batch of a stage."""

    stage: int

    saved_bytes: int
    """Bytes that its forward saves."""

    lengths: tuple[int, ...]
    """Of the storages that can leave, in the order of the walk."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes that can leave instead of all, ascending; the last is all."""
        return parts_of(self.lengths) or (0,)

    @property
    def moved_bytes(self) -> int:
        """Bytes that can leave."""
        return sum(self.lengths)

    def lengths_of(self, part_bytes: int) -> tuple[int, ...]:
        """Return the storages that leave with a part: the last ones of the walk that hold it."""
        before = accumulate(reversed(self.lengths), initial=0)
        return tuple(length for length, sent in zip(reversed(self.lengths), before, strict=False) if sent < part_bytes)


def weigh(
    stages: Sequence[Any],
    num_microbatches: int,
    forward: Callable[[Any, int], Ran],
    device: torch.device,
    minimum_bytes: int,
) -> list[StageSizes]:
    """Return the sizes of each of these stages, of which `forward(stage, microbatch)` runs one forward."""
    ordered = sorted(stages, key=lambda stage: int(stage.stage_index))
    with _unseen(ordered, device):
        return [_weighed(stage, num_microbatches, forward, device, minimum_bytes) for stage in ordered]


def _weighed(
    stage: Any, num_microbatches: int, forward: Callable[[Any, int], Ran], device: torch.device, minimum_bytes: int
) -> StageSizes:
    index, claims = int(stage.stage_index), Claims()
    alive: list[Ran] = []
    saved_bytes = 0
    lengths: tuple[int, ...] = ()
    for microbatch in range(min(_MICROBATCHES, num_microbatches)):
        outputs, received = forward(stage, microbatch)
        saved = find([output.grad_fn for output in outputs], received, device)
        claimed = claims.claim([item.storage for item in saved], microbatch)
        own = [item for item in compress(saved, claimed) if item.alone]
        passed_on = {output.untyped_storage()._cdata for output in plain_tensors(outputs)}
        movable = [item for item in own if item.nbytes >= minimum_bytes and item.storage._cdata not in passed_on]
        saved_bytes, lengths = sum(item.nbytes for item in own), tuple(item.nbytes for item in movable)
        # What both saved is known only while both are there.
        alive.append((outputs, received))
        del saved, own, movable
    return StageSizes(index, saved_bytes, lengths)


def everywhere(local: Sequence[StageSizes]) -> dict[int, StageSizes]:
    """Return the largest sizes of each stage that any rank has measured. Collective over the world."""
    ascending = sorted(
        (sizes for of_rank in gathered(list(local)) for sizes in of_rank),
        key=lambda sizes: (sizes.saved_bytes, sizes.lengths),
    )
    return {sizes.stage: sizes for sizes in ascending}


@contextmanager
def _unseen(stages: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Restore the random numbers and buffers that forwards change."""
    buffers = [(buffer, buffer.detach().clone()) for stage in stages for buffer in stage.submod.buffers()]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for stage in stages:
            stage.clear_runtime_states()
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


# Bytes, GiB as text ("70", "70.5GiB", "70,70,75,79"), or one of these per rank.
Memory = int | str | Sequence[int | str]


def budget_bytes(memory: Memory, num_ranks: int) -> tuple[int, ...]:
    """Return the budget of every rank in bytes. Raises ValueError for anything else."""
    budgets: list[int] = []
    for budget in [memory] if isinstance(memory, (int, str)) else memory:
        budgets += read_gib(budget) if isinstance(budget, str) else [budget]
    if not budgets or min(budgets) < 1:
        raise ValueError(
            f"memory {memory!r} is not a number of bytes above 0: give bytes, or GiB as text such as '70GiB'"
        )
    return one_budget_a_rank(budgets, num_ranks)


@dataclass(frozen=True)
class RankBudgets:
    """A memory budget, and how to balance within it."""

    budget_bytes: tuple[int, ...]
    """Of every rank."""

    how: BalanceConfig
    """Who may host, and the pairs if they are given; without bounds."""

    @staticmethod
    def of(memory: Memory, plain: Schedule, how: BalanceConfig | None, differing: bool) -> RankBudgets:
        """Return the budget for these options. Raises ValueError for options that exclude it.

        `plain`: the schedule, not balanced.
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
        """Return the plan that evicts as little as possible. Raises ValueError if no plan keeps the budget.

        `sizes`: of all stages.
        """
        parts = tuple(sizes[stage].parts for stage in range(schedule.num_stages))
        padding = [0] * schedule.num_ranks
        devices = Devices(
            schedule, _memory(sizes), _besides(padding), self.budget_bytes, hosts=self.how.hosts, parts=parts
        )
        while True:
            try:
                fit = within(replace(devices, besides=_besides(padding)), self.how.partners)
            except OverBudget as error:
                raise ValueError(
                    f"memory: {error}. Micro-batches and host buffers are counted. Save less (recomputation, smaller "
                    'micro-batches), or allow more hosts: BalanceConfig(hosts="pool"), BalanceConfig(hosts="host")'
                ) from None
            needed = [
                max(before, _padding(fit.schedule, fit.memory, sizes, rank)) for rank, before in enumerate(padding)
            ]
            if needed == padding:
                return fit
            padding = needed


def _memory(sizes: Mapping[int, StageSizes]) -> SizesOfStages:
    stages = [sizes[stage] for stage in range(len(sizes))]
    return memory_of([stage.saved_bytes for stage in stages], [stage.moved_bytes for stage in stages])


def _besides(working_bytes: Sequence[int]) -> DeviceBesides:
    none = (0,) * len(working_bytes)
    return DeviceBesides(none, tuple(working_bytes), none, Fraction(0))


def need_bytes(schedule: Schedule, sizes: Mapping[int, StageSizes]) -> tuple[int, ...]:
    """Return the most bytes of micro-batches and host buffers on each rank if all that can leave does."""
    memory = _memory(sizes)
    return tuple(
        sum(allocated_bytes(schedule, rank, memory)) + _padding(schedule, memory, sizes, rank)
        for rank in range(schedule.num_ranks)
    )


def _padding(schedule: Schedule, memory: SizesOfStages, sizes: Mapping[int, StageSizes], rank: int) -> int:
    """Return the bytes by which alignment makes a rank's host buffers larger than what they hold."""
    hosted = host_buffers(schedule, rank)
    lengths = {stage: of_stage.lengths_of(memory.size(stage, 0).moved_bytes) for stage, of_stage in sizes.items()}
    layout = BufferLayout.of(stages_in_buffers(hosted), lengths)
    return max(0, layout.nbytes - buffer_bytes(hosted, memory))
