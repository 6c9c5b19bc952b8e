"""All ranks of a schedule on devices that order nothing by themselves: executor, engine, edges and transports are the
real ones.

In: a schedule. Out: everything that is wrong with the order of what their devices were given, in words. A host runs
ahead of its device and of the other hosts; it blocks only where a real one does, for a message of the control group, as
the first of its sort is. One host is at work at a time, and whose turn is next is drawn by lot.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.ir.action import Action, Kind
from bpipe.ir.memory import num_transfers
from bpipe.ir.schedule import Schedule
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.executor import Executor, neighbours
from bpipe.runtime.streams import StreamLane
from bpipe.transport import distributed, edges, shapes
from bpipe.transport.distributed import Distributed, PairGroups
from bpipe.transport.edges import Edge, Edges
from bpipe.transport.one_sided import OneSidedCopies, Peer
from tests.unit.runtime.fake_device import (
    Device,
    FakeDist,
    FakeMemory,
    FakeStorage,
    FakeTensor,
    Machine,
    Node,
    Unit,
    Values,
    put_under,
)

CUDA = torch.device("cuda")
ITERATIONS = 2


class Stuck(RuntimeError):
    """Every host waits for another one."""


class Turns:
    """Threads, of which one runs at a time."""

    def __init__(self, machine: Machine, ranks: int, seed: int) -> None:
        self.machine, self._chance = machine, random.Random(seed)
        self._condition = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {rank: lambda: True for rank in range(ranks)}
        self._now = -1
        self._error: Exception | None = None
        self._me = threading.local()

    def run(self, does: Callable[[int], None]) -> None:
        """`does(rank)` for all, in turns. Raises the first error."""
        threads = [threading.Thread(target=self._rank, args=(rank, does), daemon=True) for rank in self._waiting]
        for thread in threads:
            thread.start()
        with self._condition:
            self._next()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        if self._error is not None:
            raise self._error

    def _rank(self, rank: int, does: Callable[[int], None]) -> None:
        self._me.rank = rank
        try:
            with self._condition:
                self._condition.wait_for(lambda: self._now == rank or self._error is not None)
            if self._error is None:
                does(rank)
        except Exception as error:
            self._error = self._error or error
        with self._condition:
            self._waiting.pop(rank, None)
            self._next()

    def until(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on; come back when `ready`."""
        rank = self._me.rank
        with self._condition:
            self._waiting[rank] = ready
            self._next()
            self._condition.wait_for(lambda: self._now == rank or self._error is not None)
        if self._error is not None:
            raise Stuck from self._error

    def _next(self) -> None:
        able = [rank for rank, ready in sorted(self._waiting.items()) if ready()]
        if able:
            self._now = self._chance.choice(able)
            self.machine.on = self.machine.device(f"rank {self._now}")
        elif self._waiting:
            self._error = self._error or Stuck(f"ranks {sorted(self._waiting)} wait for each other")
        self._condition.notify_all()


class FakeControl:
    """One end of a pair's control group: a host blocks until the other one has sent, or heard."""

    def __init__(self, turns: Turns, outbox: defaultdict[Any, deque[Any]], inbox: defaultdict[Any, deque[Any]]) -> None:
        self._turns, self._outbox, self._inbox = turns, outbox, inbox

    def send(self, about: object, value: Any) -> Any:
        mail = self._outbox[about]
        mail.append(value)
        return SimpleNamespace(wait=lambda: self._turns.until(lambda: value not in mail))

    def receive(self, about: object) -> Any:
        self._turns.until(lambda: bool(self._inbox[about]))
        return self._inbox[about].popleft()

    def send_tensors(self, about: object, tensors: Any) -> Any:
        """The host reads them, behind what its compute stream was given."""
        machine = self._turns.machine
        read = [
            (machine.issue(machine.on.compute, "read by the host", [tensor.place()]), tensor.place())
            for tensor in tensors
        ]
        self._outbox[about].append(read)
        return SimpleNamespace(wait=lambda: None)

    def receive_tensors(self, about: object) -> Any:
        machine = self._turns.machine
        return tuple(self._written(machine, node, source) for node, source in self.receive(about))

    def _written(self, machine: Machine, read: Node, source: Unit) -> Any:
        tensor = FakeTensor(machine.on)
        carried: list[object] = []
        read.effect = lambda values: carried.append(values.get(source))
        machine.on.compute.waits.append(read)
        target = tensor.place()
        machine.issue(
            machine.on.compute, "written by the host", [], [target], lambda values: values.update({target: carried[0]})
        )
        tensor.to = lambda device: tensor  # type: ignore[attr-defined]
        return tensor


class FakeLender:
    """Memory of one device that another reaches into."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def make(self, nbytes: int) -> tuple[Any, FakeMemory]:
        region = FakeMemory(self._machine.on, nbytes)
        return {"region": region}, region

    def open(self, handle: Any) -> FakeMemory:
        region: FakeMemory = handle["region"]
        return region


class Saved:
    """What a forward of a stage keeps: what it received, and storages of its own; and what comes between the halves
    of its backward."""

    def __init__(self, device: Device, received: FakeTensor | None) -> None:
        self.received = received
        self.own = [FakeStorage(device, 1000 * (number + 1)) for number in range(3)]
        self.gradient: FakeTensor | None = None

    @property
    def storages(self) -> list[FakeStorage]:
        return [*([self.received.storage] if self.received else []), *self.own]

    def free(self, *places: int) -> None:
        for place in places:
            self.own[place].resize_(0)


class FakeStages:
    """The stages of a rank. Each computation says on the device what it reads and writes, and knows what it ought to
    read."""

    def __init__(self, device: Device, last: int) -> None:
        self._device, self._last = device, last
        self._live: dict[tuple[int, int], Saved] = {}
        self.iteration = 0

    def forward(self, action: Action, received: Any) -> Any:
        saved = self._live[action.stage, action.microbatch] = Saved(self._device, *received or (None,))
        expected = {unit: self._output(action.stage - 1, action.microbatch) for unit in _units([saved.received])}
        made = FakeTensor(self._device)
        made.grad_fn = saved
        written = dict.fromkeys((storage.unit() for storage in saved.own), self._saved(action))
        self._issue(action, expected, {**written, made.place(): self._output(action.stage, action.microbatch)})
        return (made,)

    def let_go(self, made: Any) -> None:
        for tensor in made:
            tensor.let_go()

    def backward(self, action: Action, gradients: Any) -> Any:
        return self._back(action, gradients, whole=True)

    def backward_input(self, action: Action, gradients: Any) -> Any:
        return self._back(action, gradients, whole=False)

    def _back(self, action: Action, gradients: Any, whole: bool) -> Any:
        key = action.stage, action.microbatch
        saved = self._live[key]
        expected = self._all_saved(action, saved) | {
            unit: self._gradient(action.stage + 1, action.microbatch) for unit in _units(gradients)
        }
        made = (FakeTensor(self._device),) if action.stage else ()
        self._issue(
            action, expected, {tensor.place(): self._gradient(action.stage, action.microbatch) for tensor in made}
        )
        if whole:
            del self._live[key]
            saved.free(0, 1, 2)
        else:
            # The weights' half needs what came in, from both sides, and one of the others.
            saved.gradient = gradients[0] if gradients else None
            saved.free(0, 1)
        return made

    def backward_weight(self, action: Action) -> None:
        saved = self._live.pop((action.stage, action.microbatch))
        expected = {saved.own[2].unit(): self._saved(action)}
        expected |= {unit: self._output(action.stage - 1, action.microbatch) for unit in _units([saved.received])}
        expected |= {unit: self._gradient(action.stage + 1, action.microbatch) for unit in _units([saved.gradient])}
        self._issue(action, expected, {})
        saved.free(2)

    def _issue(self, action: Action, expected: dict[Unit, object], written: dict[Unit, object]) -> None:
        """One computation, in memory of its own besides: what was just freed is written to at once."""
        device = self._device
        workspace = FakeStorage(device, 1000)

        def run(values: Values) -> None:
            device.machine.wrong += [
                f"{action} reads {values.get(unit)} for {value}"
                for unit, value in expected.items()
                if values.get(unit) != value
            ]
            values.update(written)

        device.machine.issue(device.compute, str(action), [*expected], [*written, workspace.unit()], run)
        workspace.resize_(0)

    def _all_saved(self, action: Action, saved: Saved) -> dict[Unit, object]:
        own = dict.fromkeys((storage.unit() for storage in saved.own), self._saved(action))
        return own | {unit: self._output(action.stage - 1, action.microbatch) for unit in _units([saved.received])}

    def _saved(self, action: Action) -> object:
        return "saved", action.stage, action.microbatch, self.iteration

    def _output(self, stage: int, microbatch: int) -> object:
        return "output", stage, microbatch, self.iteration

    def _gradient(self, stage: int, microbatch: int) -> object:
        return "gradient", stage, microbatch, self.iteration


def _units(tensors: Any) -> list[Unit]:
    return [tensor.place() for tensor in tensors if tensor is not None]


@contextmanager
def fakes(machine: Machine, turns: Turns) -> Iterator[FakeDist]:
    """A machine under the runtime."""
    dist = FakeDist(machine)

    with pytest.MonkeyPatch.context() as patch:
        put_under(patch, machine)
        patch.setattr(shapes, "torch", SimpleNamespace(empty=lambda shape, dtype, device: FakeTensor(machine.on)))
        patch.setattr(edges, "dist", dist)
        patch.setattr(distributed, "dist", dist)
        patch.setattr(distributed, "issue", dist.issue)
        yield dist


class Ranks:
    """Engines and executors of all ranks on one machine."""

    def __init__(self, schedule: Schedule, kind: str, machine: Machine, turns: Turns) -> None:
        self._schedule, self._machine, self._turns = schedule, machine, turns
        self.transports: dict[int, Any] = {}
        for rank, partner in enumerate(schedule.partners or ()):
            if rank < partner and any(num_transfers(schedule, each).evictions for each in (rank, partner)):
                self._pair(kind, rank, partner)
        self._edges: dict[int, dict[int, Edge]] = defaultdict(dict)
        for low, high in neighbours(schedule):
            up, down = f"edge {low} to {high}", f"edge {high} to {low}"
            there, back = self._controls()
            self._edges[low][high] = Edge(PairGroups(high, up, down), there)  # type: ignore[arg-type]
            self._edges[high][low] = Edge(PairGroups(low, down, up), back)  # type: ignore[arg-type]

    def _controls(self) -> tuple[Any, Any]:
        mail: tuple[Any, Any] = defaultdict(deque), defaultdict(deque)
        return FakeControl(self._turns, *mail), FakeControl(self._turns, *reversed(mail))

    def _pair(self, kind: str, rank: int, partner: int) -> None:
        here, there = self._controls()
        up, down = f"pair {rank} to {partner}", f"pair {partner} to {rank}"
        for own, other, control, sending, receiving in (
            (rank, partner, here, up, down),
            (partner, rank, there, down, up),
        ):
            groups = PairGroups(other, sending, receiving)  # type: ignore[arg-type]
            lender: Any = FakeLender(self._machine)
            self.transports[own] = (
                OneSidedCopies(Peer(control, lender), StreamLane(), StreamLane())
                if kind == "one-sided"
                else Distributed(control, groups)
            )

    def run(self, rank: int) -> None:
        """All iterations of one rank, in its thread."""
        device = self._machine.on
        config = EngineConfig(f"rank {rank}", CUDA, minimum_bytes=1, timeout_s=1.0, poison=True)
        engine = Engine(self._schedule, rank, self.transports.get(rank), config)
        stages = FakeStages(device, self._schedule.num_stages - 1)
        executor = Executor(self._schedule, rank, stages, Edges(rank, self._edges[rank], CUDA))
        for iteration in range(ITERATIONS):
            stages.iteration = iteration
            for _ in executor.walk(engine):
                self._turns.until()


def findings(schedule: Schedule, kind: str, one_connection: bool = False, seed: int = 0) -> list[str]:
    """Everything that is wrong with some iterations."""
    machine = Machine(one_connection)
    turns = Turns(machine, schedule.num_ranks, seed)
    with fakes(machine, turns) as dist:
        ranks = Ranks(schedule, kind, machine, turns)
        turns.run(ranks.run)
        return machine.findings() + dist.alone()


def splits(schedule: Schedule) -> bool:
    return any(one.kind is Kind.BACKWARD_WEIGHT for row in schedule.ranks for cell in row for one in cell.computations)
