"""Send the steps of scripts/gpu_check.py the way of a GPU where there is none: all that they call of torch.cuda is
answered here.

In: pytest's monkeypatch. Out: `on_cuda` says yes everywhere, memory and tensors are a CPU's, and each answer takes just
the arguments that torch's own function takes. It shows that a step's lines for a GPU run, and nothing of what they
would find. What the transports call of CUDA has tests of its own; here their memory is the host's.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.waited: list[object] = []

    def wait_stream(self, stream: Stream) -> None:
        self.waited.append(stream)

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Over already."""


class BusyEvent(Event):
    def query(self) -> bool:
        return False


class Accelerator:
    """The current stream."""

    def __init__(self) -> None:
        self._current = Stream()

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return self._current

    def set_stream(self, stream: Stream) -> None:
        self._current = stream


@contextlib.contextmanager
def _inside(stream: Stream) -> Iterator[None]:
    yield


class Cuda:
    """Answers, and what was asked: `asked` has the name and arguments of every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self._monkeypatch = monkeypatch
        allocated = itertools.count(1 << 20, 1 << 10)
        memory = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        for name in memory:
            self.answer(name, lambda *arguments, **named: next(allocated))
        for name in (
            "reset_peak_memory_stats",
            "empty_cache",
            "set_device",
            "set_per_process_memory_fraction",
            "_sleep",
        ):
            self.answer(name, lambda *arguments, **named: None)
        self.answer("current_device", lambda: 0)
        self.answer("device_count", lambda: 2)
        self.answer("mem_get_info", lambda *arguments: (3 << 20, 4 << 20))
        stats = {
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "reserved_bytes.all.current": 0,
            "segment.all.current": 0,
            "segment.all.allocated": 0,
        }
        self.answer("memory_stats", lambda *arguments: stats)
        self.answer("memory_snapshot", lambda: [{"is_expandable": True}])
        self.answer(
            "get_device_properties",
            lambda *arguments: SimpleNamespace(
                name="none", major=9, minor=0, total_memory=4 << 20, multi_processor_count=132
            ),
        )
        self.answer("current_stream", lambda *arguments: Stream())
        accelerator = Accelerator()
        for name, value in (("Stream", Stream), ("Event", Event), ("stream", _inside)):
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("current_stream", "set_stream"):
            monkeypatch.setattr(torch.accelerator, name, getattr(accelerator, name))
        monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))

    def answer(self, name: str, value: Callable[..., Any]) -> None:
        """Like torch's own, which has to be there, and refuses arguments that it does not take."""
        signature = inspect.signature(getattr(torch.cuda, name))

        def call(*arguments: Any, **named: Any) -> Any:
            signature.bind(*arguments, **named)
            self.asked.append((name, arguments))
            return value(*arguments, **named)

        self._monkeypatch.setattr(torch.cuda, name, call)


def pretend(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    answers = {
        "on_cuda": lambda device: True,
        "host_bytes": lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8),
    }
    for key, module in list(sys.modules.items()):
        if key.startswith("gpu."):
            for name, value in answers.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
    return Cuda(monkeypatch)
