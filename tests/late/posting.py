"""A rank's posting thread as a host of its own, which has its turns as the ranks have theirs.

In: the jobs of `bpipe.runtime.streams.posting`. Out: the same as of a `ThreadLane`, in whose place this stands while
hosts run.
"""

from __future__ import annotations

import torch
from torch.testing._internal.distributed import multi_threaded_pg

from bpipe.transport.base import Pending
from bpipe.transport.lanes import Job, ThreadLane, Ticket
from tests.late.devices import extension


class HostTicket(Ticket):
    def wait(self) -> None:
        extension().wait_until(self._ended.is_set, "a host waits until its posting thread has posted")
        super().wait()


class HostLane(ThreadLane):
    """Its thread has the rank's world of torch.distributed and the rank's device."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._host = extension().add_host()
        self._world = multi_threaded_pg.ThreadLocalWorld()._get_world()
        self._device_index = torch.accelerator.current_device_index()
        super().__init__(name, timeout_s)

    def run(self, job: Job, after: tuple[Pending, ...] = ()) -> Ticket:  # type: ignore[override]
        ticket = HostTicket(job, after, self._timeout_s)
        self._jobs.put(ticket)
        return ticket

    def _work(self) -> None:
        late = extension()
        late.enter(self._host)
        multi_threaded_pg.ThreadLocalWorld._world.world = self._world
        torch.accelerator.set_device_index(self._device_index)
        try:
            while True:
                late.wait_until(lambda: not self._jobs.empty(), "a posting thread waits for something to post")
                ticket = self._jobs.get()
                if ticket is None:
                    break
                ticket.run()
            late.leave(self._host)
        except RuntimeError:
            # Nobody can go on: every rank says so.
            return
