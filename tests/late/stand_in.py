"""Let Megatron's own trainer run on late devices: "cuda" means them, and the backend `nccl` is the late group.

Must run before `megatron` is imported; it uses the same hooks as the CPU stand-in. Devices do nothing before
`tests.late.processes.begin_process`. Streams, events and memory are the late device's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from bpipe.transport.streams import current
from megatron.scheduling import cpu as cpu_runtime
from tests.late.devices import CAPACITY_BYTES, NUM_DEVICES, TYPE, extension
from tests.late.processes import stand_in_for_nccl

# As on a GPU, except for what has no kernel outside of CUDA. The default backend is NCCL's.
ARGUMENTS = tuple(argument for argument in cpu_runtime.ARGUMENTS if argument not in ("--distributed-backend", "gloo"))


class _Stream:
    """`torch.cuda.Stream`: makes streams of the current device. A class, because annotations name it."""

    def __new__(cls, device: object = None, priority: int = 0, **kwargs: object) -> Any:
        return torch.Stream(torch.device(TYPE, torch.accelerator.current_device_index()), priority=priority)


class _Event:
    """`torch.cuda.Event`, made in the same way."""

    def __new__(cls, enable_timing: bool = False, **kwargs: object) -> Any:
        return torch.Event(torch.device(TYPE), enable_timing=enable_timing)


class _State:
    """A state of a generator that graphs may share; replays draw nothing."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def manual_seed(self, seed: int) -> None:
        self.numbers = torch.Generator().manual_seed(seed).get_state()


class _Generator:
    """One of `torch.cuda.default_generators`: the host's generator, with states that can be swapped."""

    def __init__(self) -> None:
        self._state = _State(torch.get_rng_state())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def __getitem__(self, index: int) -> _Generator:
        return self

    def clone_state(self) -> _State:
        return _State(torch.get_rng_state())

    def graphsafe_get_state(self) -> _State:
        self._state.numbers = torch.get_rng_state()
        return self._state

    def graphsafe_set_state(self, state: _State) -> None:
        self.graphsafe_get_state()
        self._state = state
        torch.set_rng_state(state.numbers)


class _Graph:
    """`torch.cuda.CUDAGraph`. Kernels draw from the host's generator, so a replay draws no new numbers."""

    number = 0

    def register_generator_state(self, state: object) -> None: ...

    def __del__(self) -> None:
        extension().drop(self.number)

    def pool(self) -> int:
        return self.number

    def replay(self) -> None:
        extension().replay(self.number, torch.accelerator.current_stream().stream_id)


@contextlib.contextmanager
def _capturing(graph: _Graph, stream: torch.Stream, pool: object, capture_error_mode: str) -> Iterator[None]:
    """`torch.cuda.graph`."""
    torch.accelerator.synchronize()
    with current(stream):
        extension().begin_capture(stream.device_index, stream.stream_id)
        yield
        graph.number = extension().end_capture(stream.device_index)


def _number(device: Any) -> int:
    return (
        torch.accelerator.current_device_index()
        if device is None
        else torch.device(device).index
        if not isinstance(device, int)
        else device
    )


def _properties(device: object = None) -> SimpleNamespace:
    return SimpleNamespace(name="late device", major=8, minor=0, multi_processor_count=1, total_memory=CAPACITY_BYTES)


def install() -> None:
    """Install the stand-in. Call it once, before Megatron is imported."""
    extension()
    stand_in_for_nccl()
    here = torch.accelerator
    cuda = {
        **cpu_runtime.answers(),
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: here.current_device_index(),
        "set_device": lambda device: here.set_device_index(_number(device)),
        "get_device_name": lambda device=None: "late device",
        "get_device_properties": _properties,
        "synchronize": lambda device=None: here.synchronize(),
        "empty_cache": lambda: here.empty_cache(),
        "memory_allocated": lambda device=None: here.memory_allocated(_number(device)),
        "memory_reserved": lambda device=None: here.memory_reserved(_number(device)),
        "max_memory_allocated": lambda device=None: here.max_memory_allocated(_number(device)),
        "max_memory_reserved": lambda device=None: here.max_memory_reserved(_number(device)),
        "memory_stats": lambda device=None: cpu_runtime.ZeroStatistics(here.memory_stats(_number(device))),
        "mem_get_info": lambda device=None: here.get_memory_info(_number(device)),
        "reset_peak_memory_stats": lambda device=None: here.reset_peak_memory_stats(_number(device)),
        "reset_max_memory_allocated": lambda device=None: here.reset_peak_memory_stats(_number(device)),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: here.current_stream(),
        "default_stream": lambda device=None: here.current_stream(),
        "set_stream": lambda stream: here.set_stream(stream),
        "stream": current,
        "CUDAGraph": _Graph,
        "graph": _capturing,
        "graph_pool_handle": lambda: (0, 1),
        "memory_snapshot": lambda graph: [{"total_size": extension().pool_bytes(graph)}],
    }
    cpu_runtime.ARGUMENTS = ARGUMENTS
    cpu_runtime.stand_in(torch.device(TYPE), cuda, {})
    setattr(torch.cuda, "default_generators", _Generator())  # noqa: B010
