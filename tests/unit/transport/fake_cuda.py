"""A CUDA runtime on this process's own memory, with C functions as `ctypes` finds them in a library.

It does to memory what the calls would do, records them, and refuses what must not happen in any order or error path.
Signatures are copied from CUDA's header a second time. It proves nothing about CUDA itself.
"""

import ctypes
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bpipe.transport import memory, streams
from bpipe.transport.cuda_runtime import CudaRuntime
from bpipe.transport.streams import Device

ADDRESS, SIZE, INT, UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
TOTAL_BYTES = 80 << 30


class Error(enum.IntEnum):
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205


# Like a library's strings, they live as long as the process.
NAMES = {error.value: ctypes.create_string_buffer(error.name.encode()) for error in Error}


class Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * 64),)


class Attributes(ctypes.Structure):
    """Six numbers: the access order of the source, two locations (type and number each), flags."""

    _fields_ = tuple((name, INT) for name in ("order", "source_type", "source_id", "target_type", "target_id", "flags"))


def c_function(*types: Any) -> Callable[[Any], Any]:
    def mark(method: Any) -> Any:
        method.types = types
        return method

    return mark


def _write(pointer: int, kind: Any, value: int) -> None:
    ctypes.cast(pointer, ctypes.POINTER(kind))[0] = value


def _read(pointer: int, kind: Any, number: int) -> list[int]:
    return list(ctypes.cast(pointer, ctypes.POINTER(kind))[:number])


class FakeCuda:
    """What the calls do. `library` offers them as C functions."""

    def __init__(self, version: int = 13000, driver: int = 13000) -> None:
        self.version = version
        self.driver = driver
        self.calls: list[str] = []
        self.allocated: dict[int, Any] = {}
        self.opened: list[int] = []
        self.locked: dict[int, int] = {}
        self.streams: list[int] = []
        self.batches: list[int] = []
        self.devices: dict[str, int] = {}
        self.current_device = 0
        self.last_error = 0
        self.under_way = self.captures = False
        self.cached_bytes = 0
        self.free_bytes = TOTAL_BYTES
        self.failing: dict[str, int] = {}

    @property
    def library(self) -> Any:
        functions = {}
        for name in dir(type(self)):
            types = getattr(getattr(self, name), "types", None) if name.startswith("cuda") else None
            if types is not None:
                functions[name] = ctypes.CFUNCTYPE(INT, *types)(self._noted(name))
        if min(self.version, 12080) == 12080:
            batch = (ADDRESS, ADDRESS, ADDRESS, SIZE, ADDRESS, ADDRESS, SIZE)
            failed = (ADDRESS,) if self.version < 13000 else ()
            functions["cudaMemcpyBatchAsync"] = ctypes.CFUNCTYPE(INT, *batch, *failed, ADDRESS)(self._batch)
        functions["cudaGetErrorName"] = ctypes.CFUNCTYPE(ADDRESS, INT)(lambda status: ctypes.addressof(NAMES[status]))
        return type("Library", (), functions)

    def _noted(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            status = self.failing.get(name, 0)
            status = status or getattr(self, name)(*arguments) or 0
            if name != "cudaGetLastError" and status:
                self.last_error = status
            return status

        return call

    @c_function(ADDRESS)
    def cudaRuntimeGetVersion(self, target: int) -> None:
        _write(target, INT, self.version)

    @c_function(ADDRESS)
    def cudaDriverGetVersion(self, target: int) -> None:
        _write(target, INT, self.driver)

    @c_function()
    def cudaGetLastError(self) -> int:
        status, self.last_error = self.last_error, 0
        return status

    @c_function(INT)
    def cudaSetDevice(self, index: int) -> None:
        self.current_device = index

    @c_function(ADDRESS, ADDRESS)
    def cudaStreamIsCapturing(self, stream: int, target: int) -> None:
        _write(target, INT, self.captures)

    @c_function()
    def cudaDeviceSynchronize(self) -> None:
        self.under_way = False

    @c_function(ADDRESS, ADDRESS)
    def cudaMemGetInfo(self, free: int, total: int) -> None:
        _write(free, SIZE, self.free_bytes)
        _write(total, SIZE, TOTAL_BYTES)

    @c_function(ADDRESS, SIZE)
    def cudaMalloc(self, target: int, nbytes: int) -> int:
        if nbytes > self.free_bytes:
            return Error.cudaErrorMemoryAllocation
        memory = (ctypes.c_ubyte * nbytes)()
        self.allocated[ctypes.addressof(memory)] = memory
        self.devices["cudaMalloc"] = self.current_device
        _write(target, SIZE, ctypes.addressof(memory))
        return 0

    @c_function(ADDRESS)
    def cudaFree(self, address: int) -> None:
        assert address not in self.opened, "freed while another process has it open"
        assert not self.under_way, "freed while a copy is under way"
        del self.allocated[address]

    @c_function(ADDRESS, ADDRESS)
    def cudaIpcGetMemHandle(self, handle: int, address: int) -> None:
        ctypes.memmove(handle, address.to_bytes(8, "little") + bytes(range(56)), 64)

    @c_function(ADDRESS, Handle, UINT)
    def cudaIpcOpenMemHandle(self, target: int, handle: Handle, flags: int) -> None:
        raw = bytes(handle.raw)
        assert flags == 1, "access to a peer is enabled with the first copy"
        assert raw[8:] == bytes(range(56)), "the handle was not carried whole"
        self.opened.append(int.from_bytes(raw[:8], "little"))
        self.devices["cudaIpcOpenMemHandle"] = self.current_device
        _write(target, SIZE, self.opened[-1])

    @c_function(ADDRESS)
    def cudaIpcCloseMemHandle(self, address: int) -> None:
        assert not self.under_way, "closed while a copy is under way"
        self.opened.remove(address)

    @c_function(ADDRESS, SIZE, UINT)
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 0
        self.locked[address] = nbytes

    @c_function(ADDRESS)
    def cudaHostUnregister(self, address: int) -> None:
        assert not self.under_way, "unlocked while a copy is under way"
        del self.locked[address]

    @c_function(ADDRESS, ADDRESS, SIZE, INT, ADDRESS)
    def cudaMemcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int | None) -> None:
        assert kind == 4, "a peer's address and one's own: only CUDA can tell which is which"
        self.streams.append(stream or 0)
        self.under_way = True
        ctypes.memmove(to, source, nbytes)

    def _batch(
        self, targets: int, sources: int, sizes: int, number: int, attributes: int, first: int, kinds: int, *rest: int
    ) -> int:
        self.calls.append("cudaMemcpyBatchAsync")
        *failed, stream = rest
        assert stream, "the default stream takes no batches"
        assert len(failed) == (self.version < 13000), "where CUDA 12 says which copy failed, CUDA 13 takes the stream"
        assert (kinds, _read(first, SIZE, 1)) == (1, [0]), "one kind of copy, from the first on"
        attribute = ctypes.cast(attributes, ctypes.POINTER(Attributes))[0]
        assert (attribute.order, attribute.flags) == (1, 1), (
            "sources are read in the stream's order, beside what computes"
        )
        self.under_way = True
        if not self.failing.get("cudaMemcpyBatchAsync"):
            for to, source, nbytes in zip(
                _read(targets, SIZE, number), _read(sources, SIZE, number), _read(sizes, SIZE, number), strict=True
            ):
                ctypes.memmove(to, source, nbytes)
        self.batches.append(number)
        self.streams.append(stream)
        return self.failing.get("cudaMemcpyBatchAsync", 0)

    def runtime(self) -> CudaRuntime:
        return CudaRuntime(self.library)

    def empty_cache(self) -> None:
        """Release what torch's allocator caches."""
        self.calls.append("empty_cache")
        self.free_bytes += self.cached_bytes
        self.cached_bytes = 0

    def device(self, index: int = 0, stream: Callable[[], int] = lambda: 7) -> Device:
        device = Device(torch.device("cuda", index))
        device.current_stream, device.empty_cache = stream, self.empty_cache  # type: ignore[method-assign]
        return device


def installed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Make this the runtime that allocates memory."""
    runtime = cuda.runtime()
    cuda.calls.clear()
    monkeypatch.setattr(streams, "runtime", lambda device_type="cuda": runtime)
    monkeypatch.setattr(memory, "_abandoned", [])
    return cuda
