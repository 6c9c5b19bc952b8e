"""Write what balancing did to TensorBoard and Weights & Biases, under names in Megatron's style.

Megatron's writers are on the last rank of the world. docs/report.md explains the scalars.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from bpipe.record.format import Iteration, Row
from bpipe.runtime.retention import Share
from bpipe.schedule.action import TRANSFER, Kind
from megatron.scheduling.loop.iteration_graph import graph_pool_bytes
from megatron.scheduling.loop.watermark import Guard
from megatron.scheduling.placement.pipelines import gathered
from megatron.scheduling.placement.positions import Positions


class Writers:
    """The writers of a training, on whichever rank they are."""

    def __init__(self, positions: Positions, interval: int | None) -> None:
        self._positions, self._interval = positions, interval
        self._guard = Guard("logging to TensorBoard and Weights & Biases")

    def look(self) -> bool:
        """Whether there are any. Collective over the world if an interval is set."""
        if self._interval is None:
            return False
        has_writers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(has_writers, get_tensorboard_writer() is not None or get_wandb_writer() is not None)
        if not any(has_writers):
            self._interval = None
        return self._interval is not None

    def due(self, iteration: int) -> bool:
        """Whether this iteration is written."""
        return self._interval is not None and iteration % self._interval == 0

    def write(self, notes: Iteration, peak_bytes: int, shares: Iterable[Share], mfu: float | None) -> None:
        """Write the scalars of an iteration. Collective as `gathered`.

        Args:
            notes: This rank's record of the iteration.
            peak_bytes: The most that this rank held.
            shares: The share of each stage that moved.
            mfu: Of the whole world, if known.
        """
        own = {name: number for name, measure in _BY_STAGE.items() if (number := measure(notes)) is not None}
        own["bpipe-activation-bytes"] = float(peak_bytes)
        fractions = [share.fraction for share in shares]
        if fractions:
            own["bpipe-moved-fraction"] = min(fractions)
        self._tell_all(notes.iteration, own, {} if mfu is None else {"bpipe-mfu": mfu})

    def write_replay(self, iteration: int, elapsed_s: float) -> None:
        """Write what is known of an iteration that is captured into a CUDA graph or replays one, if this is one.
        Collective as `gathered`."""
        pool_bytes = graph_pool_bytes()
        if pool_bytes is not None:
            self._tell_all(
                iteration, {"bpipe-graph-pool-bytes": float(pool_bytes)}, {"bpipe-replay-ms": 1e3 * elapsed_s}
            )

    def _tell_all(self, iteration: int, own: dict[str, float], whole: dict[str, float]) -> None:
        """Write every stage's scalars and those of the whole world."""
        stages = {
            f"{name}/stage-{stage}": number
            for stage, numbers in enumerate(gathered(self._positions, own))
            for name, number in numbers.items()
        }
        self._guard.run(lambda: self._tell(stages | whole, iteration), "the writers")

    def _tell(self, scalars: dict[str, float], iteration: int) -> None:
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if board:
            for name, value in scalars.items():
                board.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)


def _evictions(notes: Iteration) -> list[Row]:
    """Return the rows of evictions that moved anything."""
    return [row for row in notes.rows if row.action.kind is Kind.EVICT and row.bytes]


def _link_speed(notes: Iteration) -> float | None:
    """Return GB/s of the stage's transfers; None if there were none, or their times are unknown."""
    kinds = Kind.EVICT, Kind.LOAD
    moved = [row for row in notes.rows if row.action.kind in kinds and row.bytes and row.seconds > 0]
    seconds = sum(row.seconds for row in moved)
    return sum(row.bytes or 0 for row in moved) / seconds / 1e9 if seconds else None


def _bubble(notes: Iteration) -> float | None:
    if not notes.elapsed_s:
        return None
    busy_s = sum(row.seconds for row in notes.rows if row.action.kind not in TRANSFER)
    return max(0.0, 1 - busy_s / notes.elapsed_s)


def _counter(name: str, _: Iteration) -> float | None:
    """Return a counter of the device's allocator, or None on a CPU."""
    device = torch.device(torch.cuda.current_device())
    return None if device.type == "cpu" else float(torch.cuda.memory_stats(device).get(name, 0))


_BY_STAGE: dict[str, Callable[[Iteration], float | None]] = {
    "bpipe-exposed-transfer-ms": lambda notes: 1e3 * sum(row.wait_s for row in notes.rows),
    "bpipe-evictions": lambda notes: float(len(_evictions(notes))),
    "bpipe-moved-bytes": lambda notes: float(sum(row.bytes or 0 for row in _evictions(notes))),
    "bpipe-link-gb-per-s": _link_speed,
    "bpipe-stayed-bytes": lambda notes: float(notes.stayed_bytes),
    "bpipe-bubble": _bubble,
    "bpipe-allocator-peak-bytes": functools.partial(_counter, "allocated_bytes.all.peak"),
    "bpipe-allocator-retries": functools.partial(_counter, "num_alloc_retries"),
}
