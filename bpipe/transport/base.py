"""What the engine asks of a transport. In: buffers and a slot number. Out: a `Pending` to wait for. Knows no schedule, no micro-batch.

A transport carries bytes between this rank and its partner, in both roles. The evictor puts and gets; the acceptor hosts and gives
back. A one-sided transport has nothing to do as acceptor: the evictor reaches into its slots by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Order what this rank does next behind the transfer's end (on a GPU the current stream waits, on a CPU the caller).

        Raises what the transport raises when it failed or its time ran out.
        """


class Transport(Protocol):
    """Bytes to and from one partner. Buffers are contiguous uint8 tensors; slots are numbered as on the acceptor."""

    def announce(self, sizes: Mapping[int, Sequence[int]]) -> Pending:
        """Evictor, once before the first put: how long the buffers of a micro-batch of each stage are, in bytes."""

    def learn(self) -> dict[int, tuple[int, ...]]:
        """Acceptor, once before its first slot is allocated: the evictor's sizes. Blocks until they are there."""

    def put(self, slot: int, buffers: Sequence[torch.Tensor]) -> Pending:
        """Evictor: copy the buffers into the partner's slot. They must not change or be freed before the wait."""

    def get(self, slot: int, buffers: Sequence[torch.Tensor]) -> Pending:
        """Evictor: copy the partner's slot into the buffers. They must not be read before the wait."""

    def host(self, slot: int, buffers: Sequence[torch.Tensor]) -> Pending:
        """Acceptor: take what the partner puts into this slot, whose memory is `buffers`."""

    def give_back(self, slot: int, buffers: Sequence[torch.Tensor]) -> Pending:
        """Acceptor: let the partner get this slot. The slot must not be refilled before the wait."""
