"""Memory an evictor's copies can reach, without the acceptor's help, where there is no GPU; and its own memory,
anywhere.

In: a size, or a handle another process gave. Out: a `Region` to copy into and from. Knows no host buffers and no
schedule.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from bpipe.transport.device import Device
from bpipe.transport.device_memory import Piece, pinned_memory


class Region(Protocol):
    """A piece of memory to copy into and from.

    The calls only start their copies where the current stream is a device's.
    """

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy all of `source`, contiguous uint8, to `offset` bytes from the region's start."""

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Copy into all of `target` from `offset`."""

    def write_all(self, pieces: Iterable[Piece]) -> None:
        """Write each of these tensors at its offset; none overlaps another."""
        for offset, source in pieces:
            self.write(offset, source)

    def read_all(self, pieces: Iterable[Piece]) -> None:
        """Read each of these tensors from its offset."""
        for offset, target in pieces:
            self.read(offset, target)

    def close(self) -> None:
        """Let go of it in good order: wait for the copies that are under way, then free it."""

    def abandon(self) -> None:
        """Forget the region after an error, without waiting for the device or freeing what a copy may still reach."""


class Lender(Protocol):
    """The two ends of memory that one process makes and another reaches into."""

    def make(self, nbytes: int) -> tuple[Any, Region]:
        """Make memory on the acceptor, and a JSON value by which the partner opens it.

        The memory lives until the region is closed.
        """

    def open(self, handle: Any) -> Region:
        """Open the partner's memory on the evictor. Raises OSError or RuntimeError where it cannot be reached."""


class TensorRegion(Region):
    """A flat uint8 tensor. Whoever is copying holds it too."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def write(self, offset: int, source: torch.Tensor) -> None:
        _copy(self._tensor.narrow(0, offset, source.numel()), source)

    def read(self, offset: int, target: torch.Tensor) -> None:
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
    """Return this process's own host memory, as the device needs it."""
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
        region.touch()
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

    def touch(self) -> None:
        self._tensor.zero_()

    def close(self) -> None:
        super().close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
