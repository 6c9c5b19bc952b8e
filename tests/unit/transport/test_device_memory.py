"""The calls by which one GPU's memory is lent and reached, against a CUDA runtime made of this process's own memory.

It shows which calls are made, with which addresses, and what becomes of their errors. It shows nothing of CUDA.
"""

from __future__ import annotations

import ctypes
import enum
import json
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bpipe.transport.device_memory import DeviceMemory
from bpipe.transport.memory import own_memory


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyDefault = 4


class Handle:
    """64 bytes that CUDA fills and reads by their address."""

    def __init__(self) -> None:
        self.raw = (ctypes.c_ubyte * 64)()

    def getPtr(self) -> int:
        return ctypes.addressof(self.raw)


class FakeRuntime(ModuleType):
    """`cuda.bindings.runtime`: every call gives its status first."""

    cudaMemcpyKind = cudaMemcpyKind
    cudaIpcMemHandle_t = Handle
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.allocated: dict[int, Any] = {}
        self.opened: list[int] = []
        self.locked: dict[int, int] = {}
        self.streams: list[int] = []
        self.under_way = False
        self.failing: dict[str, cudaError_t] = {}

    def _status(self, call: str) -> cudaError_t:
        return self.failing.get(call, cudaError_t.cudaSuccess)

    def cudaMalloc(self, nbytes: int) -> tuple[cudaError_t, int]:
        memory = (ctypes.c_ubyte * nbytes)()
        if self._status("cudaMalloc") == 0:
            self.allocated[ctypes.addressof(memory)] = memory
        return self._status("cudaMalloc"), ctypes.addressof(memory)

    cudaHostRegisterDefault = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[cudaError_t]:
        self.locked[address] = nbytes
        return (self._status("cudaHostRegister"),)

    def cudaHostUnregister(self, address: int) -> tuple[cudaError_t]:
        assert not self.under_way, "unlocked while a copy is under way"
        del self.locked[address]
        return (self._status("cudaHostUnregister"),)

    def cudaFree(self, address: int) -> tuple[cudaError_t]:
        assert address not in self.opened, "freed while another process has it open"
        assert not self.under_way, "freed while a copy is under way"
        del self.allocated[address]
        return (self._status("cudaFree"),)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[cudaError_t, Handle]:
        handle = Handle()
        ctypes.memmove(handle.getPtr(), address.to_bytes(8, "little") + bytes(range(56)), 64)
        return self._status("cudaIpcGetMemHandle"), handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[cudaError_t, int]:
        raw = bytes(handle.raw)
        assert flags == self.cudaIpcMemLazyEnablePeerAccess
        assert raw[8:] == bytes(range(56)), "the handle was not carried whole"
        address = int.from_bytes(raw[:8], "little")
        if self._status("cudaIpcOpenMemHandle") == 0:
            self.opened.append(address)
        return self._status("cudaIpcOpenMemHandle"), address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[cudaError_t]:
        assert not self.under_way, "closed while a copy is under way"
        self.opened.remove(address)
        return (self._status("cudaIpcCloseMemHandle"),)

    def cudaMemcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> tuple[cudaError_t]:
        assert kind == cudaMemcpyKind.cudaMemcpyDefault, "a peer's address and one's own: only CUDA can tell which is which"
        self.streams.append(stream)
        self.under_way = True
        if self._status("cudaMemcpyAsync") == 0:
            ctypes.memmove(to, source, nbytes)
        return (self._status("cudaMemcpyAsync"),)

    def cudaDeviceSynchronize(self) -> tuple[cudaError_t]:
        self.under_way = False
        return (self._status("cudaDeviceSynchronize"),)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime, bindings = FakeRuntime(), ModuleType("cuda.bindings")
    bindings.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    return runtime


def memory(stream: int = 7) -> DeviceMemory:
    return DeviceMemory(lambda: stream)


def numbers(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))


def test_an_opened_handle_is_the_lenders_memory(cuda: FakeRuntime) -> None:
    handle, lent = memory().make(4096)
    opened = memory().open(json.loads(json.dumps(handle)))
    sent, back = numbers(1000), torch.zeros(1000, dtype=torch.uint8)
    opened.write(96, sent)
    lent.read(96, back)
    assert torch.equal(sent, back)
    back.zero_()
    opened.read(96, back)
    assert torch.equal(sent, back)
    opened.close()
    lent.close()
    assert cuda.opened == []
    assert cuda.allocated == {}


def test_what_lies_beside_a_copy_is_not_touched(cuda: FakeRuntime) -> None:
    _, lent = memory().make(3000)
    whole = torch.full((3000,), 17, dtype=torch.uint8)
    lent.write(0, whole)
    lent.write(1000, numbers(1000))
    back = torch.zeros(3000, dtype=torch.uint8)
    lent.read(0, back)
    assert torch.equal(back[1000:2000], numbers(1000))
    assert (back[:1000] == 17).all()
    assert (back[2000:] == 17).all()


def test_copies_go_to_the_stream_that_is_current_then(cuda: FakeRuntime) -> None:
    current = [11]
    _, lent = DeviceMemory(lambda: current[0]).make(100)
    lent.write(0, numbers(100))
    current[0] = 22
    lent.read(0, numbers(100))
    assert cuda.streams == [11, 22]


def test_nothing_is_copied_beyond_the_end(cuda: FakeRuntime) -> None:
    _, lent = memory().make(100)
    with pytest.raises(AssertionError, match="50 bytes at 60 of a region of 100"):
        lent.write(60, numbers(50))
    with pytest.raises(AssertionError, match="50 bytes at 60 of a region of 100"):
        lent.read(60, numbers(50))
    assert cuda.streams == []


@pytest.mark.parametrize(("asked", "allocated"), [(1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)])
def test_what_is_lent_fills_whole_blocks(cuda: FakeRuntime, asked: int, allocated: int) -> None:
    """A handle opens the whole block of the driver's that an allocation lies in, and with it whatever else lies there."""
    _, lent = memory().make(asked)
    assert [len(piece) for piece in cuda.allocated.values()] == [allocated]
    with pytest.raises(AssertionError, match="of a region of"):
        lent.write(0, numbers(asked + 1))


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("cudaMalloc", cudaError_t.cudaErrorMemoryAllocation),
        ("cudaIpcGetMemHandle", cudaError_t.cudaErrorMapBufferObjectFailed),
        ("cudaIpcOpenMemHandle", cudaError_t.cudaErrorMapBufferObjectFailed),
        ("cudaMemcpyAsync", cudaError_t.cudaErrorMapBufferObjectFailed),
        ("cudaDeviceSynchronize", cudaError_t.cudaErrorMapBufferObjectFailed),
        ("cudaIpcCloseMemHandle", cudaError_t.cudaErrorMapBufferObjectFailed),
        ("cudaFree", cudaError_t.cudaErrorMemoryAllocation),
    ],
)
def test_an_error_of_cudas_names_the_call(cuda: FakeRuntime, call: str, error: cudaError_t) -> None:
    def one_transfer() -> None:
        handle, lent = memory().make(100)
        opened = memory().open(handle)
        opened.write(0, numbers(100))
        opened.close()
        lent.close()

    cuda.failing[call] = error
    with pytest.raises(RuntimeError, match=f"{call} failed: {error.name}"):
        one_transfer()


def test_memory_that_nobody_can_open_is_not_kept(cuda: FakeRuntime) -> None:
    """It used to stay allocated for as long as the process lived: no region owned it yet."""
    cuda.failing["cudaIpcGetMemHandle"] = cudaError_t.cudaErrorMapBufferObjectFailed
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle failed"):
        memory().make(100)
    assert cuda.allocated == {}


def test_pinned_slots_take_what_they_need_and_no_more(cuda: FakeRuntime) -> None:
    """torch's own pinned memory comes in powers of two: 9 GiB of slots would take 16."""
    region = own_memory(5000, pinned=True)
    assert list(cuda.locked.values()) == [5000]
    source = torch.arange(100, dtype=torch.uint8)
    back = torch.zeros_like(source)
    region.write(7, source)
    region.read(7, back)
    assert torch.equal(source, back)
    cuda.under_way = True
    region.close()
    assert not cuda.locked


def test_pages_that_cannot_be_locked_are_an_error(cuda: FakeRuntime) -> None:
    cuda.failing["cudaHostRegister"] = cudaError_t.cudaErrorMemoryAllocation
    with pytest.raises(RuntimeError, match="cudaHostRegister failed: cudaErrorMemoryAllocation"):
        own_memory(5000, pinned=True)
