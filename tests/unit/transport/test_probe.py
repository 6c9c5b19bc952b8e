"""A failed trial of a link leaves nothing behind, since another transport takes over and needs the memory."""

import copy
import threading
from functools import partial
from typing import Any, Literal

import pytest
import torch

from bpipe.transport import connect
from bpipe.transport.connect import measure
from bpipe.transport.memory import DeviceMemory, Sizes
from bpipe.transport.one_sided import Peer
from bpipe.transport.streams import Done, Pending
from tests.unit.transport.fake_cuda import Error, FakeCuda
from tests.unit.transport.loopback import CPU, AtOnce, controls, together


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "PROBE_BYTES", 1 << 16)


def tried(cuda: FakeCuda) -> list[tuple[float, str | None]]:
    """Run both ends of a trial in one thread each; the evictor's result comes first."""
    device = cuda.device()
    device.device = torch.device("cpu")
    results: dict[bool, tuple[float, str | None]] = {}

    def end(control: object, evictor: bool) -> None:
        transport = Peer(control, DeviceMemory(cuda.device()), AtOnce(), AtOnce())  # type: ignore[arg-type]
        results[evictor] = measure(transport, control, device, evictor, 20.0, lambda: None)  # type: ignore[arg-type]

    together(*(partial(end, *arguments) for arguments in zip(controls(rendezvous=True), (True, False), strict=True)))
    return [results[True], results[False]]


def test_a_trial_that_succeeds_leaves_nothing(cuda: FakeCuda) -> None:
    (speed, why), (_, other) = tried(cuda)
    assert (why, other) == (None, None)
    # A copy within memory takes less than a second, however long the machine has been up.
    assert speed > connect.PROBE_BYTES
    assert (cuda.allocated, cuda.opened) == ({}, [])


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaMemcpyAsync"])
def test_a_trial_that_fails_leaves_nothing_and_both_say_why(cuda: FakeCuda, call: str) -> None:
    """The fake refuses to free what the other end has open."""
    cuda.failing[call] = Error.cudaErrorMapBufferObjectFailed
    for _, why in tried(cuda):
        assert why is not None
        assert f"{call} failed: cudaErrorMapBufferObjectFailed" in why
    assert (cuda.allocated, cuda.opened) == ({}, [])


class Hanging:
    """A two-sided transport that never answers until it is aborted, as in a network that drops messages."""

    one_sided: Literal[False] = False

    def __init__(self, *, is_aborted_at_all: bool) -> None:
        self._aborted, self._ends = threading.Event(), is_aborted_at_all
        self.num_aborts = 0

    def announce(self, sizes: Sizes) -> Pending:
        return Done()

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {}

    def put(self, host_buffer: int, tensors: Any) -> Pending:
        self._aborted.wait(60.0)
        raise RuntimeError("the communicator was aborted")

    get = host = give_back = put

    def abort(self) -> None:
        self.num_aborts += 1
        if self._ends:
            self._aborted.set()

    def withdraw(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("is_aborted_at_all", [True, False])
def test_a_trial_that_hangs_is_given_up_and_the_run_goes_on(
    is_aborted_at_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung until NCCL's watchdog ended the process, with peer and host yet to be tried."""
    monkeypatch.setattr(connect, "GRACE_S", 0.1)
    transports = [Hanging(is_aborted_at_all=is_aborted_at_all) for _ in range(2)]
    results: dict[bool, tuple[float, str | None]] = {}

    emptied: list[None] = []

    def end(control: Any, transport: Any, evictor: bool) -> None:
        device = copy.copy(CPU)
        device.empty_cache = lambda: emptied.append(None)  # type: ignore[method-assign]
        results[evictor] = measure(transport, control, device, evictor, 0.2, transport.abort)

    together(*(partial(end, *arguments) for arguments in zip(controls(), transports, (True, False), strict=True)))
    assert [transport.num_aborts for transport in transports] == [1, 1]
    assert len(emptied) == 2
    for speed, why in results.values():
        assert speed == 0.0
        assert why == "nothing arrived within 0.2 s (half of --bpipe-timeout)"
