"""Learn from the first iteration what devices really hold, and plan anew what leaves them.

In: Megatron's training step, and what the driver measured. Out: after the first step one collective over the world, the
same plan on every rank, from the second step on, and lines in the log. A plan that does not help is not taken. Bytes
move differently then, and nothing is computed differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from bpipe.build import build
from bpipe.plan.budget import Devices, better_plan, one_budget_a_rank
from bpipe.predict.memory import COMMUNICATOR_OF_TWO_BYTES, DeviceBesides
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import KeptMemory, Memory, memory_of
from bpipe.schedule.schedule import Schedule
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.measurements import FirstMeasured
from megatron.scheduling.memory.watermark import Besides, held
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.options.budgets import budget_of
from megatron.scheduling.record.log import say


@dataclass(frozen=True)
class ProcessMemory:
    """Measured memory of one process.

    `fixed_bytes` stays; `working_bytes` came and went besides micro-batches, `update_bytes` while weights were updated.
    The allocator had the share `fragmentation` more than it gave out. A CPU does not count what comes and goes.
    """

    place: int
    measured: FirstMeasured
    fixed_bytes: int
    working_bytes: int
    update_bytes: int
    fragmentation: Fraction


class Learner:
    """Plans anew once, after the first training step."""

    def __init__(self, config: SchedulingConfig, driver: Driver) -> None:
        self._config = config
        self._driver = driver
        self._learned = False

    def wraps(self, others: Mapping[patches.Patch, patches.Wrap]) -> dict[patches.Patch, patches.Wrap]:
        """Return Megatron's training step, observed, around whoever else observes it."""
        return patches.around(others, patches.TRAIN_STEP, patches.by_name(self._step))

    def _step(self, given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        if self._learned:
            return run()
        before = held(given["model"], given["optimizer"])
        result = run()
        self._learned = True
        self._learn(before, held(given["model"], given["optimizer"]))
        return result

    def _learn(self, before: Besides, after: Besides) -> None:
        """Collective over the world."""
        measured = self._driver.measured()
        found: list[Any] = [None] * dist.get_world_size()
        assert self._config.memory is not None
        here = (
            measure_process(self._driver.rank, measured, before, after, self._driver.device),
            budget_of(self._config.memory),
            self._config.costs,
        )
        dist.all_gather_object(found, here)
        schedule, plain = self._driver.schedule, build(replace(self._driver.program_now, balance=None))
        # Where devices differ, each rank's is the least that one of its has: all plan with the same.
        budgets = tuple(
            map(min, zip(*(one_budget_a_rank(budget, plain.num_ranks) for _, budget, _ in found), strict=True))
        )
        devices = devices_of([one for one, *_ in found], plain, budgets)
        devices = replace(devices, memory=replace(devices.memory, reserved=self._driver.differing))
        how = self._driver.balance
        if how is not None:
            devices = replace(devices, hosts=how.hosts, nodes=how.nodes or (), linked=frozenset(links_of(schedule)))
            devices = replace(devices, link_bytes=self._link_bytes())
        # A cluster's file may be another one elsewhere: all plan by the first one's.
        plan, told = better_plan(devices, schedule, found[0][2])
        for line in told:
            say(line)
        self._driver.learned(None if plan is None else plan.how)

    def _link_bytes(self) -> int:
        """What communicators with one more rank of another node take, predicted: those that there are were measured."""
        return 2 * COMMUNICATOR_OF_TWO_BYTES if self._driver.device.type != "cpu" else 0


def measure_process(
    place: int, measured: FirstMeasured, before: Besides, after: Besides, device: torch.device
) -> ProcessMemory:
    """Return what this process holds besides micro-batches: `before` its first step, when the loop ran, and `after` it.

    The optimizer's state counts even where the first step was skipped. Host buffers that were lent lie outside of the
    allocator: they are neither somebody else's, nor missing in what came and went.
    """
    state = after.now_bytes + (after.optimizer_to_come_bytes or 0)
    if device.type == "cpu":
        return ProcessMemory(place, measured, state, measured.received_bytes, 0, Fraction(0))
    free, total = torch.cuda.mem_get_info(device)
    # Contexts and communicators, and whoever else is on this device.
    outside = max(0, total - free - torch.cuda.memory_reserved(device) - measured.lent_bytes)
    going = max(1, measured.allocated_bytes - before.now_bytes)
    working = max(0, going + measured.lent_bytes - measured.peak_bytes)
    most = torch.cuda.max_memory_allocated(device)
    updating = max(0, most + measured.lent_bytes - state) if most > measured.allocated_bytes else 0
    lost = Fraction(max(0, measured.reserved_bytes - measured.allocated_bytes), going)
    return ProcessMemory(place, measured, state + outside, working, updating, lost)


def devices_of(found: Sequence[ProcessMemory], plain: Schedule, budgets: tuple[int, ...]) -> Devices:
    """Combine what all have measured: the most of every place and stage, so that the same plan follows on every
    rank."""
    slices = plain.layout.slices
    places = range(plain.num_stages * slices)
    saved = _most(one.measured.saved_bytes for one in found)
    moved = _most(one.measured.moved_bytes for one in found)
    after = _most(one.measured.after_input_bytes for one in found)
    # What was never sent has no measured part that moves: a plan that sends it is not taken.
    memory = memory_of(
        [saved[place] for place in places],
        [min(saved[place], moved.get(place, saved[place])) for place in places],
        [after.get(place // slices, saved[place]) for place in places],
        max(one.measured.shard_bytes for one in found),
    )
    memory = replace(memory, slices=slices, kept=_kept(found, plain.num_stages) if slices > 1 else ())
    return Devices(plain, memory, _besides(found, plain.num_ranks), budgets, parts=_parts(found, memory))


def _kept(found: Sequence[ProcessMemory], num_stages: int) -> tuple[KeptMemory, ...]:
    """What every stage keeps of a micro-batch in slices."""
    measured = {stage: kept for one in found for stage, kept in one.measured.kept.items()}
    return tuple(measured.get(stage, KeptMemory(0, 0)) for stage in range(num_stages))


def _parts(found: Sequence[ProcessMemory], memory: Memory) -> tuple[tuple[int, ...], ...]:
    """What may leave of each stage. Of one of which nothing has left nobody knows how its storages lie."""
    measured = {stage: sizes for one in found for stage, sizes in one.measured.parts.items()}
    whole = [(size.moved_bytes,) for size in memory.stages[:: memory.slices]]
    return tuple(
        measured[stage] if measured.get(stage, ())[-1:] == all_of_it else all_of_it
        for stage, all_of_it in enumerate(whole)
    )


def _most(measured: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the most that any has measured of each stage."""
    most: dict[int, int] = {}
    for sizes in measured:
        most |= {stage: max(size, most.get(stage, 0)) for stage, size in sizes.items()}
    return most


def _besides(found: Sequence[ProcessMemory], num_places: int) -> DeviceBesides:
    there = [[one for one in found if one.place == place] for place in range(num_places)]
    return DeviceBesides(
        tuple(max(one.fixed_bytes for one in of_place) for of_place in there),
        tuple(max(one.working_bytes for one in of_place) for of_place in there),
        tuple(max(one.update_bytes for one in of_place) for of_place in there),
        max(one.fragmentation for one in found),
    )
