"""Train within a memory budget under `BalancedSchedule`, compared with torch's own class for the same stages.

As in `tests.gloo.pipelined`; the results also have the budget, the plan's bytes and the measured bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules

from bpipe.balance.config import BalanceConfig
from bpipe.runtime.meter import Meter
from bpipe.schedule.memory import num_transfers
from bpipe.torch import BalancedSchedule
from bpipe.torch.trace import predict_peaks, trace_stages
from tests.gloo.pipelined import MICROBATCHES, OPTIONS, PLACES, TRANSFERS
from tests.gloo.pipelined_stages import (
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Part,
    loss_of,
    same,
    stages_of,
    steps_of,
)

# These versions' handshakes run a forward on uninitialized memory, and do not restore the statistics that it changes.
LEAVES_STATISTICS = torch.__version__.startswith(("2.12.", "2.13."))


class Noisy(nn.Module):
    """A block with dropout and running statistics, neither of which a trial forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(nn.functional.gelu(normed))


def sharded(module: nn.Module) -> nn.Module:
    # A mesh of one process, which gathers and frees the same as a larger one.
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pipeline", "data"))
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data"])
    fully_shard(module, mesh=mesh["data"])
    return module


@dataclass(frozen=True)
class Budgeted:
    """A case with a budget for all ranks: `least` is its position between the smallest and the largest own need."""

    places: str = "chain"
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[[int, int], nn.Module] = Part
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    least: float = 0.7


CASES = {
    "1f1b": Budgeted(),
    "1f1b over peer, verified": Budgeted(
        options={"transfers": replace(TRANSFERS, transport="peer", verify=float("inf"))}
    ),
    "1f1b, parts of a micro-batch": Budgeted(make=lambda stage, p: Part(stage, p, layers=3), least=0.85),
    "1f1b, enough for all": Budgeted(least=1.0),
    "interleaved": Budgeted("loop"),
    "interleaved, own memory": Budgeted("loop", {"balance": BalanceConfig(hosts="host")}, least=0.0),
    "random numbers and buffers": Budgeted(make=lambda stage, p: Part(stage, p, Noisy, 2)),
    "FSDP2": Budgeted(make=lambda stage, p: Part(stage, p, layers=2), wrap=sharded),
}
REFERENCE = {"chain": schedules.Schedule1F1B, "loop": schedules.ScheduleInterleaved1F1B}
NAMES = {"chain": "1f1b", "loop": "interleaved-1f1b"}


def of_case(case: Budgeted, rank: int, world: int) -> dict[str, Any]:
    indices, num_stages = PLACES[case.places](rank, world)

    def stages() -> Any:
        return stages_of(indices, num_stages, case.make, case.wrap)

    def balanced(of: Any, meter: Meter, **options: Any) -> BalancedSchedule:
        options = {**OPTIONS, "schedule": NAMES[case.places], "meter": meter, **options}
        return BalancedSchedule(of, MICROBATCHES, loss_of, **options)

    theirs = stages()
    reference = REFERENCE[case.places](theirs if len(theirs) > 1 else theirs[0], MICROBATCHES, loss_of)
    torch.manual_seed(rank)
    expected = steps_of(reference, theirs, MICROBATCHES, 3)

    alone, meter = stages(), Meter()
    steps_of(balanced(alone, meter, balance=None), alone, MICROBATCHES)
    peaks: list[Any] = [None] * world
    dist.all_gather_object(peaks, meter.peak_bytes)
    budget = int(min(peaks) + case.least * (max(peaks) - min(peaks)))

    ours, meter = stages(), Meter()
    schedule = balanced(ours, meter, memory=budget, **case.options)
    torch.manual_seed(rank)
    bits = steps_of(schedule, ours, MICROBATCHES, 3)
    assert schedule.plan is not None

    def traceable() -> tuple[Any, ...]:
        tokens, target = (torch.randint(0, VOCABULARY, (ROWS, LENGTH)) for _ in range(2))
        return [case.make(index, num_stages) for index in range(num_stages)], (tokens,), loss_of, target

    traced = trace_stages(traceable, minimum_bytes=TRANSFERS.minimum_bytes)
    arguments: Any = (traced, world, MICROBATCHES, NAMES[case.places])
    balance = case.options.get("balance", BalanceConfig())
    result = {
        "traced alone": predict_peaks(*arguments, balance=None).need_bytes[rank],
        "traced": predict_peaks(*arguments, memory=budget, balance=balance).need_bytes[rank],
        "same": same(expected, bits),
        "buffers": [
            torch.equal(buffer, traced_buffer)
            for first, second in zip(theirs, ours, strict=True)
            for buffer, traced_buffer in zip(first.submod.buffers(), second.submod.buffers(), strict=True)
            if not (LEAVES_STATISTICS and buffer.is_floating_point())
        ],
        "budget": budget,
        "alone": peaks[rank],
        "predicted": schedule.plan.need_bytes[rank],
        "measured": meter.peak_bytes,
        "evictions": num_transfers(schedule.schedule, rank).evictions,
        "moved": sum(schedule.engine.moved_bytes.values()),
        "parts": sorted(schedule.plan.how.parts),
    }
    schedule.engine.release()
    return result


def too_small(rank: int, world: int) -> dict[str, Any]:
    """Return the error for a budget that no plan keeps."""
    indices, num_stages = PLACES["chain"](rank, world)
    stages = stages_of(indices, num_stages)
    options: dict[str, Any] = {**OPTIONS, "memory": 20_000}
    schedule = BalancedSchedule(stages, MICROBATCHES, loss_of, **options)
    try:
        steps_of(schedule, stages, MICROBATCHES)
    except ValueError as error:
        return {"said": str(error)}
    return {"said": ""}


def runs(folder: Path) -> dict[str, Any]:
    cases = {name: lambda rank, world, case=case: of_case(case, rank, world) for name, case in CASES.items()}
    return {**cases, "too small": too_small}
