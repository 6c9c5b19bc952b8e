"""Carry bytes by `torch.distributed` point-to-point operations, NCCL and gloo by the same calls.

In: pairs of ranks. Out: one two-sided transport a rank. Knows no schedule.

Every pair has two process groups, one per direction of the data, made eagerly by all ranks in one order and used once before the first
step. A communicator runs its operations in issue order, and both ends issue from one program, so within a direction they match by
order alone; there are no tags, which would hide an order that differs. Two directions in one communicator would wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# NCCL opens at most this many point-to-point operations in one group call; more must be split, on both ends alike.
MAX_BATCHED_OPERATIONS = 512


class Works:
    """The operations of one transfer; `buffers` keeps what they read or write alive until they are waited for."""

    def __init__(self, works: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        self._works = list(works)
        self._buffers = list(buffers)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._buffers = [], []

    def __add__(self, later: Works) -> Works:
        return Works([*self._works, *later._works], [*self._buffers, *later._buffers])


@dataclass(frozen=True)
class PairGroups:
    """This rank's two groups with its partner (a global rank)."""

    partner: int
    sending: dist.ProcessGroup
    receiving: dist.ProcessGroup


def connect(pairs: Sequence[tuple[int, int]], backend: str, timeout_s: float, device: torch.device) -> PairGroups | None:
    """Make the groups of all pairs; returns this rank's, or None where it is in no pair.

    `pairs` are (low, high) global ranks and must be equal on every rank of the world: making a group is collective. Then every pair
    exchanges one byte in each direction, so that a network that does not connect fails here and not in the middle of a step.
    """
    rank = dist.get_rank()
    mine: PairGroups | None = None
    for low, high in pairs:
        upward, downward = (
            _new_group([low, high], timedelta(seconds=timeout_s), backend, f"BPIPE_{name}_{low}_{high}") for name in ("UP", "DOWN")
        )
        if rank == low:
            mine = PairGroups(high, upward, downward)
        elif rank == high:
            mine = PairGroups(low, downward, upward)
    if mine is not None:
        _warm_up(mine, rank < mine.partner, device)
    return mine


def _new_group(ranks: list[int], timeout: timedelta, backend: str, name: str) -> dist.ProcessGroup:
    # Ranks outside a group get a constant that says so; they never use it.
    return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=timeout, backend=backend, group_desc=name))


def _warm_up(groups: PairGroups, low: bool, device: torch.device) -> None:
    """One byte each way, upward first on both ends."""
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    send, receive = (dist.isend, byte, groups.sending), (dist.irecv, torch.empty_like(byte), groups.receiving)
    for operation, tensor, group in (send, receive) if low else (receive, send):
        _batched(operation, [tensor], groups.partner, group).wait()


def _batched(operation: Any, buffers: Sequence[torch.Tensor], partner: int, group: dist.ProcessGroup) -> Works:
    """One operation a buffer, in order, in as few group calls as NCCL allows."""
    works: list[Any] = []
    for start in range(0, len(buffers), MAX_BATCHED_OPERATIONS):
        part = buffers[start : start + MAX_BATCHED_OPERATIONS]
        works.extend(dist.batch_isend_irecv([dist.P2POp(operation, buffer, partner, group) for buffer in part]))
    return Works(works, buffers)


class Distributed:
    """The two-sided transport: what one end puts, the other must host."""

    def __init__(self, groups: PairGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device

    def _send(self, buffers: Sequence[torch.Tensor]) -> Works:
        return _batched(dist.isend, buffers, self._groups.partner, self._groups.sending)

    def _receive(self, buffers: Sequence[torch.Tensor]) -> Works:
        return _batched(dist.irecv, buffers, self._groups.partner, self._groups.receiving)

    def announce(self, sizes: Mapping[int, Sequence[int]]) -> Works:
        message = torch.tensor([n for stage, lengths in sizes.items() for n in (stage, len(lengths), *lengths)], dtype=torch.int64)
        # Two calls, as the other end receives them: NCCL hangs where one end groups what the other does not.
        count = self._send([torch.tensor([len(message)], dtype=torch.int64, device=self._device)])
        return count + self._send([message.to(self._device)])

    def learn(self) -> dict[int, tuple[int, ...]]:
        count = torch.empty(1, dtype=torch.int64, device=self._device)
        self._receive([count]).wait()
        message = torch.empty(int(count.item()), dtype=torch.int64, device=self._device)
        self._receive([message]).wait()
        numbers = iter(message.tolist())
        return {stage: tuple(itertools.islice(numbers, next(numbers))) for stage in numbers}

    def put(self, slot: int, buffers: Sequence[torch.Tensor]) -> Works:
        return self._send(buffers)

    def get(self, slot: int, buffers: Sequence[torch.Tensor]) -> Works:
        return self._receive(buffers)

    def host(self, slot: int, buffers: Sequence[torch.Tensor]) -> Works:
        return self._receive(buffers)

    def give_back(self, slot: int, buffers: Sequence[torch.Tensor]) -> Works:
        return self._send(buffers)
