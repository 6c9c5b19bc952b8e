"""Lanes of copies next to the computation.

Without a GPU one worker thread per direction takes the place of a copy engine's stream. On a GPU
`bpipe.runtime.streams` has lanes with the same two methods, which issue to the device's streams instead.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from bpipe.transport.base import Pending

Job = Callable[[], None]


class CopyLane(Protocol):
    """Copies of one direction, in the order they are asked for."""

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:
        """Do the job once all of `after` and every earlier job of this lane have ended."""

    def close(self, wait: bool = True) -> None:
        """Close the lane to further jobs and end its thread, if it has one; `wait`: until that has ended."""


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
        ticket = Ticket(job, after, self._timeout_s)
        self._jobs.put(ticket)
        return ticket

    def close(self, wait: bool = True) -> None:
        self._jobs.put(None)
        if wait:
            self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (ticket := self._jobs.get()) is not None:
            ticket.run()
