"""The memory that each stage allocates, without and with balancing, compared with its schedule's prediction.

Reports `max_memory_allocated` of each stage's program with the prediction, and whether the driver is asked for more
after the first iteration. The prediction has what exists before an iteration, what the schedule holds at each moment,
and the temporary memory of a forward or backward, measured once with a single micro-batch. An acceptor's host buffers
come from `cudaMalloc`, outside torch's allocator; they are read off the device's free memory and added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import live_bytes, memory_of, num_transfers
from bpipe.schedule.schedule import Schedule
from bpipe.transport.one_sided import OneSidedCopies
from tests.gpu.accelerators import Accelerator
from tests.gpu.common import FULL, MODERATE, SMALL, Result, lender_on, repeats, say, tidy
from tests.gpu.one_stage import GptStage, KeptLender, Shape, engine_of, lending, loop_of, to_host

# The size of the driver's blocks, and the largest step by which torch's allocator rounds up.
BLOCK_BYTES = 2 << 20
# Several allocations at one moment may be rounded up, and libraries keep a workspace of a few MiB.
TOLERANCE_BYTES = 8 << 20
# Counters that must not change once a program is in its steady phase.
STEADY = ("reserved_bytes.all.current", "segment.all.current", "segment.all.allocated", "num_alloc_retries", "num_ooms")


def allocated() -> int:
    return int(torch.accelerator.memory_allocated())


def most_allocated() -> int:
    return int(torch.accelerator.max_memory_allocated())


@dataclass(frozen=True)
class StageSizes:
    """Sizes for which every large tensor is a multiple of 2 MiB, so that rounding hides nothing."""

    shape: Shape
    stages: int
    microbatches: int
    iterations: int
    minimum_bytes: int
    tolerance_bytes: int = TOLERANCE_BYTES


SIZES = {
    FULL: StageSizes(Shape(layers=2, hidden=4096, heads=32, sequence=2048), 8, 16, 6, 1 << 16),
    MODERATE: StageSizes(Shape(layers=1, hidden=2048, heads=16, sequence=1024), 8, 16, 3, 1 << 16),
    SMALL: StageSizes(Shape(layers=1, hidden=128, heads=2, sequence=128), 4, 4, 3, 1 << 10, 0),
}


@dataclass(frozen=True)
class Parts:
    """Bytes of one micro-batch: what its forward leaves, and the temporary memory of its forward and its backward."""

    saved: int
    forward_extra: int
    backward_extra: int


@dataclass
class Watch:
    """An engine without transfers that reads torch's allocator around a single micro-batch."""

    base: int = 0
    seen: dict[Kind, tuple[int, int, int]] = field(default_factory=dict)
    _start: int = 0

    def begin(self) -> None:
        self.base = allocated()

    def before(self, op: Action) -> None:
        self._start = allocated()
        torch.accelerator.reset_peak_memory_stats()

    def after(self, op: Action, outputs: Sequence[Any] = (), inputs: Sequence[Any] = ()) -> None:
        self.seen[op.kind] = self._start, most_allocated(), allocated()

    def sent(self, op: Action) -> None:
        """Do nothing."""

    def communicated(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def parts(self) -> Parts:
        _, forward_peak, held_bytes = self.seen[Kind.FORWARD]
        start, backward_peak, _ = self.seen[Kind.BACKWARD]
        return Parts(held_bytes - self.base, forward_peak - held_bytes, backward_peak - start)


def measure_parts(stage: GptStage) -> Parts:
    """Measure the parts with a single micro-batch."""
    watch = Watch()
    loop_of(build(ScheduleConfig("1f1b", 1, 1)), 0, stage, stage.received).run(watch)
    return watch.parts()


def predicted_bytes(plan: Schedule, rank: int, parts: Parts, moved: int) -> int:
    """Return the most bytes that this rank's own micro-batches take at any moment."""
    # Hosted micro-batches are in host buffers, which are always allocated.
    own = [moved if stage == rank else 0 for stage in range(plan.num_stages)]
    extra = {Kind.FORWARD: parts.forward_extra, Kind.BACKWARD: parts.backward_extra}
    curve = live_bytes(plan, rank, memory_of((parts.saved,) * plan.num_stages, own))
    return max(
        nbytes + (extra[slot.compute.kind] if slot.compute else 0)
        for nbytes, slot in zip(curve, plan.ranks[rank], strict=True)
    )


@dataclass(frozen=True)
class Peak:
    """Bytes of one stage's program, beyond what exists before an iteration; `steady`: counters that must not change."""

    measured: int
    predicted: int
    moved: int
    lent: int
    taken: int
    steady: list[Mapping[str, int]]


def peak_of(
    device: torch.device, plan: Schedule, rank: int, stage: GptStage, parts: Parts, moved: int, sizes: StageSizes
) -> Peak:
    """Run a stage for some iterations; return the peak of the last. `moved` sizes an acceptor's host buffers."""
    tidy(device)
    transfers = num_transfers(plan, rank)
    # The driver's own allocations of the first call should not count as ours.
    lender_on(device).make(BLOCK_BYTES)[1].close()
    lender = KeptLender(device)
    transport: OneSidedCopies | None = None
    if transfers.evictions:
        transport = to_host(device)
    elif transfers.hosts:
        assert plan.partners is not None
        transport = lending(lender, device, plan.partners[rank], [moved])
    engine = engine_of(plan, rank, device, transport, sizes.minimum_bytes)
    loop = loop_of(plan, rank, stage, stage.received)
    steady: list[Mapping[str, int]] = []
    measured = 0
    for _ in range(sizes.iterations):
        measured = _iteration_peak(loop, engine)
        stats = torch.accelerator.memory_stats(device)
        steady.append({name: stats[name] for name in STEADY})
    own_moved = engine.moved_bytes.get(rank, 0)
    lent = engine.host_bytes
    engine.release()
    return Peak(measured, predicted_bytes(plan, rank, parts, own_moved), own_moved, lent, lender.taken_bytes, steady)


def _iteration_peak(loop: Executor, engine: Engine) -> int:
    base = allocated()
    torch.accelerator.reset_peak_memory_stats()
    loop.run(engine)
    return most_allocated() - base


def run(on: Accelerator, sizes: StageSizes, until: float) -> Result:
    device = on.device
    result = Result(ok=True)
    stage = GptStage(sizes.shape, device)
    # The first micro-batches allocate gradients, handles and workspaces.
    for _ in range(2):
        stage.alone()
    tidy(device)
    parts = measure_parts(stage)
    result.facts = {"parts": vars(parts), "stages": []}
    extra = f"a forward takes {_mib(parts.forward_extra)} more while it runs, a backward {_mib(parts.backward_extra)}"
    say(f"one micro-batch leaves {_mib(parts.saved)}; {extra}")
    plans = {
        balance: build(ScheduleConfig("1f1b", sizes.stages, sizes.microbatches, balance=named_balance(balance)))
        for balance in ("none", "bpipe")
    }
    moved = reached = 0
    for rank in repeats(sizes.stages, until):
        plain, balanced = (peak_of(device, plan, rank, stage, parts, moved, sizes) for plan in plans.values())
        moved = moved or balanced.moved
        for name, peak in (("without", plain), ("with", balanced)):
            off = peak.measured - peak.predicted
            lent = f" + {_mib(peak.lent)} of host buffers (free memory fell by {_mib(peak.taken)})" if peak.lent else ""
            text = (
                f"{_mib(peak.measured)}, predicted {_mib(peak.predicted)}, off by {off} B{lent}; "
                f"{_steady_text(peak.steady)}"
            )
            result.check(f"stage {rank} {name} balancing", right(peak, sizes.tolerance_bytes), text)
            result.facts["stages"].append({"stage": rank, "balancing": name, **vars(peak)})
        reached = rank + 1
    if reached < sizes.stages:
        result.row("not reached in time", f"stages {reached} to {sizes.stages - 1}")
    return result


def right(peak: Peak, tolerance: int) -> bool:
    """Whether a stage allocated what was predicted, no more for host buffers than their length, and nothing later."""
    return (
        abs(peak.measured - peak.predicted) <= tolerance
        and 0 <= peak.taken - peak.lent <= max(tolerance, BLOCK_BYTES)
        and _flat(peak.steady)
    )


def _flat(steady: Sequence[Mapping[str, int]]) -> bool:
    return all(later == steady[1] for later in steady[1:])


def _steady_text(steady: Sequence[Mapping[str, int]]) -> str:
    if _flat(steady):
        return f"flat from iteration 2 on, reserved {_mib(steady[-1]['reserved_bytes.all.current'])}"
    changed = {
        name: [stats[name] for stats in steady] for name in STEADY if len({stats[name] for stats in steady[1:]}) > 1
    }
    return f"NOT flat: {changed}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"
