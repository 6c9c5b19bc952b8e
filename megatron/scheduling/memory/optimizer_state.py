"""Let the moments of one rank's optimizer wait on another rank while micro-batches are computed.

In: who keeps how much for whom, and Megatron's training step. Out: the same step, before whose computations the moments
leave, and before whose update they come back. They are the same bytes, so nothing is computed differently. Whoever
reads the optimizer between two steps (a checkpoint, an evaluation) finds all of it at home; in between what is away is
missing from its state, so that reading it is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bpipe.flags.budgets import HostedState
from bpipe.models.cluster import GIB
from bpipe.plan.state_hosts import FLAG
from megatron.scheduling.hooks import patches
from megatron.scheduling.report.log import say


@dataclass(slots=True)
class _Part:
    """One tensor of an optimizer's state: whose, by what name, and the tensor itself."""

    of_parameter: dict[str, Any]
    name: str
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@dataclass(slots=True)
class _Waiting:
    """One move: on the giver `parts`, on the host `kept`, buffers of the same sizes.

    Both are chosen once, when there is state.
    """

    move: HostedState
    parts: list[_Part] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)


class OptimizerState:
    """Sends this rank's moments to its hosts, or keeps others', once an iteration."""

    def __init__(self, moves: Sequence[HostedState]) -> None:
        self._stays = [_Waiting(move) for move in moves]
        self._group: Any = None
        self._device = torch.device("cpu")
        self._optimizer: Any = None
        self._is_away = False

    def wraps(self, others: Mapping[patches.Patch, patches.Wrap]) -> dict[patches.Patch, patches.Wrap]:
        """Return Megatron's training step, around whoever else observes it."""
        return patches.around(others, patches.TRAIN_STEP, patches.by_name(self._step))

    def _step(self, given: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        self._watch(given["optimizer"], given["model"])
        self._leave()
        return run()

    def _watch(self, optimizer: Any, model: Sequence[torch.nn.Module]) -> None:
        """Bring everything back before this optimizer's update."""
        if self._optimizer is optimizer:
            return
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self._device = next(parameter.device for chunk in model for parameter in chunk.parameters())
        self._optimizer, update = optimizer, optimizer.step

        @functools.wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            self._return()
            return update(*args, **kwargs)

        optimizer.step = updated

    def _mine(self) -> Iterator[tuple[_Waiting, bool, int]]:
        """Stays that this rank has a part in, in one order on all ranks: whether it gives, and the other's rank in
        the world."""
        me = dist.get_rank(self._group)
        for stay in self._stays:
            if me in (stay.move.giver, stay.move.host):
                gives = stay.move.giver == me
                yield stay, gives, dist.get_global_rank(self._group, stay.move.host if gives else stay.move.giver)

    @torch.no_grad()
    def _leave(self) -> None:
        for stay, gives, other in self._mine():
            if gives:
                if not stay.parts:
                    self._choose(stay, other)
                for part in stay.parts:
                    dist.send(_bytes(part.tensor), other, group=self._group)
                    del part.of_parameter[part.name]
                    # On a device: the stream that the memory belongs to waits for the send, so whoever gets it next
                    # comes behind.
                    part.tensor.untyped_storage().resize_(0)
            else:
                if not stay.kept:
                    stay.kept = self._room(stay, other)
                for kept in stay.kept:
                    dist.recv(kept, other, group=self._group)
        self._is_away = True

    @torch.no_grad()
    def _return(self) -> None:
        if not self._is_away:
            return
        for stay, _, other in self._mine():
            for part in stay.parts:
                part.tensor.untyped_storage().resize_(part.tensor.nbytes)
                dist.recv(_bytes(part.tensor), other, group=self._group)
                part.of_parameter[part.name] = part.tensor
            for kept in stay.kept:
                dist.send(kept, other, group=self._group)
        self._is_away = False

    def _choose(self, stay: _Waiting, host: int) -> None:
        """What leaves, and tell the host how much each is: nothing before the first update, for which there is no state
        yet.

        Raises ValueError where there is less than is to leave, on both.
        """
        taken = {id(part.tensor) for other in self._stays for part in other.parts}
        free = sorted(
            (part for part in moments(self._optimizer) if id(part.tensor) not in taken),
            key=lambda part: -part.num_bytes,
        )
        if not free:
            self._tell([0], host)
            return
        most, left = sum(part.num_bytes for part in free), stay.move.num_bytes
        if most < left:
            self._tell([-1], host)
            raise ValueError(f"{_asked(stay.move)}, but only {most / GIB:.3f} GiB can move: give that or less")
        kept: list[_Part] = []
        for part in free:
            if part.num_bytes <= left:
                stay.parts.append(part)
                left -= part.num_bytes
            else:
                kept.append(part)
        if left:
            # What is left is less than any of these.
            stay.parts.append(kept[-1])
        self._tell([len(stay.parts)], host)
        self._tell([part.num_bytes for part in stay.parts], host)
        waiting = sum(part.num_bytes for part in stay.parts) / GIB
        say(
            f"optimizer: {waiting:.6f} GiB of rank {stay.move.giver}'s moments wait on rank {stay.move.host}",
            everywhere=True,
        )

    def _room(self, stay: _Waiting, giver: int) -> list[torch.Tensor]:
        """Buffers for what the giver has chosen. Raises ValueError where it has not enough."""
        (count,) = self._told(1, giver)
        if count < 0:
            raise ValueError(f"{_asked(stay.move)}, but it has less: that rank's error says how much")
        sizes = self._told(count, giver) if count else []
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def _tell(self, numbers: list[int], other: int) -> None:
        dist.send(torch.tensor(numbers, dtype=torch.int64, device=self._device), other, group=self._group)

    def _told(self, count: int, other: int) -> list[int]:
        numbers = torch.zeros(count, dtype=torch.int64, device=self._device)
        dist.recv(numbers, other, group=self._group)
        return [int(number) for number in numbers.tolist()]


def _asked(move: HostedState) -> str:
    return (
        f"{FLAG} {move.giver}:{move.host}: {move.num_bytes / GIB:.3f} GiB of rank {move.giver}'s moments are to "
        f"wait on rank {move.host}"
    )


def moments(optimizer: Any) -> Iterator[_Part]:
    """Yield tensors of the state as large as their parameter, with memory of their own.

    Weights are left out: others read them.
    """
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        for parameter, state in getattr(part, "optimizer", part).state.items():
            for name, value in state.items():
                if not isinstance(value, torch.Tensor) or value.numel() != parameter.numel() or value.numel() == 1:
                    continue
                if value.untyped_storage().nbytes() == value.nbytes and value.is_contiguous():
                    yield _Part(state, name, value)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
