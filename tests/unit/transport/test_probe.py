"""What a trial of a link leaves behind when it fails: nothing, since another transport takes over and needs the room."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from bpipe.transport import device_memory, probe
from bpipe.transport.device_memory import DeviceMemory
from bpipe.transport.one_sided import Peer, Reaching
from bpipe.transport.probe import measure
from tests.unit.transport.fake_cuda import Error, FakeCuda
from tests.unit.transport.loopback import AtOnce, controls


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    runtime = cuda.runtime()
    monkeypatch.setattr(device_memory, "runtime", lambda: runtime)
    monkeypatch.setattr(probe, "PROBE_BYTES", 1 << 16)
    return cuda


def tried(cuda: FakeCuda) -> list[tuple[float, str | None]]:
    """Both ends of a trial, in a thread each; the evictor's first."""
    device = replace(cuda.device(), device=torch.device("cpu"), synchronize=lambda device: None)
    found: dict[bool, tuple[float, str | None]] = {}

    def end(control: object, evictor: bool) -> None:
        transport = Reaching(Peer(control, DeviceMemory(cuda.device())), AtOnce(), AtOnce())  # type: ignore[arg-type]
        found[evictor] = measure(transport, control, device, evictor)  # type: ignore[arg-type]

    threads = [threading.Thread(target=end, args=each) for each in zip(controls(rendezvous=True), (True, False), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    return [found[True], found[False]]


def test_a_trial_that_succeeds_leaves_nothing(cuda: FakeCuda) -> None:
    assert [why for _, why in tried(cuda)] == [None, None]
    assert (cuda.allocated, cuda.opened) == ({}, [])


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaMemcpyAsync"])
def test_a_trial_that_fails_leaves_nothing_and_both_say_why(cuda: FakeCuda, call: str) -> None:
    """The fake refuses to free what the other end has open."""
    cuda.failing[call] = Error.cudaErrorMapBufferObjectFailed
    for _, why in tried(cuda):
        assert why is not None
        assert f"{call} failed: cudaErrorMapBufferObjectFailed" in why
    assert (cuda.allocated, cuda.opened) == ({}, [])
