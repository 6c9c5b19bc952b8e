"""Measure in the first iteration what devices hold, and plan again what leaves them.

After the first training step there is one collective over the world; from the second step on every rank has the same
plan. A plan without a gain is not taken. No plan changes what is computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from megatron.core.utils import get_model_config

from bpipe.build import build
from bpipe.config.features.table import Settings
from bpipe.plan.budget import Devices, better_plan, one_budget_a_rank
from bpipe.predict.memory import COMMUNICATOR_OF_TWO_BYTES, DeviceBesides
from bpipe.runtime.meter import largest_by
from bpipe.schedule.host_buffers import links_of
from bpipe.schedule.memory import KeptMemory, Memory, memory_of
from bpipe.schedule.schedule import Schedule
from bpipe.transport.distributed import gathered
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.log import say
from megatron.scheduling.loop.measurements import Besides, FirstMeasured, held
from megatron.scheduling.loop.megatron_loops import as_list
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.options.schedule_choice import budget_of


@dataclass(frozen=True)
class ProcessMemory:
    """Measured memory of one process. On a CPU temporary memory is unknown.

    Attributes:
        place: The process's rank in the schedule.
        measured: Its measurements of micro-batches.
        fixed_bytes: Memory that stays.
        working_bytes: Temporary memory other than micro-batches.
        update_bytes: Temporary memory of the update of weights.
        fragmentation: Share of the allocator's memory that it reserved and did not give out.
    """

    place: int
    measured: FirstMeasured
    fixed_bytes: int
    working_bytes: int
    update_bytes: int
    fragmentation: Fraction


class Learner:
    """Plans again once, after the first training step."""

    def __init__(self, config: SchedulingConfig, driver: Driver) -> None:
        self._config = config
        self._driver = driver
        self._learned = False

    def step(self, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run Megatron's training step and, after the first one, replan with the memory that it took."""
        if self._learned:
            return run()
        before = held(arguments["model"], arguments["optimizer"])
        result = run()
        self._learned = True
        process = measure_process(
            self._driver.rank,
            self._driver.measured(),
            before,
            held(arguments["model"], arguments["optimizer"]),
            self._driver.device,
        )
        if Settings(get_model_config(as_list(arguments["model"])[0])).cuda_graph_impl == "full_iteration":
            # The memory of the graph is its own: the update does not use it.
            process = replace(process, fixed_bytes=process.fixed_bytes + process.update_bytes, update_bytes=0)
        self._learn(process)
        return result

    def _learn(self, process: ProcessMemory) -> None:
        """Plan again. Collective over the world."""
        driver = self._driver
        assert self._config.memory is not None
        own = (
            process,
            budget_of(self._config.memory),
            self._config.costs,
        )
        everyone = gathered(own)
        schedule, plain = driver.schedule, build(replace(driver.program_now, balance=None))
        # If devices differ, all ranks plan with the smallest budget of each rank of the schedule.
        by_process = (one_budget_a_rank(budget, plain.num_ranks) for _, budget, _ in everyone)
        budgets = tuple(map(min, zip(*by_process, strict=True)))
        devices = devices_of([process for process, *_ in everyone], plain, budgets)
        devices = replace(devices, memory=replace(devices.memory, reserved=driver.differing))
        balance = driver.balance
        if balance is not None:
            devices = replace(
                devices,
                hosts=balance.hosts,
                nodes=balance.nodes or (),
                linked=frozenset(links_of(schedule)),
                # Existing communicators were measured; this is for one more rank on another node.
                link_bytes=2 * COMMUNICATOR_OF_TWO_BYTES if driver.device.type != "cpu" else 0,
            )
        # A cluster's file may be another one elsewhere: all plan by the first one's.
        plan, lines = better_plan(devices, schedule, everyone[0][2])
        for line in lines:
            say(line)
        driver.learned(None if plan is None else plan.how)


def measure_process(
    place: int, measured: FirstMeasured, before: Besides, after: Besides, device: torch.device
) -> ProcessMemory:
    """Return what this process holds, `before` and `after` its first step.

    The optimizer's state counts even if the first step was skipped. Host buffers that were lent are outside of the
    allocator, so they count here.
    """
    state = after.now_bytes + (after.optimizer_to_come_bytes or 0)
    if device.type == "cpu":
        return ProcessMemory(place, measured, state, measured.received_bytes, 0, Fraction(0))
    free, total = torch.cuda.mem_get_info(device)
    # Contexts, communicators, and other processes on this device.
    outside = max(0, total - free - torch.cuda.memory_reserved(device) - measured.lent_bytes)
    going = max(1, measured.allocated_bytes - before.now_bytes)
    working = max(0, going + measured.lent_bytes - measured.peak_bytes)
    peak = torch.cuda.max_memory_allocated(device)
    updating = max(0, peak + measured.lent_bytes - state) if peak > measured.allocated_bytes else 0
    lost = Fraction(max(0, measured.reserved_bytes - measured.allocated_bytes), going)
    return ProcessMemory(place, measured, state + outside, working, updating, lost)


def devices_of(processes: Sequence[ProcessMemory], plain: Schedule, budgets: tuple[int, ...]) -> Devices:
    """Combine the measurements of all processes by maxima, so that every rank makes the same plan."""
    slices, measured = plain.layout.slices, [process.measured for process in processes]
    places = range(plain.num_stages * slices)
    saved = largest_by(item for first in measured for item in first.saved_bytes.items())
    moved = largest_by(item for first in measured for item in first.moved_bytes.items())
    after = largest_by(item for first in measured for item in first.after_input_bytes.items())
    # A stage that was never evicted has no measured part that moves: a plan that evicts it is not taken.
    memory = memory_of(
        [saved[place] for place in places],
        [min(saved[place], moved.get(place, saved[place])) for place in places],
        [after.get(place // slices, saved[place]) for place in places],
        max(first.shard_bytes for first in measured),
    )
    kept = {stage: keys for first in measured for stage, keys in first.kept.items()}
    of_stages = tuple(kept.get(stage, KeptMemory(0, 0)) for stage in range(plain.num_stages))
    memory = replace(memory, slices=slices, kept=of_stages if slices > 1 else ())
    by_rank = [[process for process in processes if process.place == rank] for rank in range(plain.num_ranks)]
    besides = DeviceBesides(
        tuple(max(process.fixed_bytes for process in group) for group in by_rank),
        tuple(max(process.working_bytes for process in group) for group in by_rank),
        tuple(max(process.update_bytes for process in group) for group in by_rank),
        max(process.fragmentation for process in processes),
    )
    return Devices(plain, memory, besides, budgets, parts=_parts(measured, memory))


def _parts(measured: Sequence[FirstMeasured], memory: Memory) -> tuple[tuple[int, ...], ...]:
    """Return the parts of each stage that may leave; the storages of a stage that never sent are unknown."""
    parts = {stage: sizes for first in measured for stage, sizes in first.parts.items()}
    whole = [(size.moved_bytes,) for size in memory.stages[:: memory.slices]]
    return tuple(
        parts[stage] if parts.get(stage, ())[-1:] == all_of_it else all_of_it for stage, all_of_it in enumerate(whole)
    )
