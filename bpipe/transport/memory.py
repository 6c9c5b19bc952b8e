"""Memory that an evictor's copies can reach without the acceptor's help, shared by two processes or its own, and the
layout of host buffers in it.

On a GPU it is memory that copy engines reach: another process's, opened through CUDA's IPC handles, or a host's with
locked pages. It lies outside torch's allocator on purpose: the memory lives as long as the run, so it must not pin a
block of the allocator's, and memory of expandable segments has no IPC handle (pytorch/pytorch 165685). The evictor
opens a handle with its own device current, so that the copies run on its own streams and no context is made on the
partner's device.

Both ends of a pair make room at the same transfers, from the same schedule and sizes, so no layout is ever sent. A stage's
size is known from its first forward on, and its micro-batches may leave before another stage has run at all. So when one
comes for which there is no room, a further piece of memory is added, with room for every buffer that has none yet, as far
as sizes are known. A buffer that has room stays where it is, even if it is too small by now, because it may hold something.
Mostly all sizes are known by the first micro-batch, and one piece holds all.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from bpipe.transport.cuda_runtime import OUT_OF_MEMORY, CudaError
from bpipe.transport.streams import Device

# An offset in bytes from a region's start, and the tensor to copy.
Piece = tuple[int, torch.Tensor]

# CUDA's programming guide, interprocess communication: share only allocations that are multiples of this.
_BLOCK_BYTES = 2 << 20

_abandoned: list[DeviceRegion] = []


class TensorRegion:
    """A flat uint8 tensor to copy into and from. Whoever is copying holds it too."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def write(self, pieces: Iterable[Piece]) -> None:
        """Copy each contiguous uint8 tensor to its offset in bytes from the region's start; none overlaps another."""
        for offset, source in pieces:
            _copy(self._tensor.narrow(0, offset, source.numel()), source)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Copy into all of each tensor from its offset."""
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


class SharedMemory:
    """Memory shared by two processes on one machine.

    It has no name: the partner opens it through the maker's file descriptor. So nothing can be left in /dev/shm,
    however either process ends, and the size of /dev/shm, which is 64 MB in most containers, is no limit.
    """

    def make(self, nbytes: int) -> tuple[Any, TensorRegion]:
        """Make memory on the acceptor, and a JSON value by which the partner opens it.

        The memory lives until the region is closed.
        """
        descriptor = os.memfd_create("bpipe")
        os.ftruncate(descriptor, max(nbytes, 1))
        region = _Mapped(descriptor, nbytes)
        # Pages come with their first use: better here than in the first iteration.
        region._tensor.zero_()
        return {"process": os.getpid(), "descriptor": descriptor, "nbytes": nbytes}, region

    def open(self, handle: Any) -> TensorRegion:
        """Open the partner's memory on the evictor. Raises OSError if it cannot be reached."""
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


class DeviceRegion:
    """Memory by address. Copies are only started, on the current stream. `owner` keeps a host's memory alive."""

    def __init__(
        self, address: int, nbytes: int, device: Device, close: Callable[[int], None], owner: torch.Tensor | None = None
    ) -> None:
        self._address = address
        self._nbytes = nbytes
        self._device = device
        self._close = close
        self._owner = owner

    def write(self, pieces: Iterable[Piece]) -> None:
        copies = [(piece.data_ptr(), self._at(offset, piece), piece.numel()) for offset, piece in pieces]
        self._device.runtime.copy(copies, self._device.current_stream())

    def read(self, pieces: Iterable[Piece]) -> None:
        copies = [(self._at(offset, piece), piece.data_ptr(), piece.numel()) for offset, piece in pieces]
        self._device.runtime.copy(copies, self._device.current_stream())

    def _at(self, offset: int, piece: torch.Tensor) -> int:
        nbytes = piece.numel()
        assert 0 <= offset <= offset + nbytes <= self._nbytes, (
            f"{nbytes} bytes at {offset} of a region of {self._nbytes}"
        )
        return self._address + offset

    def close(self) -> None:
        """Wait for the copies that are under way, then free the memory."""
        # A transfer's wait orders streams and does not stop the host: copies may be under way, and CUDA does not say
        # what unmapping does to them.
        self._device.make_current().synchronize()
        self._close(self._address)

    def abandon(self) -> None:
        """Forget the region after an error, without waiting for the device or freeing what a copy may still reach."""
        # A kernel on the device may wait for a partner that is gone, and the partner may be copying. The end of the
        # process gives everything back, in whatever state it is.
        _abandoned.append(self)


class DeviceMemory:
    """Memory of a device, lent to another process on the same machine; also between two processes on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def make(self, nbytes: int) -> tuple[Any, DeviceRegion]:
        runtime = self._device.make_current()
        # A handle opens the whole block an allocation lies in. Whole blocks share theirs with nobody.
        address = self._allocate(-(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES)
        try:
            handle = runtime.handle_of(address)
        except CudaError:
            # If IPC is not allowed, another transport takes over and needs the room.
            runtime.free(address)
            raise
        return {"handle": handle.hex(), "nbytes": nbytes}, DeviceRegion(address, nbytes, self._device, runtime.free)

    def open(self, handle: Any) -> DeviceRegion:
        runtime = self._device.make_current()
        address = runtime.open_handle(bytes.fromhex(handle["handle"]))
        return DeviceRegion(address, handle["nbytes"], self._device, runtime.close_handle)

    def _allocate(self, nbytes: int) -> int:
        """Allocate from the driver, if needed after torch's allocator has given back what it does not use."""
        runtime = self._device.runtime
        try:
            return runtime.allocate(nbytes)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
        self._device.empty_cache()
        try:
            return runtime.allocate(nbytes)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            free, total = runtime.memory()
            raise RuntimeError(
                f"the partner's host buffers need {_gib(nbytes)} of {self._device.device}, which has {_gib(free)} of "
                f"{_gib(total)} free after torch released unused memory ({error}). Make this stage hold less (a "
                "smaller --micro-batch-size, recomputation), or keep the buffers in CPU memory: --bpipe-transport "
                "host"
            ) from error


def pinned_memory(nbytes: int, device: Device) -> DeviceRegion:
    """Return this process's own host memory, whose pages stay where they are, so that the device copies to and from it
    by itself.

    Locked by hand and not by torch's allocator of pinned memory, which rounds up to a power of two: 9 GiB of host
    buffers would take 16.
    """
    runtime, memory = device.make_current(), torch.empty(nbytes, dtype=torch.uint8)
    runtime.lock(memory.data_ptr(), nbytes)
    return DeviceRegion(memory.data_ptr(), nbytes, device, runtime.unlock, memory)


Region = TensorRegion | DeviceRegion
# The two ends of memory that one process makes and another reaches into.
Lender = SharedMemory | DeviceMemory


def own_memory(nbytes: int, device: Device) -> Region:
    """Return this process's own host memory, pinned if the device's copy engines need that."""
    return pinned_memory(nbytes, device) if device.has_runtime else TensorRegion(torch.empty(nbytes, dtype=torch.uint8))


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.4g} GiB"


# Storages start on the boundary that copy engines and vector loads like best. The rest of a last block never moves.
ALIGNMENT_BYTES = 512

# By stage, the lengths in bytes of the storages that one of its micro-batches moves.
Sizes = Mapping[int, tuple[int, ...]]


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.lru_cache(maxsize=256)
def allocated_bytes(lengths: tuple[int, ...]) -> int:
    """Return the bytes that storages of these lengths take in a host buffer.

    Cached, because every eviction asks on the main thread, and micro-batches of a stage are alike.
    """
    return sum(map(aligned, lengths))


def offsets(lengths: Iterable[int], start: int = 0) -> list[int]:
    """Return the offset of each storage of these lengths, one after another from `start`."""
    return list(itertools.accumulate(map(aligned, lengths), initial=start))[:-1]


class _Room(NamedTuple):
    """A host buffer's room: the index of the piece of memory, the first byte in it, and the length."""

    piece: int
    start: int
    nbytes: int


class BufferLayout:
    """Layout of host buffers; `stages_in_buffers` are the stages that each of them hosts.

    `pieces` are the bytes of every piece of memory, in the order in which they were needed.
    """

    def __init__(self, stages_in_buffers: Sequence[Iterable[int]]) -> None:
        self._stages_in_buffers = [tuple(stages) for stages in stages_in_buffers]
        self._rooms: dict[int, _Room] = {}
        self.pieces: list[int] = []

    @staticmethod
    def of(stages_in_buffers: Sequence[Iterable[int]], sizes: Sizes) -> BufferLayout:
        """Return a layout for known sizes: one piece, in which each buffer is as large as the largest of the stages
        it hosts."""
        layout = BufferLayout(stages_in_buffers)
        layout._add_piece(sizes)
        return layout

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self.pieces)

    @property
    def num_buffers(self) -> int:
        """Number of host buffers for which there is memory so far."""
        return len(self._rooms)

    def make_room(self, host_buffer: int, stage: int, sizes: Sizes) -> int:
        """Make room for a micro-batch of `stage` in the buffer, which is empty.

        Return the bytes of a new piece, or 0 if there is room.
        """
        room = self._rooms.get(host_buffer)
        if allocated_bytes(sizes[stage]) <= (room.nbytes if room else 0):
            return 0
        self._rooms.pop(host_buffer, None)
        return self._add_piece(sizes)

    def _add_piece(self, sizes: Sizes) -> int:
        """Add a piece for all buffers that have no room."""
        nbytes = 0
        for number, stages in enumerate(self._stages_in_buffers):
            largest = max((allocated_bytes(sizes[stage]) for stage in stages if stage in sizes), default=0)
            if largest and number not in self._rooms:
                self._rooms[number] = _Room(len(self.pieces), nbytes, largest)
                nbytes += largest
        if nbytes:
            self.pieces.append(nbytes)
        return nbytes

    def place(self, host_buffer: int, lengths: Iterable[int]) -> tuple[int, list[int]]:
        """Return the buffer's piece, and the offset in it of each of a micro-batch's storages of these lengths."""
        room = self._rooms[host_buffer]
        return room.piece, offsets(lengths, room.start)

    def clear(self) -> None:
        """Forget all rooms, because the memory is freed."""
        self._rooms.clear()
        self.pieces.clear()
