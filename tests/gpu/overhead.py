"""The cost of balancing one stage: its computation with and without its program's transfers, in turn.

Reports ratios with their spread, a row for each exposed wait, and the link's speed in the same run. Copy engines
transfer to pinned host memory, which really overlaps on one GPU. Stage 0 of the pipeline runs alone and computes
without a pause, so there is no bubble for a transfer to hide in and no neighbour to wait for; whole pipelines are
faster or slower for other reasons.

On a late device, the durations of operations are given, so it tells exactly which waits are exposed, and none may be if
its transfer could hide. A GPU measures them.

The bytes that a micro-batch moves depend on how many layers recompute and so keep only their input: once as many as a
transfer can hide behind a forward at the measured bandwidth, and once all.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bpipe.record.format import Row
from bpipe.runtime.engine import Engine
from bpipe.runtime.executor import Executor
from bpipe.runtime.recorder import Recorder
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.memory import num_transfers
from bpipe.simulate.cost import required_bytes_per_s
from bpipe.transport.streams import Clock
from tests.gpu.accelerators import LATE, Accelerator, join, on_stream
from tests.gpu.common import (
    FULL,
    MODERATE,
    SMALL,
    Result,
    Spread,
    moved_bytes,
    pinned_region,
    random_bytes,
    ratios,
    repeats,
    seconds,
    tidy,
)
from tests.gpu.one_stage import GptStage, Shape, balanced, engine_of, loop_of, to_host

# Share of the measured bandwidth that a transfer may need if it should hide.
COMFORTABLE = 0.8


@dataclass(frozen=True)
class Sizes:
    shape: Shape
    stages: int
    microbatches: int
    repeats: int
    minimum_bytes: int
    probe_bytes: int


# Numbers of micro-batches with which each load of the cool-down can run during a backward. With others, such as 16,
# there is no memory before the previous backward has ended: only a bubble, or more evictions, would hide the load.
SIZES = {
    FULL: Sizes(Shape(layers=4, hidden=8192, heads=64, sequence=2048), 8, 32, 7, 1 << 16, 1 << 30),
    MODERATE: Sizes(Shape(layers=2, hidden=2048, heads=16, sequence=1024), 8, 14, 3, 1 << 16, 64 << 20),
    SMALL: Sizes(Shape(layers=2, hidden=32, heads=2, sequence=16), 8, 14, 2, 1, 1 << 20),
}


@dataclass(frozen=True)
class Need:
    """A micro-batch's moved bytes, the median seconds of a forward, and the bandwidth that hides the transfer."""

    moved: int
    forward_s: float

    @property
    def bytes_per_s(self) -> float:
        return required_bytes_per_s(self.moved, self.forward_s)


def need(device: torch.device, stage: GptStage, minimum_bytes: int) -> Need:
    stage.alone()
    received = stage.received(0)
    end = stage(received)
    moved = moved_bytes(device, end, received, minimum_bytes)
    del received, end
    forwards = [seconds(device, lambda: stage(stage.received(0))) for _ in range(5)]
    return Need(moved, Spread.of(forwards).median)


def link_rate(device: torch.device, nbytes: int, until: float) -> float:
    """Return the bytes per second between the device and pinned host memory, in the slower direction."""
    source, region, stream = random_bytes(nbytes, device), pinned_region(nbytes, device), torch.Stream(device)

    def copy(direction: Callable[[list[tuple[int, torch.Tensor]]], None]) -> None:
        # Use a side stream, as a transfer does: CUDA's default stream takes no batches.
        with on_stream(stream):
            direction([(0, source)])
        join(stream)

    slowest = []
    for direction in (region.write, region.read):
        seconds(device, lambda direction=direction: copy(direction))  # type: ignore[misc]
        taken = [seconds(device, lambda direction=direction: copy(direction)) for _ in repeats(5, until)]  # type: ignore[misc]
        slowest.append(Spread.of(taken).median)
    region.close()
    return nbytes / max(slowest)


def run(on: Accelerator, sizes: Sizes, until: float) -> Result:
    begin = time.monotonic()
    device, result = on.device, Result()
    link = link_rate(device, sizes.probe_bytes, until)
    tidy(device)
    result.row("link to pinned host memory, slower direction", f"GB/s {link / 1e9:.4g}")
    shape = sizes.shape
    result.row(
        "stage",
        f"{shape.num_parameters / 1e9:.3g} billion parameters, {shape} of p={sizes.stages}, m={sizes.microbatches}",
    )
    whole, inputs = (
        need(device, GptStage(replace(shape, recomputed=count), device), sizes.minimum_bytes)
        for count in (0, shape.layers)
    )
    tidy(device)
    layer = (whole.moved - inputs.moved) / shape.layers
    room = COMFORTABLE * link * whole.forward_s
    num_kept = max(0, min(shape.layers, int((room - inputs.moved) / layer))) if layer > 0 else 0
    result.facts = {"link_bytes_per_s": link, "needs": {"all": vars(whole), "inputs": vars(inputs)}, "cases": []}
    cases = [shape.layers - num_kept] if num_kept == shape.layers else [shape.layers - num_kept, 0]
    for number, recomputed in enumerate(cases):
        part = begin + (until - begin) * (number + 1) / len(cases)
        result.facts["cases"].append(_case(on, replace(shape, recomputed=recomputed), sizes, link, part, result))
    return result


def _case(on: Accelerator, shape: Shape, sizes: Sizes, link: float, until: float, result: Result) -> dict[str, Any]:
    """Measure one amount to move: without transfers, with them, and with synchronous ones, in turn."""
    device = on.device
    tidy(device)
    stage = GptStage(shape, device)
    needs = need(device, stage, sizes.minimum_bytes)
    plan = balanced(sizes.stages, sizes.microbatches)
    loop = loop_of(plan, 0, stage, stage.received)
    asynchronous, synchronous = (
        engine_of(plan, 0, device, to_host(device), sizes.minimum_bytes, synchronous=synchronous)
        for synchronous in (False, True)
    )
    engines = {"without": None, "with": asynchronous, "synchronous": synchronous}
    works: dict[str, Callable[[], None]] = {
        name: lambda engine=engine: loop.run(engine)  # type: ignore[misc]
        for name, engine in engines.items()
    }
    for work in works.values():
        seconds(device, work)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in repeats(sizes.repeats, until, least=2):
        for name, work in works.items():
            taken[name].append(seconds(device, work))
    waits, elapsed_s = _exposed(device, loop, asynchronous)
    asynchronous.release()
    synchronous.release()
    fits = needs.bytes_per_s <= link
    title = (
        f"{shape.layers - shape.recomputed} of {shape.layers} layers kept whole, {'could' if fits else 'cannot'} hide"
    )
    transfers = num_transfers(plan, 0)
    result.row(
        title,
        f"{needs.moved / 2**20:.4g} MiB per transfer, forward {needs.forward_s * 1e3:.4g} ms: needs "
        f"{needs.bytes_per_s / 1e9:.4g} GB/s of {link / 1e9:.4g}; {transfers.evictions} evictions and "
        f"{transfers.loads} loads per iteration, {num_host_buffers(plan, plan.partners[0] if plan.partners else 0)} "
        "host buffers",
    )
    spreads = {name: ratios(taken[name], taken["without"]) for name in ("with", "synchronous")}
    result.row(f"{title}: iteration without", f"s {Spread.of(taken['without']).text()}")
    result.row(f"{title}: with / without", spreads["with"].text(digits=5))
    result.row(f"{title}: synchronous / without", spreads["synchronous"].text(digits=5))
    exposed_s = sum(wait.wait_s for wait in waits)
    for wait in waits:
        text = f"{wait.wait_s * 1e3:.4g} ms, {wait.start_s * 1e3:.4g} to {wait.end_s * 1e3:.4g} ms"
        result.row(f"{title}: {wait.action} is waited for", text)
    exposed = f"{exposed_s * 1e3:.4g} ms of {elapsed_s * 1e3:.4g} ms in {len(waits)} waits"
    if on.name == LATE and fits:
        result.check(f"{title}: exposed waits of one iteration", not waits, exposed)
    else:
        result.row(f"{title}: exposed waits of one iteration", exposed)
    return {
        "recomputed_layers": shape.recomputed,
        "moved_bytes": needs.moved,
        "forward_s": needs.forward_s,
        "needed_bytes_per_s": needs.bytes_per_s,
        "iteration_s": taken,
        "ratios": {name: spread.facts() for name, spread in spreads.items()},
        "exposed_s": exposed_s,
        "waits": [{"action": str(wait.action), "start_s": wait.start_s, "wait_s": wait.wait_s} for wait in waits],
        "recorded_iteration_s": elapsed_s,
    }


def _exposed(device: torch.device, loop: Executor, engine: Engine) -> tuple[list[Row], float]:
    """Record one more iteration; return the transfers that compute waited for, and its seconds."""
    engine.recorder = Recorder(Clock(device))
    loop.run(engine)
    rows, elapsed_s = engine.recorder.rows({}, engine.moved_bytes)
    engine.recorder = None
    return [row for row in rows if row.wait_s > 0], elapsed_s
