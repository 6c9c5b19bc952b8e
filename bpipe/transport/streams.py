"""The order of transfers and computation: a device's streams, lanes of copies next to the computation, and marks of time.

`torch.accelerator`, streams and events are those of whatever torch computes on here; what only CUDA has is in
`cuda_runtime`. On a CPU everything that a rank issues is already in order, and one worker thread per direction takes
the place of a copy engine's stream.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from bpipe.transport.cuda_runtime import LIBRARIES, CudaRuntime, current_stream, runtime

Job = Callable[[], None]

# Whether a lane times the jobs that it is given now.
_timed: ContextVar[bool] = ContextVar("timed", default=False)


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu"


def _here() -> torch.Stream:
    """Return the current stream."""
    return torch.accelerator.current_stream()


@contextlib.contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Issue to this stream inside. Unlike a stream's own `with`, it may be nested and entered by several threads."""
    before = _here()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def allocated_on(device: torch.device) -> Callable[[], int] | None:
    """Return a counter of the bytes that a device's allocator has given out; None for a CPU."""
    return functools.partial(torch.accelerator.memory_allocated, device) if _has_streams(device) else None


class Streams:
    """One stream for what leaves this rank and one for what comes, next to the compute stream. The host never blocks.

    A process makes one of these, however many programs it runs: torch has 32 streams of a priority, and after the last
    returns the first again, NCCL's among them. Copies are timed only if `timed`: marks of time may delay a queue that
    streams share.
    """

    def __init__(self, device: torch.device) -> None:
        self.timed = False
        self._beside = _has_streams(device)
        if self._beside:
            # High priority: a transfer's few blocks must not queue behind a whole layer's.
            self._outbound = torch.Stream(device, priority=-1)
            self._inbound = torch.Stream(device, priority=-1)

    def outbound(self) -> AbstractContextManager[None]:
        """Start evictions and returns on the outbound stream. [1] They wait for compute, which writes what they read."""
        return self._behind_compute(self._outbound) if self._beside else contextlib.nullcontext()

    def inbound(self) -> AbstractContextManager[None]:
        """Start loads and hostings on the inbound stream. [4][5] They wait for compute, which allocated, and last used,
        what they write."""
        return self._behind_compute(self._inbound) if self._beside else contextlib.nullcontext()

    @contextlib.contextmanager
    def _behind_compute(self, stream: torch.Stream) -> Iterator[None]:
        stream.wait_event(_here().record_event())
        before = _timed.set(self.timed)
        try:
            with current(stream):
                yield
        finally:
            _timed.reset(before)


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Order what this rank does next after the transfer's end (on a GPU the current stream waits, on a CPU the
        caller).

        Raises what the transport raises if it failed or timed out.
        """


class Done:
    """A transfer that has already ended."""

    def wait(self) -> None:
        return None


class _Issued:
    """A job on a device's stream: its end, and if it was timed also its begin."""

    def __init__(self, begin: torch.Event | None, end: torch.Event) -> None:
        self.begin = begin
        self.end = end

    def wait(self) -> None:
        _here().wait_event(self.end)


class StreamLane:
    """A lane on the current stream, which `Streams.outbound` or `Streams.inbound` chooses."""

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:
        """Do the job once all of `after` and every earlier job of this lane have ended."""
        for pending in after:
            pending.wait()
        stream, timed = _here(), _timed.get()
        begin = torch.Event(stream.device, enable_timing=True) if timed else None
        if begin is not None:
            begin.record(stream)
        job()
        end = torch.Event(stream.device, enable_timing=timed)
        end.record(stream)
        return _Issued(begin, end)

    def close(self, wait: bool = True) -> None:
        """Do nothing: the streams belong to the engine."""


class _OwnStreamLane(StreamLane):
    """A lane on a stream of its own. A job starts after what the current stream has been given."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:
        self._stream.wait_event(_here().record_event())
        with current(self._stream):
            return super().run(job, after)


class Ticket:
    """A job of a thread lane. `span_s`: its begin and end on `time.perf_counter`'s clock."""

    def __init__(self, job: Job, after: Sequence[Pending], timeout_s: float) -> None:
        self._job: Job | None = job
        self._after = after
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.span_s: tuple[float, float] | None = None

    def wait(self) -> None:
        if not self._ended.wait(self._timeout_s):
            raise TimeoutError(f"no copy within {self._timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Do the job, once and in the lane's thread."""
        assert self._job is not None
        try:
            for pending in self._after:
                pending.wait()
            begin = time.perf_counter()
            self._job()
            self.span_s = (begin, time.perf_counter())
        except BaseException as error:
            # Raised again by `wait`, in the thread that needs the copy.
            self._error = error
        finally:
            # A job holds tensors. Drop them before the event is set: whoever waits may be about to free them.
            self._job, self._after = None, ()
            self._ended.set()


class ThreadLane:
    """A worker thread that does one job after another."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        # A daemon, so that a run that failed elsewhere does not wait for a copy that will never come.
        self._thread = threading.Thread(target=self._work, name=f"bpipe-{name}", daemon=True)
        self._thread.start()

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Ticket:
        """Do the job once all of `after` and every earlier job of this lane have ended."""
        ticket = Ticket(job, after, self._timeout_s)
        self._jobs.put(ticket)
        return ticket

    def close(self, wait: bool = True) -> None:
        """Close the lane to further jobs and end its thread; `wait`: until that has ended."""
        self._jobs.put(None)
        if wait:
            self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            ticket.run()


# Copies of one direction, in the order in which they are asked for.
CopyLane = ThreadLane | StreamLane


def beside(device: torch.device, timeout_s: float) -> CopyLane:
    """Return a lane for what is computed next to the computation: a stream of its own, or a thread."""
    return _OwnStreamLane(device) if _has_streams(device) else ThreadLane("shards", timeout_s)


def used_here(*tensors: torch.Tensor) -> None:
    """Mark another stream's memory as used on the current one, so that the allocator waits for that."""
    for tensor in tensors:
        if _has_streams(tensor.device):
            tensor.record_stream(_here())


def used_on(streams: Sequence[torch.Stream], tensors: Sequence[torch.Tensor]) -> None:
    """Mark memory as used on other streams."""
    for tensor in tensors:
        if _has_streams(tensor.device):
            for stream in streams:
                tensor.record_stream(cast(Any, stream))


class Device:
    """A rank's device, as transports use it; `device` without an index means the current one of its type."""

    def __init__(self, device: torch.device) -> None:
        if _has_streams(device):
            # A device's runtime needs an index.
            index = cast(int | None, device.index)
            device = torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)
        self.device = device

    def lanes(self, timeout_s: float) -> tuple[CopyLane, CopyLane]:
        """Return lanes for one-sided copies outbound and inbound: the device's streams, or a thread each."""
        if _has_streams(self.device):
            return StreamLane(), StreamLane()
        return ThreadLane("outbound", timeout_s), ThreadLane("inbound", timeout_s)

    @property
    def has_runtime(self) -> bool:
        """Whether copy engines reach memory by its address, told by a runtime such as CUDA's."""
        return self.device.type in LIBRARIES

    @property
    def runtime(self) -> CudaRuntime:
        return runtime(self.device.type)

    def make_current(self) -> CudaRuntime:
        """Make this thread allocate and open on this rank's own device, whichever it used last; return the runtime."""
        assert self.device.index is not None, "a rank's device has a number"
        self.runtime.set_device(self.device.index)
        return self.runtime

    def current_stream(self) -> int:
        """Return the handle of the current stream."""
        return current_stream(self.device.type)

    def empty_cache(self) -> None:
        """Give back what torch's allocator keeps unused."""
        torch.accelerator.empty_cache()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Issue to a stream of its own inside. Each thread has a current stream of its own, too."""
        with current(torch.Stream(self.device)) if _has_streams(self.device) else contextlib.nullcontext():
            yield


def total_bytes(device: torch.device) -> int:
    """Return a device's memory; 0 for a CPU, whose memory is the host's."""
    return torch.accelerator.get_memory_info(device)[1] if _has_streams(device) else 0


def peak_allocated_on(device: torch.device) -> int | None:
    """Return the most bytes that a device's allocator had given out; None for a CPU."""
    return torch.accelerator.max_memory_allocated(device) if _has_streams(device) else None


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle. For measurements before and after training, never in a step."""
    if _has_streams(device):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the host and in a device's stream."""

    host_s: float
    """Seconds of `time.perf_counter`."""

    event: torch.Event | None
    """In the stream that was current; None on a CPU."""

    def since(self, base: Mark) -> float:
        """Return the seconds from `base` on the device, or on the host without one. Waits for the device."""
        if self.event is None or base.event is None:
            return self.host_s - base.host_s
        self.event.synchronize()
        return float(base.event.elapsed_time(self.event)) / 1e3


class Clock:
    """Makes marks where the computation is issued."""

    def __init__(self, device: torch.device) -> None:
        self._compute = _here() if _has_streams(device) else None

    def beside(self) -> bool:
        """Whether the current stream is not the computation's, which then does not wait when this stream does."""
        return self._compute is not None and _here() != self._compute

    def mark(self) -> Mark:
        event = None
        if self._compute is not None:
            event = torch.Event(self._compute.device, enable_timing=True)
            event.record(_here())
        return Mark(time.perf_counter(), event)


def span_s(pending: Pending, base: Mark) -> tuple[float, float] | None:
    """Return the begin and end of a transfer in seconds since `base`; None if they are not known."""
    if isinstance(pending, Ticket) and pending.span_s is not None:
        begin_s, end_s = pending.span_s
        return begin_s - base.host_s, end_s - base.host_s
    if isinstance(pending, _Issued) and pending.begin is not None and base.event is not None:
        pending.end.synchronize()
        return base.event.elapsed_time(pending.begin) / 1e3, base.event.elapsed_time(pending.end) / 1e3
    return None
