"""Record chosen steps of a balanced schedule for `bpipe report`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.build import ScheduleConfig
from bpipe.record.format import STEPS, RunInfo, TrainingStep, append, begin
from bpipe.runtime.checksums import Certificate, Verifier
from bpipe.runtime.engine import Engine
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.run_record import DifferingSums, RunRecord, iteration_of, peak_of, summary_of
from bpipe.transport.connect import MeasuredLink
from bpipe.transport.streams import Clock, peak_allocated_on, total_bytes


class StepRecord:
    """This rank's record. Made collectively over the world.

    Args:
        folder: Where the record is written.
        steps: The first and the last to record, counted from 1.
        program: The configuration of the schedule.
        pipelines: Global ranks of every pipeline.
        stages: The stages of this rank.
        device: The device of this rank.

    Raises:
        ValueError: The steps are no range.
    """

    def __init__(
        self,
        folder: str | Path,
        steps: tuple[int, int],
        program: ScheduleConfig,
        pipelines: Sequence[Sequence[int]],
        stages: Sequence[Any],
        device: torch.device,
    ) -> None:
        first, last = steps
        if not 1 <= first <= last:
            raise ValueError(
                f"report_steps {first} to {last} is not a range of steps: give the first and the last, counted from 1"
            )
        self._folder, self._steps, self._program = Path(folder), range(first, last + 1), program
        self._device, self._parts = device, [stage.submod for stage in stages]
        name = "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
        peak_flops, peak_source = peak_of(name, None)
        info = RunInfo(
            balanced=program.balance is not None,
            torch=str(torch.__version__),
            peak_flops=peak_flops,
            peak_source=peak_source,
        )
        self._place = int(stages[0].group_rank)
        limit_bytes = total_bytes(device) or None
        self._record = RunRecord(self._folder, info, pipelines, place=self._place, device=name, limit_bytes=limit_bytes)
        self._record.clear()
        # The rank of the first pipeline with the last stage writes the losses.
        self._writes_losses = self._record.pipeline == 0 and any(stage.is_last for stage in stages)
        if self._writes_losses:
            begin(self._folder / STEPS)
        self._number = 0
        # Micro-batches and bytes of the first step, and the most of all others.
        self._peaks: list[tuple[int, int]] = []
        self._differing = DifferingSums()
        # What was measured at the last summary.
        self._summarized: object = None
        self.losses: list[torch.Tensor] = []

    @contextmanager
    def step(
        self, engine: Engine, meter: Meter, links: Sequence[MeasuredLink], verifier: Verifier | None
    ) -> Iterator[None]:
        """Enter around one step of training. At its end `losses` are those of its micro-batches."""
        self._number += 1
        self.losses = []
        recorder = engine.recorder = Recorder(Clock(self._device)) if self._number in self._steps else None
        begin_s, since = time.time(), time.perf_counter()
        yield
        elapsed_s = time.perf_counter() - since
        first, *others = [*self._peaks, (meter.peak_microbatches, meter.peak_bytes)]
        self._peaks = [first, *([tuple(map(max, zip(*others, strict=True)))] if others else [])]
        self._differing.add(engine)
        if recorder is not None:
            iteration = iteration_of(engine, meter, recorder, self._program, self._number, begin_s)
            iteration = replace(iteration, device_peak_bytes=peak_allocated_on(self._device))
            self._record.add(iteration, None, links, self._weights_bytes)
        if self._writes_losses:
            losses = [float(loss) for loss in self.losses]
            numbers = {"loss": sum(losses) / len(losses)} if losses else {}
            step = TrainingStep(iteration=self._number, numbers=numbers, elapsed_s=round(elapsed_s, 6))
            append(self._folder / STEPS, step)
        certificate = Certificate() if verifier is None else verifier.certificate
        measured = (*self._peaks, replace(self._differing), certificate)
        # Computing and writing the schedule's predictions takes longer than what is measured.
        if recorder is not None or measured != self._summarized:
            self._summarized = measured
            summary = summary_of(
                engine,
                meter,
                self._place,
                rank=dist.get_rank(),
                pipeline=self._record.pipeline,
                balanced=self._program.balance is not None,
                peaks=self._peaks,
                differing=self._differing,
                certificate=certificate,
            )
            self._record.summarize(summary)

    def _weights_bytes(self) -> int:
        """Return the bytes of this rank's own parameters; of a sharded one, those of its shard."""
        parameters = (parameter for part in self._parts for parameter in part.parameters())
        local = (parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in parameters)
        return sum(parameter.untyped_storage().nbytes() for parameter in local)
