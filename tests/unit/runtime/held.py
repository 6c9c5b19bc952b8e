"""Hold a transfer's producer back until somebody waits for it: the latest moment the protocol allows, whatever the
clock says.

In: nothing. Out: lanes with real threads whose jobs stop before, or midway through, their copy until they are waited
for; memory that notices when what it copies was freed; and a two-sided pair in one process with the same freedom on
either end. A wait that is missing is then wrong every time: what nobody waits for does not happen before the lanes are
closed.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from bpipe.transport.base import Pending
from bpipe.transport.device import Device
from bpipe.transport.lanes import Job, ThreadLane
from bpipe.transport.layout import Sizes
from bpipe.transport.memory import Region, SharedMemory, TensorRegion

# Generous: machines that run tests are busy. Only what is broken waits so long.
TIMEOUT_S = 20.0
Point = Literal["free", "before", "midway"]

_held = threading.local()


class HeldTicket:
    """Lets its job go on when it is waited for."""

    def __init__(self, inner: Pending, gate: threading.Event) -> None:
        self._inner = inner
        self._gate = gate

    def wait(self) -> None:
        self._gate.set()
        self._inner.wait()


class HeldLane(ThreadLane):
    """A thread lane whose jobs stop at a point of their copy; "free" ones never do."""

    def __init__(self, name: str, point: Point) -> None:
        super().__init__(name, TIMEOUT_S)
        self._point = point
        self._gates: list[threading.Event] = []

    def run(self, job: Job, after: Sequence[Pending] = ()) -> Pending:  # type: ignore[override]
        gate = threading.Event()
        self._gates.append(gate)

        def held() -> None:
            if self._point == "before":
                assert gate.wait(TIMEOUT_S)
            _held.gate = gate if self._point == "midway" else None
            job()

        return HeldTicket(super().run(held, after), gate)

    def close(self) -> None:
        for gate in self._gates:
            gate.set()
        super().close()


class HeldRegion(Region):
    """Memory whose copies stop midway where their lane says so, and refuse what was freed under them."""

    def __init__(self, inner: Region) -> None:
        self._inner = inner

    def write(self, offset: int, source: torch.Tensor) -> None:
        self._halves(lambda place, part: self._inner.write(place, part), offset, source)

    def read(self, offset: int, target: torch.Tensor) -> None:
        self._halves(lambda place, part: self._inner.read(place, part), offset, target)

    def close(self) -> None:
        self._inner.close()

    def abandon(self) -> None:
        self._inner.abandon()

    def _halves(self, copy: Callable[[int, torch.Tensor], None], offset: int, buffer: torch.Tensor) -> None:
        half = buffer.numel() // 2
        copy(offset, _alive(buffer)[:half])
        gate = getattr(_held, "gate", None)
        if gate is not None:
            assert gate.wait(TIMEOUT_S)
        copy(offset + half, _alive(buffer)[half:])


def _alive(buffer: torch.Tensor) -> torch.Tensor:
    assert buffer.untyped_storage().nbytes() >= buffer.numel(), (
        "a copy was to use memory that had been freed: a wait is missing"
    )
    return buffer


class HeldMemory(SharedMemory):
    """Shared memory that copies in halves. `lent` may hold the acceptor up before it lends."""

    def __init__(self, lent: Callable[[], None] = lambda: None) -> None:
        self._lent = lent

    def make(self, nbytes: int) -> tuple[Any, Region]:
        self._lent()
        handle, region = super().make(nbytes)
        return handle, HeldRegion(region)

    def open(self, handle: Any) -> Region:
        return HeldRegion(super().open(handle))


def held_host_memory(nbytes: int, device: Device) -> Region:
    """For `bpipe.transport.one_sided.own_memory`."""
    return HeldRegion(TensorRegion(torch.empty(nbytes, dtype=torch.uint8)))


class Exchange:
    """One message: read from the sender's buffers and written into the receiver's, each early or as late as may be."""

    def __init__(self, late_send: bool, late_receive: bool, timeout_s: float) -> None:
        self._late_send = late_send
        self._late_receive = late_receive
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._met = threading.Event()
        self._ends: dict[str, Sequence[torch.Tensor]] = {}
        self._read: list[torch.Tensor] | None = None
        self._written = False

    def post(self, end: str, buffers: Sequence[torch.Tensor]) -> Half:
        with self._lock:
            self._ends[end] = buffers
            if len(self._ends) == 2:
                self._met.set()
                if not self._late_send:
                    self._read_now()
        return Half(self, end)

    def finish(self, end: str) -> None:
        """Rendezvous, as gloo does even for small messages: neither end is done before both have come."""
        if not self._met.wait(self._timeout_s):
            raise TimeoutError(f"the other end of this transfer never came, within {self._timeout_s:g} s")
        with self._lock:
            self._read_now()
            if end == "receiver":
                self._write_now()

    def _read_now(self) -> None:
        if self._read is None:
            self._read = [_alive(buffer).clone() for buffer in self._ends["sender"]]
            if not self._late_receive:
                self._write_now()

    def _write_now(self) -> None:
        assert self._read is not None
        if not self._written:
            for buffer, value in zip(self._ends["receiver"], self._read, strict=True):
                _alive(buffer).copy_(value)
            self._written = True


class Half:
    """One end's half of an exchange."""

    def __init__(self, exchange: Exchange, end: str) -> None:
        self._exchange = exchange
        self._end = end

    def wait(self) -> None:
        self._exchange.finish(self._end)


class Channel:
    """One direction of a pair: the n-th send and the n-th receive are one exchange."""

    def __init__(self, late_send: bool, late_receive: bool, timeout_s: float) -> None:
        self._late = late_send, late_receive, timeout_s
        self._exchanges: defaultdict[int, Exchange] = defaultdict(lambda: Exchange(*self._late))
        self._counts = {"sender": 0, "receiver": 0}
        self._lock = threading.Lock()

    def post(self, end: str, buffers: Sequence[torch.Tensor]) -> Half:
        with self._lock:
            exchange = self._exchanges[self._counts[end]]
            self._counts[end] += 1
        return exchange.post(end, buffers)


class HeldTwoSided:
    """One rank's two-sided transport; `pair` makes both."""

    one_sided: Literal[False] = False

    def __init__(
        self,
        channels: tuple[Channel, Channel],
        telling: queue.SimpleQueue[Sizes],
        hearing: queue.SimpleQueue[Sizes],
        timeout_s: float,
    ) -> None:
        self._sending, self._receiving = channels
        self._telling, self._hearing = telling, hearing
        self._timeout_s = timeout_s

    @staticmethod
    def pair(late_send: bool, late_receive: bool, timeout_s: float = TIMEOUT_S) -> tuple[HeldTwoSided, HeldTwoSided]:
        up, down = (Channel(late_send, late_receive, timeout_s) for _ in range(2))
        here: queue.SimpleQueue[Sizes] = queue.SimpleQueue()
        there: queue.SimpleQueue[Sizes] = queue.SimpleQueue()
        return HeldTwoSided((up, down), here, there, timeout_s), HeldTwoSided((down, up), there, here, timeout_s)

    def announce(self, sizes: Sizes) -> Pending:
        self._telling.put(dict(sizes))
        return HeldTicket(_Nothing(), threading.Event())

    def learn(self) -> dict[int, tuple[int, ...]]:
        try:
            return {stage: tuple(lengths) for stage, lengths in self._hearing.get(timeout=self._timeout_s).items()}
        except queue.Empty:
            raise TimeoutError(f"no sizes within {self._timeout_s:g} s") from None

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Half:
        return self._sending.post("sender", tensors)

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Half:
        return self._receiving.post("receiver", tensors)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Half:
        return self._receiving.post("receiver", tensors)

    def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Half:
        return self._sending.post("sender", tensors)

    def release(self) -> None:
        """Nothing of its own."""

    abandon = release


class _Nothing:
    def wait(self) -> None:
        return None
