"""Write one rank's part of a run's record: the files of `bpipe.record.format`."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bpipe.predict.cluster import DEVICES
from bpipe.record.format import FAILURE, RECORD, RUN, SUMMARY, Iteration, LinkSpeed, RankHeader, RankSummary, RunInfo
from bpipe.record.write import append, write_whole
from bpipe.transport.connect import Location, MeasuredLink


@dataclass(frozen=True)
class PeakFlops:
    """Dense 16-bit FLOP/s of one device, for the MFU, and their source."""

    flops_per_s: float
    source: str


def peak_of(device_name: str, given_tflops: float | None) -> PeakFlops | None:
    """Return the peak that the user gave, or the one of the device table; None without either."""
    if given_tflops is not None:
        return PeakFlops(given_tflops * 1e12, "--bpipe-peak-tflops")
    for device in DEVICES.values():
        if device.name.split("-")[0] in device_name.lower():
            return PeakFlops(device.peak_flops_per_s, f"{device.source}, dense 16-bit")
    return None


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
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, uuid.uuid4().hex[:12] if self.rank == 0 else None)
        self.run = str(names[0])
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
    stamps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stamps, (boot, time.time()))
    first_boot, first_s = stamps[0]
    return 0.0 if boot == first_boot else float(stamps[dist.get_rank()][1] - first_s)
