"""The two devices that the cases run on: a GPU, and the late device of `tests.late`, which simulates one in daily tests.

An `Accelerator` adds what `torch.accelerator` lacks. A late device is never slow: what a GPU does late because of an
earlier kernel, a late device does late because it is told to.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from tests.late.devices import Draw

LATE, CUDA = "late", "cuda"
NAMES = (LATE, CUDA)
# Cycles per second that `torch.cuda._sleep` counts, at a Hopper GPU's highest clock; at a lower one delays are longer.
CYCLES_PER_S = 2e9
# How long a GPU's forwards and copies are delayed if they are to come late.
FORWARD_S, COPY_S = 4e-3, 3e-3


@dataclass(frozen=True)
class Held:
    """A kernel that keeps running."""

    is_over: Callable[[], bool]
    let_go: Callable[[], None]


class Accelerator(Protocol):
    name: str
    device: torch.device

    def hold_back(self, seconds: float) -> None:
        """Delay what is issued next to the current stream."""

    def come_late(self, forwards: bool, copies: bool, number: int) -> None:
        """Delay forwards or copies from now on; `number` is the iteration's number."""

    def before_forward(self) -> None:
        """Hold a forward back in its middle, if forwards are to come late."""

    def before_copy(self) -> None:
        """Hold a copy back, if copies are to come late."""

    def busy(self, seconds: float) -> Held:
        """Keep the current stream busy: a GPU's for that long, a late device's until it is released."""

    def limit(self, nbytes: int | None) -> None:
        """Limit torch to this many bytes of the device's memory, or lift the limit."""

    # Makes the device of a process of a pair that has just begun. It can be pickled.
    of_process: Callable[[int], Accelerator]

    def described(self) -> str:
        """Return a description of the devices."""

    def allocator(self) -> str:
        """Return the actual allocator, as `PYTORCH_CUDA_ALLOC_CONF` would name it."""

    def prepare_megatron(self) -> None:
        """Prepare this process for Megatron. Call it once, before Megatron is imported."""


class Gpu(Accelerator):
    name = CUDA

    def __init__(self) -> None:
        self.device = torch.device(CUDA, 0)
        self.of_process = _gpu_of_process
        torch.cuda.set_device(self.device)
        self._forward_s = self._copy_s = 0.0

    def hold_back(self, seconds: float) -> None:
        if seconds > 0:
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def come_late(self, forwards: bool, copies: bool, number: int) -> None:
        self._forward_s, self._copy_s = forwards * FORWARD_S, copies * COPY_S

    def before_forward(self) -> None:
        self.hold_back(self._forward_s)

    def before_copy(self) -> None:
        self.hold_back(self._copy_s)

    def busy(self, seconds: float) -> Held:
        self.hold_back(seconds)
        event = torch.Event(self.device)
        event.record()
        return Held(event.query, lambda: None)

    def limit(self, nbytes: int | None) -> None:
        total = torch.accelerator.get_memory_info(self.device)[1]
        torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0) if nbytes else 1.0, self.device)

    def described(self) -> str:
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return "; ".join(
            f"{device.name}, {device.major}.{device.minor}, {device.total_memory / 2**30:.1f} GiB" for device in devices
        )

    def allocator(self) -> str:
        backend = torch.cuda.memory.get_allocator_backend()
        if backend != "native":
            return f"backend:{backend}"
        probe = torch.zeros(64 << 20, dtype=torch.uint8, device=self.device)
        expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
        del probe
        return "expandable_segments:True" if expandable else "backend:native"

    def prepare_megatron(self) -> None:
        _prepare_megatron()


class LateDevice(Accelerator):
    """Late devices. A new one resets the simulation, so nothing of earlier ones may be used afterwards."""

    name = LATE
    # Host memory is used for it.
    CAPACITY_BYTES = 256 << 20

    def __init__(self, draw: Draw | None = None, index: int = 0) -> None:
        from tests.late import devices

        gc.collect()
        self._late, self._devices = devices.extension(), devices
        self.of_process = _late_device_of_process
        self.draw = draw or devices.Draw(1, connections=int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "0")))
        devices.begin(self.draw, self.CAPACITY_BYTES)
        self.device = devices.device(index)
        torch.accelerator.set_device_index(index)

    def hold_back(self, seconds: float) -> None:
        if seconds > 0:
            stream = torch.accelerator.current_stream().stream_id
            self._late.order(self._devices.STREAM_LAST, self.draw.seed, stream, self.draw.eagerness)

    def come_late(self, forwards: bool, copies: bool, number: int) -> None:
        orders = {
            (True, False): self._devices.COMPUTE_LAST,
            (False, True): self._devices.COPIES_LAST,
            (True, True): self._devices.AS_LATE,
            (False, False): self._devices.DRAWN,
        }
        self._late.order(orders[forwards, copies], self.draw.seed + number, -1, self.draw.eagerness)

    def before_forward(self) -> None:
        """Do nothing: the order delays it."""

    before_copy = before_forward

    def busy(self, seconds: float) -> Held:
        index, late = self.device.index, self._late
        late.hold(index, torch.accelerator.current_stream().stream_id)
        event = torch.Event(self.device)
        event.record()
        return Held(event.query, functools.partial(late.let_go, index))

    def limit(self, nbytes: int | None) -> None:
        self._late.limit(self.CAPACITY_BYTES if nbytes is None else nbytes)

    def described(self) -> str:
        return f"{torch.accelerator.device_count()} late devices"

    def allocator(self) -> str:
        return "backend:native"

    def prepare_megatron(self) -> None:
        from tests.late import stand_in

        stand_in.install()
        from megatron.scheduling import cpu as cpu_runtime

        # Weights are drawn on the device that uses them; otherwise Megatron leaves them on the host.
        cpu_runtime.ARGUMENTS = tuple(
            argument for argument in cpu_runtime.ARGUMENTS if argument != "--use-cpu-initialization"
        )
        _prepare_megatron()


def _prepare_megatron() -> None:
    # Before the first product: with another workspace, cuBLAS may sum in another order the second time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from megatron.scheduling.start import startup

    startup.prepare()


def _gpu_of_process(rank: int) -> Accelerator:
    return Gpu()


def _late_device_of_process(rank: int) -> Accelerator:
    from tests.late.processes import begin_process, stand_in_for_nccl

    torch.set_num_threads(1)
    stand_in_for_nccl()
    accelerator = LateDevice(index=rank)
    begin_process(rank, rank, accelerator.draw)
    return accelerator


def accelerator(name: str) -> Accelerator:
    return Gpu() if name == CUDA else LateDevice()


@contextlib.contextmanager
def on_stream(stream: torch.Stream) -> Iterator[Any]:
    """Issue what is inside on a stream, after everything issued on the current one."""
    from bpipe.transport.streams import current

    stream.wait_event(torch.accelerator.current_stream().record_event())
    with current(stream):
        yield


def join(stream: torch.Stream) -> None:
    """Make the current stream wait for this one."""
    torch.accelerator.current_stream().wait_event(stream.record_event())
