"""Memory that a GPU's copy engines reach: another process's on a GPU, opened through CUDA's IPC handles, and a host's with locked pages.

In: a size, or a handle another process gave. Out: a `Region`. Knows no slots and no schedule.

Outside torch's allocator on purpose: the memory lives as long as the run, so it must not pin a block of the allocator's, and memory of
expandable segments has no IPC handle (pytorch/pytorch 165685). The evictor opens a handle with its own device current, so that the
copies run on its own streams and no context is made on the partner's device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def _runtime() -> Any:
    # Not at the top: torch's CUDA builds bring it, a build without CUDA does not.
    from cuda.bindings import runtime

    return runtime


def _checked(call: str, *arguments: Any) -> Any:
    """Call the CUDA runtime. Raises RuntimeError naming the call and CUDA's error."""
    status, *results = getattr(_runtime(), call)(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{call} failed: {status.name}")
    return results[0] if results else None


class DeviceRegion:
    """Device memory by address. Copies are issued to the stream that is current, which `stream` returns as a number."""

    def __init__(self, address: int, nbytes: int, stream: Callable[[], int], close: Callable[[], None]) -> None:
        self._address = address
        self._nbytes = nbytes
        self._stream = stream
        self._close = close

    def write(self, offset: int, source: torch.Tensor) -> None:
        self._copy(self._address + offset, source.data_ptr(), offset, source.numel())

    def read(self, offset: int, target: torch.Tensor) -> None:
        self._copy(target.data_ptr(), self._address + offset, offset, target.numel())

    def close(self) -> None:
        # A transfer's wait orders streams, it does not stop the host: copies may be under way, and what unmapping does to them is not said.
        _checked("cudaDeviceSynchronize")
        self._close()

    def _copy(self, to: int, source: int, offset: int, nbytes: int) -> None:
        assert 0 <= offset <= offset + nbytes <= self._nbytes, f"{nbytes} bytes at {offset} of a region of {self._nbytes}"
        kind = _runtime().cudaMemcpyKind.cudaMemcpyDefault
        _checked("cudaMemcpyAsync", to, source, nbytes, kind, self._stream())


class DeviceMemory:
    """Memory of the current device, lent to another process on the same machine; also between two processes on one device."""

    def __init__(self, stream: Callable[[], int]) -> None:
        self._stream = stream

    def make(self, nbytes: int) -> tuple[Any, DeviceRegion]:
        # A handle opens the whole block an allocation lies in. Whole blocks share theirs with nobody.
        address = int(_checked("cudaMalloc", -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES))
        region = DeviceRegion(address, nbytes, self._stream, lambda: _checked("cudaFree", address))
        try:
            handle = _checked("cudaIpcGetMemHandle", address)
        except RuntimeError:
            # Nobody else will ever have it: where IPC is not allowed, another transport takes over and needs the room.
            region.close()
            raise
        return {"handle": ctypes.string_at(handle.getPtr(), _HANDLE_BYTES).hex(), "nbytes": nbytes}, region

    def open(self, handle: Any) -> DeviceRegion:
        runtime = _runtime()
        opened = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opened.getPtr(), bytes.fromhex(handle["handle"]), _HANDLE_BYTES)
        address = int(_checked("cudaIpcOpenMemHandle", opened, runtime.cudaIpcMemLazyEnablePeerAccess))
        return DeviceRegion(address, handle["nbytes"], self._stream, lambda: _checked("cudaIpcCloseMemHandle", address))


def lock_pages(tensor: torch.Tensor) -> Callable[[], None]:
    """Lock a host tensor's pages for a device's copies. Returns what unlocks them, once the copies under way have ended."""
    address = tensor.data_ptr()
    _checked("cudaHostRegister", address, tensor.numel(), _runtime().cudaHostRegisterDefault)

    def unlock() -> None:
        _checked("cudaDeviceSynchronize")
        _checked("cudaHostUnregister", address)

    return unlock


# CUDA_IPC_HANDLE_SIZE of CUDA's headers.
_HANDLE_BYTES = 64
# CUDA's programming guide, interprocess communication: share only allocations that are multiples of this.
_BLOCK_BYTES = 2 << 20
