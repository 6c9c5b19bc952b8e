"""Write what a run measured: one file a rank, and one line an iteration with its exact loss and gradient norm.

In: measurements. Out: files under the folder of `--bpipe-report`. Knows no tensors' insides.

    DIR/rank_00000.json     one stage: peaks measured and predicted, transfers an iteration
    DIR/iterations.jsonl    {"iteration": 1, "lm loss": "0x1.9p+2", "grad_norm": "0x1.0p+0", "skipped": 0, "elapsed_s": 0.5}
    DIR/run.json, DIR/record_00000.jsonl    see `recording`
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bpipe.models.flops import mfu
from megatron.scheduling import metrics, patches
from megatron.scheduling.arguments import SchedulingConfig
from megatron.scheduling.hooks import Hooks
from megatron.scheduling.recording import Peak, RunRecord, device_name, held_bytes, peak_of, write_whole


class Reporter:
    """Collects what a run says of itself into a folder, from Megatron's training step and from the hooks."""

    def __init__(self, config: SchedulingConfig, hooks: Hooks) -> None:
        assert config.report is not None
        self._config = config
        self._hooks = hooks
        self._folder = Path(config.report)
        self._peak: Peak | None = None
        self._record: RunRecord | None = None
        self._started = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Megatron's training step, observed."""
        return {patches.TRAIN_STEP: self._wrap_train_step}

    def _wrap_train_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            iteration = given["iteration"] + 1
            if self._record is None:
                self._peak = peak_of(device_name(), self._config.peak_tflops)
                self._record = RunRecord(self._folder, self._config, self._peak)
            chosen = self._config.report_first <= iteration <= self._config.report_last
            logged = self._config.metrics_interval is not None and iteration % self._config.metrics_interval == 0
            self._hooks.recording = chosen or logged
            begin_s = time.perf_counter()
            result = train_step(*args, **kwargs)
            elapsed_s = time.perf_counter() - begin_s
            self._append(iteration, result, elapsed_s)
            recorded = self._hooks.recorded
            if recorded is not None:
                flops = self._config.flops(recorded.program.num_microbatches)
                if chosen:
                    held = functools.partial(held_bytes, given["model"], given["optimizer"])
                    self._record.add(iteration, recorded, flops, self._hooks.links, held)
                if logged:
                    peak = self._peak
                    share = None if peak is None or flops is None else mfu(flops, elapsed_s, dist.get_world_size(), peak.flops_per_s)
                    metrics.write(iteration, recorded.peak_bytes, recorded.exposed_s, share)
            return result

        return step

    def _append(self, iteration: int, result: Sequence[Any], elapsed_s: float) -> None:
        """The last rank's line: losses, gradient norm, and how long the step took."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        losses, skipped, grad_norm = result[0], result[1], result[5]
        record: dict[str, Any] = {"iteration": iteration, **{name: _exact(value) for name, value in losses.items()}}
        record |= {"grad_norm": _exact(grad_norm), "skipped": int(skipped), "elapsed_s": round(elapsed_s, 6)}
        path = self._folder / "iterations.jsonl"
        if not self._started:
            # A resumed run goes on where its checkpoint was; what was trained after it, or by another run before, is not this run's.
            self._started = True
            path.write_text("".join(_before(path, iteration)))
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self) -> None:
        """Write this rank's row, whole or not at all."""
        report = self._hooks.stage_report()
        if report is not None:
            write_whole(self._folder / f"rank_{report.rank:05d}.json", asdict(report))


def _before(path: Path, iteration: int) -> list[str]:
    """The whole lines of a file of iterations that come before `iteration`; a killed run may have left half a line."""
    if iteration == 1 or not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    return [line for line in lines if json.loads(line)["iteration"] < iteration]


def _exact(value: Any) -> str | None:
    """A number without losing a bit, or None where there is none."""
    if value is None:
        return None
    return float(value.item() if isinstance(value, torch.Tensor) else value).hex()
