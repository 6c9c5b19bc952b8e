"""Write what a run measured: one file a rank, and one line an iteration with its exact loss and gradient norm.

In: measurements. Out: files under the folder of `--bpipe-report`, and single lines in the training log. Knows no tensors' insides.

    DIR/rank_00000.json     one stage: peaks measured and predicted, transfers an iteration
    DIR/iterations.jsonl    {"iteration": 1, "lm loss": "0x1.9p+2", "grad_norm": "0x1.0p+0", "skipped": 0}; floats as `float.hex`
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.ir.action import Kind
from bpipe.ir.schedule import Schedule
from bpipe.simulate.memory import live_bytes, num_transfers
from megatron.scheduling import patches


def say(line: str) -> None:
    """One line in the training log, from rank 0."""
    if dist.get_rank() == 0:
        print(f"bpipe: {line}", flush=True)


@dataclass(frozen=True)
class StageReport:
    """One rank's row. Bytes of activations and of the slots preallocated for the partner; transfers are per iteration."""

    rank: int
    stage: int
    pipeline: int
    balanced: bool
    num_microbatches: int
    peak_microbatches: int
    peak_bytes: int
    predicted_microbatches: int
    predicted_bytes: int
    evictions: int
    loads: int

    @staticmethod
    def of(
        schedule: Schedule,
        stage: int,
        *,
        peak_microbatches: int,
        peak_bytes: int,
        saved_bytes: Mapping[int, int],
        moved_bytes: Mapping[int, int],
        input_bytes: int,
        num_slots: int,
        host_bytes: int,
        balanced: bool,
    ) -> StageReport:
        """Lay the measurement beside what the schedule says for micro-batches of this size.

        Slots are preallocated, so a rank holds all of them from the first HOST on: the prediction is the most its own
        micro-batches occupy in any slot, and its slots. `input_bytes` is what the stage receives for one micro-batch.
        """
        transfers = num_transfers(schedule, stage)
        return StageReport(
            rank=dist.get_rank(),
            stage=stage,
            pipeline=_pipeline_index(),
            balanced=balanced,
            num_microbatches=schedule.num_microbatches,
            peak_microbatches=peak_microbatches,
            peak_bytes=peak_bytes,
            predicted_microbatches=_own_peak(schedule, stage, dict.fromkeys(saved_bytes, 1), dict.fromkeys(saved_bytes, 1), 0)
            + num_slots,
            predicted_bytes=_own_peak(schedule, stage, saved_bytes, moved_bytes, input_bytes) + host_bytes,
            evictions=transfers.evictions,
            loads=transfers.loads,
        )


def _own_peak(schedule: Schedule, rank: int, saved: Mapping[int, int], moved: Mapping[int, int], received: int) -> int:
    """The most a rank's own micro-batches occupy, when one of each stage saves `saved[stage]` and a transfer moves `moved[stage]` of it.

    Megatron's 1F1B loop keeps the output of its last backward in a variable, and so that micro-batch's input, `received` bytes, until
    the next forward has returned: a forward right after a backward finds it still there. Its interleaved loop does so at times that
    depend on how its communication overlaps; there an input more or less is not predicted.
    """
    stages = range(schedule.num_stages)
    curve = live_bytes(schedule, rank, [saved.get(stage, 0) for stage in stages], [moved.get(stage, 0) for stage in stages])
    peak = 0
    after_backward = False
    for slot, held in zip(schedule.ranks[rank], curve, strict=True):
        if slot.compute is not None:
            forward = slot.compute.kind is Kind.FORWARD
            held += received * (forward and after_backward and schedule.num_chunks == 1)
            after_backward = not forward
        peak = max(peak, held)
    return peak


def _pipeline_index() -> int:
    """Which pipeline of the world this rank belongs to, counted by the lowest rank of each."""
    first = min(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()))
    firsts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(firsts, first)
    return sorted(set(firsts)).index(first)


class Reporter:
    """Collects what a run says of itself into a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._started = False

    def wraps(self) -> dict[patches.Patch, patches.Wrap]:
        """Megatron's training step, observed."""
        return {patches.TRAIN_STEP: self._wrap_train_step}

    def _wrap_train_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(train_step)

        @functools.wraps(train_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            iteration = signature.bind(*args, **kwargs).arguments["iteration"]
            result = train_step(*args, **kwargs)
            losses, skipped, grad_norm = result[0], result[1], result[5]
            if dist.get_rank() == dist.get_world_size() - 1:
                record = {"iteration": iteration + 1, **{name: _exact(value) for name, value in losses.items()}}
                record |= {"grad_norm": _exact(grad_norm), "skipped": int(skipped)}
                self._append(record)
            return result

        return step

    def _append(self, record: dict[str, Any]) -> None:
        path = self._folder / "iterations.jsonl"
        if not self._started:
            # A resumed run goes on where its checkpoint was; what was trained after it, or by another run before, is not this run's.
            self._started = True
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(_before(path, record["iteration"])))
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, report: StageReport | None) -> None:
        """Write this rank's row, whole or not at all."""
        if report is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{report.rank:05d}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(report), indent=1) + "\n")
        partial.replace(path)


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
