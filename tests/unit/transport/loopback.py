"""Both ends of a pair in one process: messages through queues instead of a process group.

Everything above the queues is real. There are two connected controls, and two one-sided transports that use them.
"""

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bpipe.transport.distributed import Subject
from bpipe.transport.memory import Lender, SharedMemory
from bpipe.transport.one_sided import HostMemory, OneSidedCopies, Peer
from bpipe.transport.streams import CopyLane, Device, Done, Pending

CPU = Device(torch.device("cpu"))
Mail = dict[Subject, "queue.SimpleQueue[_Message]"]


class _Message:
    def __init__(self, value: Any) -> None:
        self.text = json.dumps(value)
        self.withdrawn = False
        self.taken = threading.Event()


class Sending:
    """A message in flight: as with gloo, it may never arrive if nobody waits for it or keeps it."""

    def __init__(self, message: _Message, rendezvous_s: float | None) -> None:
        self._message: _Message | None = message
        self._rendezvous_s = rendezvous_s

    def wait(self) -> None:
        if (
            self._rendezvous_s is not None
            and self._message is not None
            and not self._message.taken.wait(self._rendezvous_s)
        ):
            raise TimeoutError(f"a message was not received within {self._rendezvous_s:g} s")
        self._message = None

    def __del__(self) -> None:
        if self._message is not None:
            self._message.withdrawn = True


class LoopbackControl:
    """One end, which carries JSON by subject. Sending needs no partner unless `rendezvous` is set."""

    def __init__(self, outbox: Mail, inbox: Mail, timeout_s: float, rendezvous: bool) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._rendezvous_s = timeout_s if rendezvous else None

    def send(self, about: Subject, value: Any) -> Sending:
        message = _Message(value)
        self._outbox[about].put(message)
        return Sending(message, self._rendezvous_s)

    def receive(self, about: Subject) -> Any:
        try:
            message = self._inbox[about].get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no message about {about.name} within {self._timeout_s:g} s") from None
        if message.withdrawn:
            raise TimeoutError(f"a message about {about.name} was neither waited for nor kept")
        message.taken.set()
        return json.loads(message.text)

    def send_tensors(self, about: Subject, tensors: Sequence[torch.Tensor]) -> Sending:
        values = [(str(tensor.dtype).removeprefix("torch."), tensor.tolist(), list(tensor.shape)) for tensor in tensors]
        return self.send(about, values)

    def receive_tensors(self, about: Subject) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)
            for dtype, values, shape in self.receive(about)
        )

    def exchange(self, about: Subject, value: Any) -> Any:
        sending = self.send(about, value)
        answer = self.receive(about)
        sending.wait()
        return answer


def controls(timeout_s: float = 5.0, rendezvous: bool = False) -> tuple[LoopbackControl, LoopbackControl]:
    """Two ends of one pair."""
    second: Mail = defaultdict(queue.SimpleQueue)
    first: Mail = defaultdict(queue.SimpleQueue)
    return LoopbackControl(second, first, timeout_s, rendezvous), LoopbackControl(first, second, timeout_s, rendezvous)


def together(*calls: Callable[[], object]) -> None:
    """Run the calls at once, in a thread each, and raise their errors."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(20.0)


def peers(
    outbound: CopyLane,
    inbound: CopyLane,
    lender: Callable[[], Lender] = SharedMemory,
    timeout_s: float = 5.0,
    others: tuple[CopyLane, CopyLane] | None = None,
) -> tuple[OneSidedCopies, OneSidedCopies]:
    """The transports of an evictor, which copies on these lanes, and of its acceptor."""
    first, second = controls(timeout_s, rendezvous=others is not None)
    lanes = others or (NoLane(), NoLane())
    return Peer(first, lender(), outbound, inbound), Peer(second, lender(), *lanes)  # type: ignore[arg-type]


def alone(outbound: CopyLane, inbound: CopyLane) -> tuple[OneSidedCopies, OneSidedCopies]:
    """The same with the evictor's own host memory."""
    return HostMemory(CPU, outbound, inbound), HostMemory(CPU, NoLane(), NoLane())


class NoLane:
    """An acceptor copies nothing."""

    def run(self, job: Callable[[], None], after: object = ()) -> Any:
        raise AssertionError("an acceptor of a one-sided transport was asked to copy")

    def close(self) -> None:
        """Nothing to end."""


class AtOnce:
    """A lane like a device's, which issues a job at once."""

    def run(self, job: Callable[[], None], after: Sequence[Pending] = ()) -> Pending:
        for pending in after:
            pending.wait()
        job()
        return Done()

    def close(self) -> None:
        """Nothing to end."""
