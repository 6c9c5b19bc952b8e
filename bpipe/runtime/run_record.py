"""One rank's part of a run's record: what it measured, as rows, and the files of `bpipe.record.format`."""

import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from bpipe.build import ScheduleConfig
from bpipe.predict.cluster import DEVICES
from bpipe.record.format import (
    FAILURE,
    RECORD,
    RUN,
    SUMMARY,
    Iteration,
    LinkSpeed,
    RankHeader,
    RankSummary,
    RunInfo,
    append,
    write_whole,
)
from bpipe.record.report.memory import own_peak, peak_of_rule
from bpipe.runtime.checksums import Certificate
from bpipe.runtime.engine import Engine
from bpipe.runtime.evictor import Unmoved
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.schedule.action import Kind
from bpipe.schedule.memory import Memory
from bpipe.transport.connect import Location, MeasuredLink
from bpipe.transport.distributed import gathered


def iteration_of(
    engine: Engine, meter: Meter, recorder: Recorder, program: ScheduleConfig, number: int, begin_s: float
) -> Iteration:
    """Return an iteration without `device_peak_bytes`. Waits for the device.

    `begin_s`: unix time on this rank's clock.
    """
    sizing = engine.sizing
    if sizing is not None and not sizing.differing:
        sizing = None
    # If sizes differ, the size of a host buffer is not that of what came into it.
    hosted = engine.hosted_bytes if sizing is None else {}
    exact = (None, None) if sizing is None else (meter.each_bytes, sizing.moved_each)
    rows, elapsed_s = recorder.rows(meter.saved_bytes, {**hosted, **engine.moved_bytes}, *exact)
    stayed, shares = Unmoved() if sizing is None else sizing.stayed, engine.shares
    return Iteration(
        iteration=number,
        program=program,
        begin_s=begin_s,
        elapsed_s=elapsed_s,
        saved_bytes=meter.saved_bytes,
        moved_bytes=engine.moved_bytes,
        after_input_bytes=meter.after_input_bytes,
        shard_bytes=meter.shard_bytes,
        kept_bytes={stage: share.kept_bytes for stage, share in shares.items()},
        kept_counted_by=next((share.counted_by for share in shares.values()), None),
        received_bytes=meter.received_bytes,
        host_bytes=engine.host_bytes,
        own_bytes=engine.own_memory[1],
        stayed_microbatches=stayed.microbatches,
        stayed_bytes=stayed.nbytes,
        passed_microbatches=stayed.passed_microbatches,
        passed_bytes=stayed.passed_bytes,
        rows=rows,
    )


@dataclass
class DifferingSums:
    """Sums over all iterations of one rank whose micro-batches differ in size."""

    stayed_microbatches: int = 0
    stayed_bytes: int = 0
    passed_microbatches: int = 0
    """The most by which the bound was exceeded at once."""

    passed_bytes: int = 0
    times_grown: int = 0
    """Iterations after which host buffers grew."""

    largest_bytes: Mapping[int, int] = field(default_factory=dict)
    """By stage, the largest micro-batch."""

    def add(self, engine: Engine) -> Unmoved:
        """Add an iteration, and return what stayed in it."""
        sizing = engine.sizing
        if sizing is None or not sizing.differing:
            return Unmoved()
        stayed = sizing.stayed
        self.stayed_microbatches += stayed.microbatches
        self.stayed_bytes += stayed.nbytes
        self.passed_microbatches = max(self.passed_microbatches, stayed.passed_microbatches)
        self.passed_bytes = max(self.passed_bytes, stayed.passed_bytes)
        self.times_grown = sizing.num_grown
        self.largest_bytes = dict(sizing.most_bytes)
        return stayed


def summary_of(
    engine: Engine,
    meter: Meter,
    place: int,
    *,
    rank: int,
    pipeline: int,
    balanced: bool,
    peaks: Sequence[tuple[int, int]],
    differing: DifferingSums,
    certificate: Certificate,
    slices: Memory | None = None,
    keys_bytes: int = 0,
    predicted_keys_bytes: int = 0,
) -> RankSummary:
    """Return what a rank measured and what its schedule predicts for micro-batches of this size.

    `place` is its position in the pipeline. `peaks` are micro-batches and bytes of each iteration; the first does not
    count if there are others, because what micro-batches share is known only after two of them. Host buffers are
    preallocated, so a rank holds all of them from the first HOST on: the prediction is the most that its own
    micro-batches occupy in any slot, and its buffers. If micro-batches are cut, `slices` is the rule of memory for slices
    that differ, and keys and values are kept besides, as measured and as predicted.
    """
    schedule, saved, moved = engine.schedule, meter.saved_bytes, engine.moved_bytes
    # As in the meter, a micro-batch of which less than half has left is still here.
    leaves = {
        stage: int(moved.get(stage, nbytes) > 0 and 2 * moved.get(stage, nbytes) >= nbytes)
        for stage, nbytes in saved.items()
    }
    # Evictions and loads of a stage of which nothing can move do not count.
    transfers = Counter(
        action.kind for slot in schedule.ranks[place] for action in slot.transfers if moved.get(action.stage)
    )
    counted = list(peaks[1:] or peaks)
    if slices is None:
        sizes = (meter.received_bytes, meter.after_input_bytes, meter.shard_bytes)
        predicted_bytes = own_peak(schedule, place, saved, moved, *sizes)
    else:
        predicted_bytes = peak_of_rule(schedule, place, slices, meter.received_bytes)
    own_buffers, own_bytes = engine.own_memory
    return RankSummary(
        rank=rank,
        stage=place,
        pipeline=pipeline,
        balanced=balanced,
        num_microbatches=schedule.num_whole_microbatches,
        peak_microbatches=max(peak[0] for peak in counted),
        peak_bytes=max(peak[1] for peak in counted),
        predicted_microbatches=own_peak(schedule, place, dict.fromkeys(saved, 1), leaves, 0, {})
        + engine.num_host_buffers,
        predicted_bytes=engine.host_bytes + predicted_bytes,
        evictions=transfers[Kind.EVICT],
        loads=transfers[Kind.LOAD],
        own_buffers=own_buffers,
        own_bytes=own_bytes,
        moved_fraction=min((share.fraction for share in engine.shares.values()), default=None),
        **asdict(differing),
        keys_bytes=keys_bytes,
        predicted_keys_bytes=predicted_keys_bytes,
        verified_iterations=certificate.iterations,
        verified_microbatches=certificate.microbatches,
        verified_storages=certificate.storages,
        verified_bytes=certificate.nbytes,
    )


def peak_of(device_name: str, given_tflops: float | None) -> tuple[float | None, str | None]:
    """Return the dense 16-bit FLOP/s of one device, for the MFU, and their source: the user, or the table of devices."""
    if given_tflops is not None:
        return given_tflops * 1e12, "--bpipe-peak-tflops"
    for device in DEVICES.values():
        if device.name.split("-")[0] in device_name.lower():
            return device.peak_flops_per_s, f"{device.source}, dense 16-bit"
    return None, None


class RunRecord:
    """This rank's record in a folder. Made before the first iteration, collectively over the world: clocks are compared.

    Args:
        folder: Where the record is written.
        info: What the run is, without what is known here.
        pipelines: Global ranks of every pipeline, equal on every rank.
        place: This rank's position in its pipeline.
        device: The name of its device.
        limit_bytes: Memory of its device.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        pipelines: Sequence[Sequence[int]],
        *,
        place: int,
        device: str,
        limit_bytes: int | None,
    ) -> None:
        self._folder, self._info, self._num_pipelines = folder, info, len(pipelines)
        self._place, self._device, self._limit_bytes = place, device, limit_bytes
        self.rank = dist.get_rank()
        self.path = RECORD.path(folder, self.rank)
        self._started = False
        self._clock_ahead_s = _clock_ahead_s()
        # A name for all files of this run, so that those of other runs differ.
        self.run = str(gathered(uuid.uuid4().hex[:12] if self.rank == 0 else None)[0])
        ordered = sorted(pipelines, key=min)
        self.pipeline = next(index for index, ranks in enumerate(ordered) if self.rank in ranks)

    def clear(self) -> None:
        """Remove another run's record, or this run's from before it was resumed: a record is one run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        SUMMARY.path(self._folder, self.rank).unlink(missing_ok=True)
        if self.rank == 0:
            (self._folder / FAILURE).unlink(missing_ok=True)

    def add(
        self,
        iteration: Iteration,
        flops: float | None,
        links: Sequence[MeasuredLink],
        weights_bytes: Callable[[], int | None],
    ) -> None:
        """Add a recorded iteration, once its weights are updated. `flops`: of one iteration on all ranks."""
        headers = [] if self._started else [self._begin(flops, links, weights_bytes())]
        begin_s = round(iteration.begin_s - self._clock_ahead_s, 6)
        append(self.path, *headers, replace(iteration, begin_s=begin_s, elapsed_s=round(iteration.elapsed_s, 9)))

    def summarize(self, summary: RankSummary) -> None:
        """Replace this rank's row, whole or not at all."""
        write_whole(SUMMARY.path(self._folder, self.rank), replace(summary, run=self.run))

    def _begin(self, flops: float | None, links: Sequence[MeasuredLink], weights_bytes: int | None) -> RankHeader:
        """Write the facts of the run on rank 0, and return this rank's header."""
        self._started = True
        if self.rank == 0:
            info = replace(
                self._info,
                run=self.run,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=dist.get_world_size(),
                num_pipelines=self._num_pipelines,
                device=self._device,
                flops_per_iteration=flops,
                links=tuple(LinkSpeed(**asdict(link) | {"ranks": frozenset(link.ranks)}) for link in links),
            )
            write_whole(self._folder / RUN, info)
        own_links = [link for link in links if self.rank in link.ranks]
        transports = {link.transport for link in own_links}
        return RankHeader(
            run=self.run,
            rank=self.rank,
            pipeline=self.pipeline,
            place=self._place,
            host=socket.gethostname(),
            device=self._device,
            cores=len(os.sched_getaffinity(0)),
            transport=transports.pop() if len(transports) == 1 else None,
            partner=sum(own_links[0].ranks) - self.rank if len(own_links) == 1 else None,
            weights_bytes=weights_bytes,
            limit_bytes=self._limit_bytes,
        )


def _clock_ahead_s() -> float:
    """Return how far this machine's clock is ahead of rank 0's, as accurately as ranks leave a barrier together: to a
    fraction of a millisecond. Collective over the world."""
    dist.barrier()
    boot = Location.here().boot
    stamps = gathered((boot, time.time()))
    first_boot, first_s = stamps[0]
    return 0.0 if boot == first_boot else float(stamps[dist.get_rank()][1] - first_s)
