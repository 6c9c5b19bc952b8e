"""Give Megatron's TensorBoard and Weights & Biases writers what balancing did, under names in Megatron's style.

In: what each stage measured in an iteration. Out: scalars, where Megatron has writers (the last rank of the world).
docs/report.md says what each means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from bpipe.ir.action import TRANSFER, Kind
from bpipe.record.format import Row
from megatron.scheduling.loop.directory import gathered
from megatron.scheduling.placement.positions import Positions
from megatron.scheduling.report.guard import Guard
from megatron.scheduling.report.recording import IterationNotes


def write(guard: Guard, positions: Positions, iteration: int, notes: IterationNotes, mfu: float | None) -> None:
    """Write the metrics of an iteration.

    Collective as `gathered`: every rank gives its own numbers; the one with the writers writes.
    """
    mine = {name: number for name, measure in _BY_STAGE.items() if (number := measure(notes)) is not None}
    scalars = {
        f"{name}/stage-{stage}": number
        for stage, numbers in enumerate(gathered(positions, mine))
        for name, number in numbers.items()
    }
    if mfu is not None:
        scalars["bpipe-mfu"] = mfu
    guard.run(lambda: _tell(scalars, iteration), "Megatron's writers")


def _kind(row: Row) -> Kind:
    return row.action.kind


def _evictions(notes: IterationNotes) -> list[Row]:
    """Those that moved anything."""
    return [row for row in notes.rows if _kind(row) is Kind.EVICT and row.bytes]


def _link_speed(notes: IterationNotes) -> float | None:
    """GB/s of what the stage sent and took back; None where it did not, or nobody knows when it ended."""
    moved = [row for row in notes.rows if _kind(row) in (Kind.EVICT, Kind.LOAD) and row.bytes and row.seconds > 0]
    seconds = sum(row.seconds for row in moved)
    return sum(row.bytes or 0 for row in moved) / seconds / 1e9 if seconds else None


def _bubble(notes: IterationNotes) -> float | None:
    if not notes.elapsed_s:
        return None
    busy_s = sum(row.seconds for row in notes.rows if _kind(row) not in TRANSFER)
    return max(0.0, 1 - busy_s / notes.elapsed_s)


def _counter(name: str) -> Callable[[IterationNotes], float | None]:
    """Return what reads a counter of the device's allocator; None on a CPU, where nobody counts."""

    def read(notes: IterationNotes) -> float | None:
        device = torch.device(torch.cuda.current_device())
        return None if device.type == "cpu" else float(torch.cuda.memory_stats(device).get(name, 0))

    return read


_BY_STAGE: dict[str, Callable[[IterationNotes], float | None]] = {
    "bpipe-activation-bytes": lambda notes: float(notes.peak_bytes),
    "bpipe-exposed-transfer-ms": lambda notes: 1e3 * notes.exposed_s,
    "bpipe-evictions": lambda notes: float(len(_evictions(notes))),
    "bpipe-moved-bytes": lambda notes: float(sum(row.bytes or 0 for row in _evictions(notes))),
    "bpipe-link-gb-per-s": _link_speed,
    "bpipe-moved-fraction": lambda notes: min((share.fraction for share in notes.shares.values()), default=None),
    "bpipe-stayed-bytes": lambda notes: float(notes.stayed.nbytes),
    "bpipe-bubble": _bubble,
    "bpipe-allocator-peak-bytes": _counter("allocated_bytes.all.peak"),
    "bpipe-allocator-retries": _counter("num_alloc_retries"),
}


def _tell(scalars: dict[str, float], iteration: int) -> None:
    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if board:
        for name, value in scalars.items():
            board.add_scalar(name, value, iteration)
    if wandb:
        wandb.log(scalars, iteration)
