"""Record a run in the folder of `--bpipe-report`, as `bpipe.record.format` defines it, and tell Megatron's writers."""

import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from bpipe.config.features.table import Settings
from bpipe.record.format import FAILURE, STEPS, SUMMARY, FirstFailure, RunInfo, TrainingStep, append, write_whole
from bpipe.runtime.failures import Failure
from bpipe.runtime.run_record import RunRecord, peak_of
from megatron.scheduling.hooks import upstream
from megatron.scheduling.loop.driver import Driver
from megatron.scheduling.loop.log import say
from megatron.scheduling.loop.measurements import Watermark, held
from megatron.scheduling.loop.megatron_loops import as_list, graph_pool_bytes
from megatron.scheduling.options.arguments import SchedulingConfig


class Reporter:
    """Records a training in a folder, from Megatron's training step and from the driver."""

    def __init__(self, config: SchedulingConfig, driver: Driver, watermark: Watermark) -> None:
        self._config, self._driver, self._watermark = config, driver, watermark
        self._folder, self._guard = watermark.folder, watermark.guard
        self._record: RunRecord | None = None
        self._started = False
        self._first, self._last = 0, 0
        # The first iteration that is captured into a CUDA graph: it and later ones are replays, which tell nothing.
        self._captured: int | None = None

    def step(self, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run Megatron's training step."""
        iteration = arguments["iteration"] + 1
        if self._record is None:
            self._record = self._begin(iteration, arguments)
        chosen = self._guard.open and self._first <= iteration <= self._last
        self._driver.note(iteration, chosen)
        begin_s = time.perf_counter()
        try:
            result = run()
        except Exception as error:
            self._driver.failed(error)
            raise
        self._append(iteration, result, time.perf_counter() - begin_s)
        recorded = self._driver.recorded
        if recorded is not None:
            flops = self._config.flops(recorded.program.num_microbatches)
            add = functools.partial(self._record.add, recorded, flops, self._driver.links)
            self._guard.run(
                lambda: add(lambda: held(arguments["model"], arguments["optimizer"]).now_bytes), self._record.path
            )
        return result

    def _begin(self, iteration: int, arguments: Mapping[str, Any]) -> RunRecord:
        """Begin this rank's record before the first step. Collective over the world."""
        self._choose(iteration, Settings(get_model_config(as_list(arguments["model"])[0])))
        config, megatron, device = self._config, upstream.running(), torch.device(torch.cuda.current_device())
        on_cpu = device.type == "cpu"
        name = "cpu" if on_cpu else torch.cuda.get_device_name(device)
        limit_bytes = None if on_cpu else int(torch.cuda.get_device_properties(device).total_memory)
        peak_flops, peak_source = peak_of(name, config.peak_tflops)
        info = RunInfo(
            balanced=config.balance is not None,
            synchronous=config.transfers.synchronous,
            captured=self._captured,
            torch=str(torch.__version__),
            megatron_core=megatron.version,
            megatron_core_path=str(megatron.place),
            peak_flops=peak_flops,
            peak_source=peak_source,
        )
        ways, place = config.positions.pipelines(), config.positions.here()
        record = RunRecord(self._folder, info, ways, place=place, device=name, limit_bytes=limit_bytes)
        self._guard.run(record.clear, record.path)
        begin = functools.partial(self._watermark.begin, record.run, record.pipeline, name, limit_bytes)
        self._guard.run(lambda: begin(held(arguments["model"], arguments["optimizer"])), self._folder)
        return record

    def failed(self, first: Failure) -> None:
        """Record which rank failed first, as far as this rank knows."""
        path = self._folder / FAILURE
        self._guard.run(lambda: write_whole(path, FirstFailure(rank=first.rank, cause=first.cause)), path)

    def _choose(self, iteration: int, settings: Settings) -> None:
        """Choose what to record, now that the first iteration is known: a resumed run begins at its checkpoint."""
        last: float = math.inf if self._config.last_iteration is None else self._config.last_iteration
        if settings.cuda_graph_impl == "full_iteration":
            self._captured = iteration + settings.cuda_graph_warmup_steps
            last = min(last, self._captured - 1)
        default = (int(min(iteration + 2, last)), int(min(iteration + 4, last)))
        self._first, self._last = self._config.report_iterations or default
        if self._captured is not None and self._first >= self._captured:
            say(
                f"nothing will be recorded: iterations from {self._captured} on are replays of a CUDA graph, and "
                f"--bpipe-report-iterations begins with {self._first}"
            )
        if iteration > self._last:
            say(
                f"nothing will be recorded: --bpipe-report-iterations ends with iteration {self._last}, but the run "
                f"starts at iteration {iteration}"
            )

    def _append(self, iteration: int, result: Sequence[Any], elapsed_s: float) -> None:
        """Write the last rank's line: losses, gradient norm, and how long the step took."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        losses, skipped, grad_norm = result[0], result[1], result[5]
        numbers = {name: _exact(value) for name, value in {**losses, "grad_norm": grad_norm}.items()}
        step = TrainingStep(iteration=iteration, numbers=numbers, skipped=int(skipped), elapsed_s=round(elapsed_s, 6))
        path = self._folder / STEPS
        self._guard.run(lambda: self._write(path, step), path)

    def _write(self, path: Path, step: TrainingStep) -> None:
        if not self._started:
            # A resumed run continues at its checkpoint. Later steps in the file are another run's.
            self._started = True
            path.write_text("".join(_before(path, step.iteration)))
        append(path, step)

    def finish(self) -> None:
        """Write this rank's summary, whole or not at all."""
        record = self._record
        if record is None:
            return

        def summarize() -> None:
            report = self._driver.stage_report(record.pipeline)
            if report is not None:
                record.summarize(replace(report, graph_pool_bytes=graph_pool_bytes()))

        self._guard.run(summarize, SUMMARY.path(self._folder, dist.get_rank()))


def _before(path: Path, iteration: int) -> list[str]:
    """Return the whole lines of a file that come before an iteration; a killed run may have left half a line."""
    if iteration == 1 or not path.exists():
        return []
    return [line for line in path.read_text(errors="replace").splitlines(keepends=True) if _number(line) < iteration]


def _number(line: str) -> float:
    """Return the iteration of a line, or infinity for a damaged line."""
    try:
        return float(json.loads(line)["iteration"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _exact(value: Any) -> float | None:
    """Return a number without losing a bit."""
    return None if value is None else float(value.item() if isinstance(value, torch.Tensor) else value)
