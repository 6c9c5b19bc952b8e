"""Copy beside the computation where there is no GPU: one worker thread a direction stands for a copy engine's stream.

In: jobs, and what each has to wait for. Out: a `Pending` each. On a GPU `bpipe.runtime.streams` gives lanes with the
same two methods, which issue to the device's streams instead. Knows no host buffers and no bytes.
"""

from __future__ import annotations

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
        """Do the job once all of `after` have ended and every earlier job of this lane has."""

    def close(self, wait: bool = True) -> None:
        """Close the lane to further jobs. End what belongs to it and, unless told not to, wait for that."""


class Ticket:
    """A job of a thread lane. `span_s` says when it ran, on `time.perf_counter`'s clock."""

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
        """Do the job. Once, in the lane's thread."""
        assert self._job is not None
        try:
            for pending in self._after:
                pending.wait()
            begin = time.perf_counter()
            self._job()
            self.span_s = (begin, time.perf_counter())
        except BaseException as error:
            # Raised again where somebody waits: a thread of its own has nobody to tell.
            self._error = error
        finally:
            # A job holds tensors. Let go before saying so: whoever waits may be about to free them.
            self._job, self._after = None, ()
            self._ended.set()


class ThreadLane:
    """A worker thread. What `run` is given is done there, one after another."""

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
        while True:
            ticket = self._jobs.get()
            if ticket is None:
                return
            ticket.run()
