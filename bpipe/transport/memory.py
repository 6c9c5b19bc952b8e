"""Memory that an evictor's copies can reach without the acceptor's help: shared by two processes, or its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from bpipe.transport.device_memory import Device, Piece, pinned_memory


class Region(Protocol):
    """A piece of memory to copy into and from.

    The calls only start their copies if the current stream is a device's.
    """

    def write(self, pieces: Iterable[Piece]) -> None:
        """Copy each contiguous uint8 tensor to its offset in bytes from the region's start; none overlaps another."""

    def read(self, pieces: Iterable[Piece]) -> None:
        """Copy into all of each tensor from its offset."""

    def close(self) -> None:
        """Wait for the copies that are under way, then free the memory."""

    def abandon(self) -> None:
        """Forget the region after an error, without waiting for the device or freeing what a copy may still reach."""


class Lender(Protocol):
    """The two ends of memory that one process makes and another reaches into."""

    def make(self, nbytes: int) -> tuple[Any, Region]:
        """Make memory on the acceptor, and a JSON value by which the partner opens it.

        The memory lives until the region is closed.
        """

    def open(self, handle: Any) -> Region:
        """Open the partner's memory on the evictor. Raises OSError or RuntimeError if it cannot be reached."""


class TensorRegion:
    """A flat uint8 tensor. Whoever is copying holds it too."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def write(self, pieces: Iterable[Piece]) -> None:
        for offset, source in pieces:
            _copy(self._tensor.narrow(0, offset, source.numel()), source)

    def read(self, pieces: Iterable[Piece]) -> None:
        for offset, target in pieces:
            _copy(target, self._tensor.narrow(0, offset, target.numel()))

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def abandon(self) -> None:
        self.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    on_cpu = target.device.type == source.device.type == "cpu"
    if on_cpu and not any(
        value % _WORD_BYTES for value in (source.numel(), source.storage_offset(), target.storage_offset())
    ):
        # torch copies bytes one by one; as words the same memory takes a fifth less time (8.3 to 9.8 GB/s on an EPYC of
        # 2 cores).
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source, non_blocking=True)


_WORD_BYTES = 8


def own_memory(nbytes: int, device: Device) -> Region:
    """Return this process's own host memory, pinned if the device's copy engines need that."""
    return pinned_memory(nbytes, device) if device.has_runtime else TensorRegion(torch.empty(nbytes, dtype=torch.uint8))


class SharedMemory:
    """Memory shared by two processes on one machine.

    It has no name: the partner opens it through the maker's file descriptor. So nothing can be left in /dev/shm,
    however either process ends, and the size of /dev/shm, which is 64 MB in most containers, is no limit.
    """

    def make(self, nbytes: int) -> tuple[Any, Region]:
        descriptor = os.memfd_create("bpipe")
        os.ftruncate(descriptor, max(nbytes, 1))
        region = _Mapped(descriptor, nbytes)
        # Pages come with their first use: better here than in the first iteration.
        region._tensor.zero_()
        return {"process": os.getpid(), "descriptor": descriptor, "nbytes": nbytes}, region

    def open(self, handle: Any) -> Region:
        return _Mapped(
            os.open(f"/proc/{handle['process']}/fd/{handle['descriptor']}", os.O_RDWR | os.O_CLOEXEC), handle["nbytes"]
        )


class _Mapped(TensorRegion):
    """A mapping of a descriptor, which it owns."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        # The tensor keeps the mapping alive, the mapping the memory.
        super().__init__(torch.frombuffer(mmap.mmap(descriptor, max(nbytes, 1)), dtype=torch.uint8))

    def close(self) -> None:
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
