"""A device that does nothing in order unless it was told to, and an allocator that hands memory out again at once.

In: the real engine's calls, made to fakes of torch's streams and events, of storages and of point-to-point operations.
Out: what touched which memory and what that was ordered behind, and from it every pair of touches that nothing orders,
every cycle of waiting, and every value that a backward would have read wrongly.

Whatever is issued becomes a node of a graph. A node comes after the last one of its stream and after the events that
stream was told to wait for; that is all the order there is, because the host never blocks. The allocator belongs to the
host: memory that was freed is given out by the very next call, whatever is still under way in it, as CUDA's caching
allocator does within its stream.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.runtime import evictor, host_buffers, partners, streams
from bpipe.runtime.activations import ActivationsState
from bpipe.runtime.capture import Claims, SavedStorage
from bpipe.runtime.evictor import Evictor
from bpipe.transport.base import Done
from bpipe.transport.memory import Region

Unit = tuple[str, int]
Values = dict[Unit, object]
NUM_STORAGES = 3
POISONED = "poison"


@dataclass(eq=False)
class Node:
    """Something a device does. It begins when all of `behind` have ended."""

    label: str
    behind: list[Node] = field(default_factory=list)
    effect: Callable[[Values], None] = lambda values: None
    # A transfer that both ends take part in is one node, which is not known before both have come.
    joint: Node | None = None

    @property
    def real(self) -> Node:
        return self.joint or self


class Machine:
    """One or more devices, the host's place among them, and everything they were given to do."""

    def __init__(self, one_connection: bool = False) -> None:
        """`one_connection`: every operation of a device passes one queue, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""
        self.one_connection = one_connection
        self.nodes: list[Node] = []
        self.touches: dict[Unit, list[tuple[Node, bool]]] = defaultdict(list)
        self.devices: dict[str, Device] = {}
        self.wrong: list[str] = []
        self.on = self.device("evictor")

    def device(self, name: str) -> Device:
        if name not in self.devices:
            self.devices[name] = Device(name, self)
        return self.devices[name]

    def issue(
        self,
        stream: FakeStream,
        label: str,
        reads: Sequence[Unit] = (),
        writes: Sequence[Unit] = (),
        effect: Any = None,
    ) -> Node:
        behind = [*stream.waits, *([stream.last] if stream.last else [])]
        stream.waits = []
        if self.one_connection:
            # The queue's head waits for what it needs, and everything behind it in the queue with it.
            gate = Node(f"queue before {label}", [*behind, *([stream.device.gate] if stream.device.gate else [])])
            self.nodes.append(gate)
            stream.device.gate, behind = gate, [gate]
        node = Node(f"{label} on {stream.device.name}'s {stream.name}", behind, effect or (lambda values: None))
        self.nodes.append(node)
        stream.last = node
        self.touch(node, reads, writes)
        return node

    def touch(self, node: Node, reads: Sequence[Unit], writes: Sequence[Unit]) -> None:
        for units, writing in ((reads, False), (writes, True)):
            for unit in units:
                self.touches[unit].append((node, writing))

    # -- what came of it
    # -------------------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """Everything that is wrong, in words. Empty if the protocol holds."""
        order = self._order()
        if len(order) < len(self.nodes):
            stuck = [node.label for node in self.nodes if node not in set(order)]
            return [f"deadlock: {stuck[0]} and {len(stuck) - 1} more never begin"]
        number = {id(node): place for place, node in enumerate(order)}
        before: list[int] = []
        for node in order:
            earlier = 0
            for other in node.behind:
                earlier |= before[number[id(other)]] | 1 << number[id(other)]
            before.append(earlier)

        def ordered(first: Node, second: Node) -> bool:
            return first is second or bool(before[number[id(second)]] >> number[id(first)] & 1)

        found = [race for unit, touches in self.touches.items() for race in _races(unit, touches, ordered)]
        values: Values = {}
        for node in order:
            node.effect(values)
        return found + self.wrong

    def _order(self) -> list[Node]:
        """All nodes, each after those it is behind; of those that wait for one another, none."""
        missing = {id(node): len(node.behind) for node in self.nodes}
        after: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for other in node.behind:
                after[id(other)].append(node)
        ready = deque(node for node in self.nodes if not node.behind)
        order = []
        while ready:
            node = ready.popleft()
            order.append(node)
            for follower in after[id(node)]:
                missing[id(follower)] -= 1
                if not missing[id(follower)]:
                    ready.append(follower)
        return order


def _races(unit: Unit, touches: Sequence[tuple[Node, bool]], ordered: Callable[[Node, Node], bool]) -> Iterator[str]:
    """Pairs that touch one unit, one of them writing, in an order that only the host knows."""
    written: Node | None = None
    read: list[Node] = []
    for each, writing in touches:
        node = each.real
        for earlier in [*([written] if written else []), *(read if writing else [])]:
            if not ordered(earlier, node):
                yield (
                    f"{node.label} {'writes' if writing else 'reads'} {unit} and is not ordered behind {earlier.label}"
                )
        if writing:
            written, read = node, []
        else:
            read.append(node)


class Device:
    """One GPU: its streams, the one that is current, and its allocator."""

    def __init__(self, name: str, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        self.gate: Node | None = None
        self.current = self.compute = FakeStream(self, "compute stream")
        self.free: dict[int, list[int]] = defaultdict(list)
        self.asked_of_the_driver = 0

    def take(self, nbytes: int) -> int:
        if self.free[nbytes]:
            return self.free[nbytes].pop()
        self.asked_of_the_driver += nbytes
        return self.asked_of_the_driver


class FakeStream:
    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.last: Node | None = None
        self.waits: list[Node] = []

    def wait_event(self, event: FakeEvent) -> None:
        if event.node is not None:
            self.waits.append(event.node)

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.node: Node | None = None
        self._label = "mark of time" if enable_timing else "event"

    def record(self, stream: FakeStream) -> None:
        self.node = stream.device.machine.issue(stream, self._label)

    def synchronize(self) -> None:
        raise AssertionError("the host blocks")


def fake_torch(machine: Machine) -> SimpleNamespace:
    """For the modules of the runtime that speak of streams and allocate: as much of torch as they use."""

    def set_stream(chosen: FakeStream) -> None:
        chosen.device.current = chosen

    def blocked(device: object = None) -> None:
        raise AssertionError("the host blocks")

    def empty(nbytes: int, dtype: object, device: object) -> FakeMemory:
        return FakeMemory(machine.on, nbytes)

    names = iter(range(1000))
    return SimpleNamespace(
        Stream=lambda device, priority=0: FakeStream(machine.on, f"stream {next(names)}"),
        Event=lambda device, enable_timing=False: FakeEvent(enable_timing),
        accelerator=SimpleNamespace(
            current_stream=lambda: machine.on.current, set_stream=set_stream, synchronize=blocked
        ),
        empty=empty,
        uint8=torch.uint8,
    )


class FakeStorage:
    """A storage as `bpipe.runtime.evictor` uses it. Resizing asks the allocator, at once."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self._cdata = id(self)
        self._nbytes = nbytes
        self._address = device.take(nbytes)

    def nbytes(self) -> int:
        return self._nbytes

    def unit(self) -> Unit:
        assert self._nbytes, "memory that was freed is used"
        return (self.device.name, self._address)

    def resize_(self, nbytes: int) -> None:
        if self._nbytes:
            self.device.free[self._nbytes].append(self._address)
        self._nbytes = nbytes
        if nbytes:
            self._address = self.device.take(nbytes)

    def fill_(self, value: int) -> None:
        unit = self.unit()
        self.device.machine.issue(
            self.device.current, "poisoning", writes=[unit], effect=lambda values: values.update({unit: POISONED})
        )


@dataclass(frozen=True)
class FakeBuffer:
    """What is copied: all of one storage, or a piece of a host buffer."""

    place: Callable[[], Unit]
    nbytes: int

    def numel(self) -> int:
        return self.nbytes


class _Held:
    """Memory that goes back to its allocator with whoever holds it last, whatever is still under way in it."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.storage = FakeStorage(device, nbytes)

    def __del__(self) -> None:
        self.storage.resize_(0)


class FakeTensor:
    """As much of a tensor as passes between stages."""

    dtype = torch.float32
    shape = (2, 3)

    def __init__(self, device: Device, nbytes: int = 1000, held: _Held | None = None) -> None:
        self.held = held or _Held(device, nbytes)
        self.device = device
        self.grad_fn: Any = None

    @property
    def storage(self) -> FakeStorage:
        return self.held.storage

    def untyped_storage(self) -> FakeStorage:
        return self.storage

    def place(self) -> Unit:
        return self.storage.unit()

    def detach(self) -> FakeTensor:
        return FakeTensor(self.device, held=self.held)

    def contiguous(self) -> FakeTensor:
        return self

    def let_go(self) -> None:
        """Something else lies behind it from now on."""
        self.held = _Held(self.device, 1)


class FakeMemory(Region):
    """Memory that is allocated once and cut into pieces: an acceptor's host buffers, a `Region` of a one-sided
    transport."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._base = device.take(nbytes) * 1_000_000

    def narrow(self, dimension: int, offset: int, nbytes: int) -> FakeBuffer:
        return FakeBuffer(lambda: (self._device.name, self._base + offset), nbytes)

    def untyped_storage(self) -> SimpleNamespace:
        return SimpleNamespace(nbytes=lambda: self._nbytes)

    def write(self, offset: int, source: FakeBuffer) -> None:  # type: ignore[override]
        self._copy(source, self.narrow(0, offset, source.nbytes), "put")

    def read(self, offset: int, target: FakeBuffer) -> None:  # type: ignore[override]
        self._copy(self.narrow(0, offset, target.nbytes), target, "get")

    def close(self) -> None:
        """It lives as long as the test."""

    def _copy(self, source: FakeBuffer, target: FakeBuffer, label: str) -> None:
        machine = self._device.machine
        read, written = source.place(), target.place()
        machine.issue(
            machine.on.current, label, [read], [written], lambda values: values.update({written: values.get(read)})
        )


class FakeDist:
    """`torch.distributed` as `bpipe.transport.distributed` uses it, with NCCL's order: a group's operations in the
    order of their issue, on a stream of its own behind the current one, and none without its other half."""

    isend, irecv = "isend", "irecv"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._streams: dict[tuple[str, str], FakeStream] = {}
        self._halves: dict[tuple[str, str], deque[tuple[Node, Node, Unit]]] = defaultdict(deque)

    def issue(self, operation: str, buffers: Sequence[FakeBuffer], partner: int, group: str) -> list[Any]:
        """For `bpipe.transport.distributed.issue`."""
        return [self._post(operation, buffer, group) for buffer in buffers]

    def _post(self, operation: str, buffer: FakeBuffer, group: str) -> Any:
        machine, device = self._machine, self._machine.on
        own = self._streams.setdefault((device.name, group), FakeStream(device, f"group {group}"))
        own.wait_event(device.current.record_event())
        unit = buffer.place()
        began = machine.issue(own, operation)
        ended = Node(f"end of {began.label}", [began])
        machine.nodes.append(ended)
        machine.touch(ended, *(([unit], []) if operation == self.isend else ([], [unit])))
        own.last = ended
        self._halves[group, operation].append((began, ended, unit))
        self._match(group)

        def wait() -> None:
            machine.on.current.waits.append(ended)

        # A device as far behind its host as may be.
        return SimpleNamespace(wait=wait, is_completed=lambda: False)

    def _match(self, group: str) -> None:
        sends, receives = self._halves[group, self.isend], self._halves[group, self.irecv]
        if sends and receives:
            (sent, sender, source), (received, receiver, target) = sends.popleft(), receives.popleft()
            both = Node(f"{sent.label} with {received.label}", [sent, received])
            both.effect = lambda values: values.update({target: values.get(source)})
            self._machine.nodes.append(both)
            for end in (sender, receiver):
                end.behind.append(both)
                end.joint = both

    def alone(self) -> list[str]:
        """Halves whose other half was never posted."""
        return [began.label for halves in self._halves.values() for began, *_ in halves]


class Microbatch:
    """What one forward saved: the node of its graph that the engine is given, and its storages."""

    def __init__(self, device: Device, tag: object) -> None:
        self.tag = tag
        self.storages = [FakeStorage(device, 1000 * (number + 1)) for number in range(NUM_STORAGES)]

    def forward(self, device: Device) -> None:
        tag, units = self.tag, [storage.unit() for storage in self.storages]
        label = f"forward of {tag}"
        device.machine.issue(
            device.compute, label, writes=units, effect=lambda values: values.update(dict.fromkeys(units, tag))
        )

    def backward(self, device: Device) -> None:
        tag, units = self.tag, [storage.unit() for storage in self.storages]

        def read(values: Values) -> None:
            device.machine.wrong += [
                f"backward of {tag} reads {values.get(unit)} in {unit}" for unit in units if values.get(unit) != tag
            ]

        device.machine.issue(device.compute, f"backward of {tag}", reads=units, effect=read)
        for storage in self.storages:
            storage.resize_(0)


def fake_find(roots: Sequence[Microbatch], inputs: object, device: object) -> tuple[SavedStorage, ...]:
    """For `bpipe.runtime.evictor.find`."""
    return tuple(SavedStorage(storage, storage.nbytes(), True) for root in roots for storage in root.storages)  # type: ignore[arg-type]


def fake_bytes_of(storages: Sequence[FakeStorage]) -> list[FakeBuffer]:
    """For `bpipe.runtime.evictor._bytes_of`."""
    return [FakeBuffer(storage.unit, storage.nbytes()) for storage in storages]


class FakeClaims(Claims):
    """Claims of storages that nothing can refer to weakly: no two micro-batches share one."""

    def claim(self, storages: Sequence[Any], microbatch: Hashable) -> list[bool]:
        return [True] * len(storages)


def put_under(patch: pytest.MonkeyPatch, machine: Machine) -> None:
    """The engine, its streams and its host buffers run on this machine."""
    torch_there = fake_torch(machine)
    patch.setattr(streams, "torch", torch_there)
    patch.setattr(streams, "cuda", SimpleNamespace(profiled=contextlib.nullcontext))
    patch.setattr(host_buffers, "torch", torch_there)
    patch.setattr(evictor, "find", fake_find)
    patch.setattr(evictor, "hiding", lambda roots: Counter())
    patch.setattr(evictor.Retrace, "of", lambda roots, leaving: None)
    patch.setattr(evictor, "_bytes_of", fake_bytes_of)
    patch.setattr(partners, "Claims", FakeClaims)


def without_the_end_of(state: ActivationsState, patch: pytest.MonkeyPatch) -> None:
    """Whatever leads to this state is not waited for: [3] or [7]."""
    finish = Evictor._finish

    def unwaited(self: Evictor, activations: Any, wanted: ActivationsState) -> None:
        if wanted is state:
            activations.pending = Done()
        finish(self, activations, wanted)

    patch.setattr(Evictor, "_finish", unwaited)
