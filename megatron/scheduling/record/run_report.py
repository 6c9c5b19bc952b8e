"""Collect what a run says of itself: the record's files under the folder of `--bpipe-report`, and what Megatron's own
writers are told.

In: measurements, from Megatron's training step and from the driver. Out: files, as `bpipe.record.format` defines them.
Knows no tensors' insides.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.predict.flops import mfu
from bpipe.record.format import FAILURE, STEPS, SUMMARY, FirstFailure, TrainingStep
from bpipe.record.write import append, write_whole
from bpipe.runtime.failures import Failure
from bpipe.runtime.run_record import PeakFlops, RunRecord, peak_of
from megatron.scheduling.hooks import patches
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.memory.watermark import Watermark, held
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.record.log import say
from megatron.scheduling.record.metrics import Writers
from megatron.scheduling.record.run_facts import begin_record, device_name, limit_bytes


class Monitor:
    """Tells writers what a training without a report does, as often as Megatron's are told of the rest."""

    def __init__(self, config: SchedulingConfig, driver: Driver) -> None:
        self._driver = driver
        self._writers = Writers(config.positions, config.metrics_interval)
        self._looked = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return Megatron's training step, observed."""
        return {patches.TRAIN_STEP: patches.by_name(self._step)}

    def _step(self, given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        iteration = given["iteration"] + 1
        if not self._looked:
            self._looked = True
            if not self._writers.look():
                self._driver.tell_nobody()
        logged = self._writers.due(iteration)
        self._driver.note(iteration, logged)
        result = run()
        recorded = self._driver.recorded
        if logged and recorded is not None:
            self._writers.write(recorded, *self._driver.reached, None)
        return result


class Reporter:
    """Collects what a run says of itself into a folder, from Megatron's training step and from the driver."""

    def __init__(self, config: SchedulingConfig, driver: Driver, watermark: Watermark) -> None:
        self._config, self._driver, self._watermark = config, driver, watermark
        self._folder, self._guard = watermark.folder, watermark.guard
        self._writers = Writers(config.positions, config.metrics_interval)
        self._peak: PeakFlops | None = None
        self._record: RunRecord | None = None
        self._started = False
        self._first, self._last = 0, 0

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Return Megatron's training step, observed."""
        return {patches.TRAIN_STEP: patches.by_name(self._step)}

    def _step(self, given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        iteration = given["iteration"] + 1
        if self._record is None:
            self._choose(iteration)
            self._writers.look()
            self._peak = peak_of(device_name(), self._config.peak_tflops)
            record = self._record = begin_record(self._folder, self._config, self._peak)
            self._guard.run(record.clear, record.path)
            self._guard.run(
                lambda: self._watermark.begin(
                    record.run, record.pipeline, device_name(), limit_bytes(), held(given["model"], given["optimizer"])
                ),
                self._folder,
            )
        chosen = self._guard.open and self._first <= iteration <= self._last
        logged = self._writers.due(iteration)
        self._driver.note(iteration, chosen or logged)
        begin_s = time.perf_counter()
        try:
            result = run()
        except Exception as error:
            self._driver.failed(error)
            raise
        elapsed_s = time.perf_counter() - begin_s
        self._append(iteration, result, elapsed_s)
        recorded = self._driver.recorded
        if recorded is not None:
            flops = self._config.flops(recorded.program.num_microbatches)
            if chosen:
                add = functools.partial(self._record.add, recorded, flops, self._driver.links)
                self._guard.run(
                    lambda: add(lambda: held(given["model"], given["optimizer"]).now_bytes), self._record.path
                )
            if logged:
                share = self._mfu(flops, elapsed_s)
                self._writers.write(recorded, *self._driver.reached, share)
        return result

    def _mfu(self, flops: float | None, elapsed_s: float) -> float | None:
        """None where the device's peak or the FLOPs of an iteration are not known."""
        if self._peak is None or flops is None:
            return None
        return mfu(flops, elapsed_s, dist.get_world_size(), self._peak.flops_per_s)

    def failed(self, first: Failure) -> None:
        """Note which rank failed first, as this rank found out."""
        path = self._folder / FAILURE
        self._guard.run(lambda: write_whole(path, FirstFailure(rank=first.rank, cause=first.cause)), path)

    def _choose(self, iteration: int) -> None:
        """What to record, now that the first iteration to be trained is known: a resumed run begins where its
        checkpoint was."""
        end = self._config.last_iteration
        default = (iteration + 2, iteration + 4) if end is None else (min(iteration + 2, end), min(iteration + 4, end))
        self._first, self._last = self._config.report_iterations or default
        if iteration > self._last:
            say(
                f"nothing will be recorded: --bpipe-report-iterations ends with iteration {self._last}, but the run "
                f"starts at iteration {iteration}"
            )

    def _append(self, iteration: int, result: Sequence[Any], elapsed_s: float) -> None:
        """The last rank's line: losses, gradient norm, and how long the step took."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        losses, skipped, grad_norm = result[0], result[1], result[5]
        numbers = {name: _exact(value) for name, value in {**losses, "grad_norm": grad_norm}.items()}
        step = TrainingStep(iteration=iteration, numbers=numbers, skipped=int(skipped), elapsed_s=round(elapsed_s, 6))
        path = self._folder / STEPS
        self._guard.run(lambda: self._write(path, step), path)

    def _write(self, path: Path, step: TrainingStep) -> None:
        if not self._started:
            # A resumed run goes on where its checkpoint was; what was trained after it, or by another run before, is
            # not this run's.
            self._started = True
            path.write_text("".join(_before(path, step.iteration)))
        append(path, step)

    def finish(self) -> None:
        """Write this rank's row, whole or not at all."""
        record = self._record
        if record is not None:
            path = SUMMARY.path(self._folder, dist.get_rank())
            self._guard.run(lambda: self._finish(record), path)

    def _finish(self, record: RunRecord) -> None:
        report = self._driver.stage_report(record.pipeline)
        if report is not None:
            record.summarize(report)


def _before(path: Path, iteration: int) -> list[str]:
    """Return the whole lines of a file of iterations that come before `iteration`; a killed run may have left half a
    line."""
    if iteration == 1 or not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if _number(line) < iteration]


def _number(line: str) -> float:
    """Return the iteration of a line; of a torn or damaged line, one that never comes."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _exact(value: Any) -> float | None:
    """Return a number without losing a bit, or None where there is none."""
    return None if value is None else float(value.item() if isinstance(value, torch.Tensor) else value)
