"""Measure what a forward of each stage saves and how much of it can move, before the first step.

It trains nothing: random numbers, buffers and gathered parameters are restored, as by torch's own handshake, which runs
forwards and backwards of the stages to learn shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from bpipe.runtime.capture import Claims, find
from bpipe.runtime.graph import plain_tensors
from bpipe.runtime.sizing import Sizing

# What all micro-batches share may count as the first one's own.
_MICROBATCHES = 2

# The outputs of a forward, which are the roots of its graph, and what the stage received for it.
Ran = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class StageSizes:
    """One micro-batch of a stage."""

    stage: int

    saved_bytes: int
    """Bytes that its forward saves."""

    lengths: tuple[int, ...]
    """Of the storages that can leave, in the order of the walk."""

    parts: tuple[int, ...]
    """Bytes that can leave instead of all, ascending; the last is all."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that can leave."""
        return sum(self.lengths)

    def lengths_of(self, part_bytes: int) -> tuple[int, ...]:
        """Return the storages that leave with a part: the last ones of the walk that hold it."""
        before = accumulate(reversed(self.lengths), initial=0)
        return tuple(length for length, sent in zip(reversed(self.lengths), before, strict=False) if sent < part_bytes)


def weigh(
    stages: Sequence[Any],
    num_microbatches: int,
    forward: Callable[[Any, int], Ran],
    device: torch.device,
    minimum_bytes: int,
) -> list[StageSizes]:
    """Return the sizes of each of these stages, of which `forward(stage, microbatch)` runs one forward."""
    ordered = sorted(stages, key=lambda stage: int(stage.stage_index))
    with _unseen(ordered, device):
        return [_weighed(stage, num_microbatches, forward, device, minimum_bytes) for stage in ordered]


def _weighed(
    stage: Any, num_microbatches: int, forward: Callable[[Any, int], Ran], device: torch.device, minimum_bytes: int
) -> StageSizes:
    index, claims = int(stage.stage_index), Claims()
    alive: list[Ran] = []
    saved_bytes = 0
    lengths: tuple[int, ...] = ()
    for microbatch in range(min(_MICROBATCHES, num_microbatches)):
        outputs, received = forward(stage, microbatch)
        saved = find([output.grad_fn for output in outputs], received, device)
        claimed = claims.claim([item.storage for item in saved], microbatch)
        own = [item for item in compress(saved, claimed) if item.alone]
        passed_on = {output.untyped_storage()._cdata for output in plain_tensors(outputs)}
        movable = [item for item in own if item.nbytes >= minimum_bytes and item.storage._cdata not in passed_on]
        saved_bytes, lengths = sum(item.nbytes for item in own), tuple(item.nbytes for item in movable)
        # What both saved is known only while both are there.
        alive.append((outputs, received))
        del saved, own, movable
    return sizes_of(index, saved_bytes, lengths)


def sizes_of(stage: int, saved_bytes: int, lengths: Sequence[int]) -> StageSizes:
    """Return the sizes of a stage whose micro-batches save these bytes, in storages of these lengths that can leave."""
    sizing = Sizing(differing=False)
    sizing.first(stage, tuple(lengths))
    return StageSizes(stage, saved_bytes, tuple(lengths), sizing.parts()[stage] or (0,))


def everywhere(local: Sequence[StageSizes]) -> dict[int, StageSizes]:
    """Return the largest sizes of each stage that any rank has measured. Collective over the world."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(local))
    ascending = sorted(
        (sizes for of_rank in gathered for sizes in of_rank), key=lambda sizes: (sizes.saved_bytes, sizes.lengths)
    )
    return {sizes.stage: sizes for sizes in ascending}


@contextmanager
def _unseen(stages: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Restore the random numbers and buffers that forwards change."""
    buffers = [(buffer, buffer.detach().clone()) for stage in stages for buffer in stage.submod.buffers()]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for stage in stages:
            stage.clear_runtime_states()
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
