"""Weigh what a forward of each stage saves and how much of it may leave, before a first step.

In: this rank's stages, and what runs one forward of one of them. Out: bytes by stage. Nothing is trained by it: random
numbers, buffers and gathered parameters are as before. Knows no schedule.

Torch's own handshake runs forwards and backwards of the stages, too, to learn shapes, and puts the same back.
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
from bpipe.torch.upstream import receive_zeros

# Of the first micro-batch what all share may be taken for its own.
_MICROBATCHES = 2

# What a forward made, the roots of its graph, and what the stage received for it.
Ran = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class StageSizes:
    """One micro-batch of a stage: what its forward saves, and the lengths of the storages that may leave, in the order
    of the walk. `parts`: bytes that may leave in place of all, ascending, the last is all."""

    stage: int
    saved_bytes: int
    lengths: tuple[int, ...]
    parts: tuple[int, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that may leave."""
        return sum(self.lengths)

    def lengths_of(self, part_bytes: int) -> tuple[int, ...]:
        """Return the storages that leave where a part does: from the end of the walk, as many as hold it."""
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
        found = find([output.grad_fn for output in outputs], received, device)
        mine = claims.claim([item.storage for item in found], microbatch)
        own = [item for item in compress(found, mine) if item.alone]
        given = {output.untyped_storage()._cdata for output in plain_tensors(outputs)}
        leaves = [item for item in own if item.nbytes >= minimum_bytes and item.storage._cdata not in given]
        saved_bytes, lengths = sum(item.nbytes for item in own), tuple(item.nbytes for item in leaves)
        # What both saved is known only while both are there.
        alive.append((outputs, received))
        del found, own, leaves
    return sizes_of(index, saved_bytes, lengths)


def sizes_of(stage: int, saved_bytes: int, lengths: Sequence[int]) -> StageSizes:
    """Return the sizes of a stage that saves so much, in storages of these lengths that may leave."""
    sizing = Sizing(differing=False)
    sizing.first(stage, tuple(lengths))
    return StageSizes(stage, saved_bytes, tuple(lengths), sizing.parts()[stage] or (0,))


def clear_received(stage: Any, microbatch: int, stages: Sequence[Any]) -> None:
    """Fill with zeros what a stage receives from another rank, for a forward that nobody has sent it anything for."""
    if stage.is_first or any(each.stage_index == stage.stage_index - 1 for each in stages):
        return
    receive_zeros(stage, microbatch)


def hand_over(output: Any, made_by: int, microbatch: int, stages: Sequence[Any]) -> None:
    """Give what a stage made to the next one, where that is on this rank, too."""
    for stage in stages:
        if stage.stage_index == made_by + 1:
            stage.set_local_fwd_input(output, microbatch)


def everywhere(mine: Sequence[StageSizes]) -> dict[int, StageSizes]:
    """Return the sizes of all stages, of each the largest that any rank has weighed. Collective over the world."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(mine))
    every = sorted((each for of_rank in found for each in of_rank), key=lambda each: (each.saved_bytes, each.lengths))
    return {each.stage: each for each in every}


@contextmanager
def _unseen(stages: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Put back what forwards change besides their graphs."""
    buffers = [(each, each.detach().clone()) for stage in stages for each in stage.submod.buffers()]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for each, before in buffers:
                each.copy_(before)
        for stage in stages:
            stage.clear_runtime_states()
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
