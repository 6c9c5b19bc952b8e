"""Both ends of a pair in one process: messages through queues instead of a process group. Everything above them is the real thing.

In: nothing. Out: two controls that hear each other, and two one-sided transports joined by them.
"""

from __future__ import annotations

import json
import queue
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bpipe.transport.control import About
from bpipe.transport.lanes import Lane
from bpipe.transport.memory import Lender, SharedMemory
from bpipe.transport.one_sided import Host, Peer, Reaching

Mail = dict[About, "queue.SimpleQueue[_Message]"]


class _Message:
    def __init__(self, value: Any) -> None:
        self.text = json.dumps(value)
        self.withdrawn = False


class Sending:
    """A message under way. As with gloo, one that nobody waits for and nobody keeps may never arrive."""

    def __init__(self, message: _Message) -> None:
        self._message: _Message | None = message

    def wait(self) -> None:
        self._message = None

    def __del__(self) -> None:
        if self._message is not None:
            self._message.withdrawn = True


class LoopbackControl:
    """One end. Like the real one it carries JSON and keeps apart what messages are about; unlike it, sending needs no partner."""

    def __init__(self, outbox: Mail, inbox: Mail, timeout_s: float) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._timeout_s = timeout_s

    def send(self, about: About, value: Any) -> Sending:
        message = _Message(value)
        self._outbox[about].put(message)
        return Sending(message)

    def receive(self, about: About) -> Any:
        try:
            message = self._inbox[about].get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no message about {about.name} within {self._timeout_s:g} s") from None
        if message.withdrawn:
            raise TimeoutError(f"a message about {about.name} was neither waited for nor kept")
        return json.loads(message.text)

    def exchange(self, about: About, value: Any) -> Any:
        sending = self.send(about, value)
        heard = self.receive(about)
        sending.wait()
        return heard


def controls(timeout_s: float = 5.0) -> tuple[LoopbackControl, LoopbackControl]:
    """Two ends of one pair."""
    there: Mail = defaultdict(queue.SimpleQueue)
    back: Mail = defaultdict(queue.SimpleQueue)
    return LoopbackControl(there, back, timeout_s), LoopbackControl(back, there, timeout_s)


def peers(out: Lane, home: Lane, lender: Callable[[], Lender] = SharedMemory, timeout_s: float = 5.0) -> tuple[Reaching, Reaching]:
    """An evictor's transport, its copies on these lanes, and its acceptor's, which has no copies to make."""
    here, there = controls(timeout_s)
    return Reaching(Peer(here, lender()), out, home), Reaching(Peer(there, lender()), NoLane(), NoLane())  # type: ignore[arg-type]


def alone(out: Lane, home: Lane) -> tuple[Reaching, Reaching]:
    """The same over the evictor's own memory."""
    return Reaching(Host(pinned=False), out, home), Reaching(Host(pinned=False), NoLane(), NoLane())


class NoLane:
    """An acceptor copies nothing."""

    def run(self, job: Callable[[], None], after: object = ()) -> Any:
        raise AssertionError("an acceptor of a one-sided transport was asked to copy")

    def close(self) -> None:
        """Nothing to end."""
