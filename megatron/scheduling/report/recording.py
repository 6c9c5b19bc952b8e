"""Fill the record of a run: what every rank did in a few chosen iterations, action by action.

In: the engine's rows. Out: run.json and this rank's record under the folder of `--bpipe-report`, as
`bpipe.record.format` defines them.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.build import ScheduleConfig
from bpipe.models.cluster import DEVICES
from bpipe.record.format import FAILURE, RECORD, RUN, SUMMARY, Iteration, LinkSpeed, RankHeader, Row, RunInfo
from bpipe.record.write import append, write_whole
from bpipe.runtime.kept import Share
from bpipe.runtime.sizing import Unmoved
from bpipe.transport.connect import Location, MeasuredLink
from megatron.scheduling.hooks import upstream
from megatron.scheduling.loop.directory import pipelines
from megatron.scheduling.memory.watermark import Besides
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.positions import Positions


@dataclass(frozen=True)
class PeakFlops:
    """Dense 16-bit FLOP/s of one device, for the MFU, and who says so."""

    flops_per_s: float
    source: str


def peak_of(device_name: str, given_tflops: float | None) -> PeakFlops | None:
    """Return the peak the user gave, or the one of the device table; None where neither knows."""
    if given_tflops is not None:
        return PeakFlops(given_tflops * 1e12, "--bpipe-peak-tflops")
    for device in DEVICES.values():
        if device.name.split("-")[0] in device_name.lower():
            return PeakFlops(device.peak_flops_per_s, f"{device.source}, dense 16-bit")
    return None


@dataclass(frozen=True)
class IterationNotes:
    """A rank's notes of one iteration's pipelined loop. `begin_s`: unix time on this rank's clock."""

    program: ScheduleConfig
    begin_s: float
    elapsed_s: float
    rows: tuple[Row, ...]
    saved_bytes: Mapping[int, int]
    moved_bytes: Mapping[int, int]
    after_input_bytes: Mapping[int, int]
    shard_bytes: int
    received_bytes: int
    host_bytes: int
    own_bytes: int
    peak_bytes: int
    shares: Mapping[int, Share]
    stayed: Unmoved

    @property
    def exposed_s(self) -> float:
        """Seconds in which computation waited for transfers."""
        return float(sum(row.wait_s for row in self.rows))


class RunRecord:
    """This rank's record in a folder."""

    def __init__(self, folder: Path, config: SchedulingConfig, peak: PeakFlops | None) -> None:
        """Before the first step. Collective over the world: the clocks are compared."""
        self._folder = folder
        self._config = config
        self._peak = peak
        self.path = RECORD.path(folder, dist.get_rank())
        self._started = False
        self._clock_ahead_s = clock_ahead_s()
        self.run = name_of_run()
        self.pipeline = pipeline_index(config.positions)

    def clear(self) -> None:
        """Take away another run's record, or this run's before it was resumed: one record is one run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        SUMMARY.path(self._folder, dist.get_rank()).unlink(missing_ok=True)
        if dist.get_rank() == 0:
            (self._folder / FAILURE).unlink(missing_ok=True)

    def add(
        self,
        iteration: int,
        recorded: IterationNotes,
        flops: float | None,
        links: Sequence[MeasuredLink],
        besides: Callable[[], Besides],
    ) -> None:
        """Add a recorded iteration, once its weights are updated."""
        headers = [] if self._started else [self._begin(flops, links, besides().now_bytes)]
        line = Iteration(
            iteration=iteration,
            program=recorded.program,
            begin_s=round(recorded.begin_s - self._clock_ahead_s, 6),
            elapsed_s=round(recorded.elapsed_s, 9),
            saved_bytes=recorded.saved_bytes,
            moved_bytes=recorded.moved_bytes,
            after_input_bytes=recorded.after_input_bytes,
            shard_bytes=recorded.shard_bytes,
            kept_bytes={stage: share.kept_bytes for stage, share in recorded.shares.items()},
            kept_counted_by=next((share.counted_by for share in recorded.shares.values()), None),
            received_bytes=recorded.received_bytes,
            host_bytes=recorded.host_bytes,
            own_bytes=recorded.own_bytes,
            stayed_microbatches=recorded.stayed.microbatches,
            stayed_bytes=recorded.stayed.nbytes,
            passed_microbatches=recorded.stayed.passed_microbatches,
            passed_bytes=recorded.stayed.passed_bytes,
            # The CPU's stand-in has no counter and says 0.
            device_peak_bytes=torch.cuda.max_memory_allocated() or None,
            rows=recorded.rows,
        )
        append(self.path, *headers, line)

    def _begin(self, flops: float | None, links: Sequence[MeasuredLink], weights_bytes: int) -> RankHeader:
        """Rank 0 says what run this is; every rank gets its header."""
        self._started = True
        if dist.get_rank() == 0:
            megatron = upstream.running()
            run = RunInfo(
                run=self.run,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                world_size=dist.get_world_size(),
                num_pipelines=dist.get_world_size() // self._config.num_ranks,
                balanced=self._config.balance,
                synchronous=self._config.synchronous,
                device=device_name(),
                torch=str(torch.__version__),
                megatron_core=megatron.version,
                megatron_core_path=str(megatron.place),
                flops_per_iteration=flops,
                peak_flops=self._peak.flops_per_s if self._peak else None,
                peak_source=self._peak.source if self._peak else None,
                links=tuple(
                    LinkSpeed(
                        ranks=frozenset(link.ranks),
                        transport=link.transport,
                        bytes_per_s=dict(link.bytes_per_s),
                        refused=dict(link.refused),
                    )
                    for link in links
                ),
            )
            write_whole(self._folder / RUN, run)
        rank = dist.get_rank()
        mine = [link for link in links if rank in link.ranks]
        transports = {link.transport for link in mine}
        return RankHeader(
            run=self.run,
            rank=rank,
            pipeline=self.pipeline,
            place=self._config.positions.here(),
            host=socket.gethostname(),
            device=device_name(),
            cores=len(os.sched_getaffinity(0)),
            transport=transports.pop() if len(transports) == 1 else None,
            partner=sum(mine[0].ranks) - rank if len(mine) == 1 else None,
            weights_bytes=weights_bytes,
            limit_bytes=limit_bytes(),
        )


def name_of_run() -> str:
    """Return one name for all files of this run, so that nobody takes another's for them. Collective over the world."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, uuid.uuid4().hex[:12] if dist.get_rank() == 0 else None)
    return str(names[0])


def clock_ahead_s() -> float:
    """Return how far this machine's clock is ahead of rank 0's, to a fraction of a millisecond, as well as leaving a
    barrier together tells.

    Collective over the world.
    """
    dist.barrier()
    boot = Location.here().boot
    stamps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stamps, (boot, time.time()))
    first_boot, first_s = stamps[0]
    return 0.0 if boot == first_boot else float(stamps[dist.get_rank()][1] - first_s)


def pipeline_index(positions: Positions) -> int:
    """Return which pipeline of the world this rank belongs to, counted by the lowest rank of each.

    Collective over the world.
    """
    rank = dist.get_rank()
    return next(index for index, ranks in enumerate(sorted(pipelines(positions), key=min)) if rank in ranks)


def device_name() -> str:
    """Return the device's name as torch has it, or "cpu"."""
    device = torch.device(torch.cuda.current_device())
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def limit_bytes() -> int | None:
    device = torch.device(torch.cuda.current_device())
    return None if device.type == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)
