"""The protocol on a device that orders nothing by itself: the real engine, both of its roles, its streams and both
kinds of transport.

Nothing may depend on luck there: whatever nothing orders is reported, on every run. And each wait of the protocol,
taken away, is.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bpipe.ir.action import Action, Kind
from bpipe.ir.memory import num_transfers
from bpipe.ir.program import Op
from bpipe.ir.schedule import Schedule
from bpipe.runtime import streams
from bpipe.runtime.acceptor import ReceivingAcceptor
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.errors import RuntimeFault
from bpipe.runtime.evictor import ActivationsState
from bpipe.runtime.executor import Executor
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.stage import Tensors
from bpipe.runtime.streams import StreamLane, Streams
from bpipe.transport import distributed
from bpipe.transport.base import Done, Transport
from bpipe.transport.distributed import Distributed, PairGroups
from bpipe.transport.one_sided import OneSidedCopies
from tests.support.alone import Alone
from tests.unit.runtime.fake_device import (
    Device,
    FakeDist,
    FakeMemory,
    FakeStorage,
    Machine,
    Microbatch,
    put_under,
    without_the_end_of,
)
from tests.unit.runtime.loop import schedule
from tests.unit.transport.loopback import controls

CUDA = torch.device("cuda")
KINDS = ["one-sided", "two-sided"]
ITERATIONS = 3


class Way:
    """Host buffers on another device, there when they are asked for."""

    lends = False

    def __init__(self, machine: Machine) -> None:
        self._device = machine.device("acceptor")
        self._regions: list[FakeMemory] = []

    def announce(self, sizes: object) -> Done:
        return Done()

    def grow(self, nbytes: int) -> None:
        self._regions.append(FakeMemory(self._device, nbytes))

    def region(self, piece: int) -> FakeMemory:
        return self._regions[piece]


def transports(
    kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Transport], Callable[[], list[str]]]:
    """By device, the transports of the two ranks; and what is left over in between when they have ended."""
    if kind == "one-sided":
        # The acceptor of a one-sided transport does nothing: it need not be there.
        return {"evictor": OneSidedCopies(Way(machine), StreamLane(), StreamLane())}, list  # type: ignore[arg-type]
    dist = FakeDist(machine)
    monkeypatch.setattr(distributed, "dist", dist)
    monkeypatch.setattr(distributed, "issue", dist.issue)
    here, there = controls()
    groups: dict[str, Any] = {"evictor": PairGroups(1, "up", "down"), "acceptor": PairGroups(0, "down", "up")}  # type: ignore[arg-type]
    both = {name: Distributed(control, groups[name]) for name, control in zip(groups, (here, there), strict=True)}  # type: ignore[arg-type]
    return dict(both), dist.alone


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    """Put a machine under the runtime."""
    return functools.partial(put_under, monkeypatch)


class Fake:
    """A stage whose forwards and backwards only say on the device what they write and read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._iteration = 0
        self._live: dict[int, Microbatch] = {}

    def forward(self, action: Action, received: Tensors) -> Tensors:
        self._iteration += not self._live and not action.microbatch
        microbatch = self._live[action.microbatch] = Microbatch(self._device, (str(action), self._iteration))
        with self._workspace(action):
            microbatch.forward(self._device)
        output = SimpleNamespace(
            grad_fn=microbatch, detach=lambda: None, untyped_storage=lambda: SimpleNamespace(_cdata=0)
        )
        return (output,)  # type: ignore[return-value]

    def let_go(self, made: Tensors) -> None:
        """Outputs are no memory here."""

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        with self._workspace(action):
            self._live.pop(action.microbatch).backward(self._device)
        return ()

    @contextlib.contextmanager
    def _workspace(self, action: Action) -> Iterator[None]:
        """Memory that lives as long as the operation: what was just freed is written to at once."""
        workspace = FakeStorage(self._device, 1000)
        self._device.machine.issue(self._device.compute, f"workspace of {action}", writes=[workspace.unit()])
        yield
        workspace.resize_(0)

    def backward_input(self, action: Action, gradients: Tensors) -> Tensors:
        raise AssertionError(f"{action} is half of a backward")

    def backward_weight(self, action: Action) -> None:
        raise AssertionError(f"{action} is half of a backward")


def program(plan: Schedule, rank: int, engine: Engine, device: Device) -> Iterator[None]:
    """The rank's loop; between two computations another rank's host may go on."""
    executor = Executor(plan, rank, Fake(device), Alone())
    for _ in range(ITERATIONS):
        for instruction in executor.walk(engine):
            if instruction.op is Op.RUN:
                yield


def run(
    kind: str,
    plan: Schedule,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    synchronous: bool = False,
    recorder: Any = None,
) -> list[str]:
    """All findings of some iterations, the hosts of the two ranks taking turns at random."""
    ends, left_over = transports(kind, machine, monkeypatch)
    ranks = {"evictor": 0, "acceptor": len(plan.ranks) - 1}
    programs = {}
    for name, end in ends.items():
        machine.on = machine.device(name)
        config = EngineConfig(name, CUDA, minimum_bytes=1, timeout_s=1.0, poison=True, synchronous=synchronous)
        engine = Engine(plan, ranks[name], end, config)
        engine.recorder = recorder
        programs[name] = program(plan, ranks[name], engine, machine.on)
    take_turns(programs, machine, seed)
    return machine.findings() + left_over()


def take_turns(programs: dict[str, Iterator[None]], machine: Machine, seed: int) -> None:
    """The acceptor's host blocks once, for the sizes: not before they are known, which is when the evictor's second
    operation begins."""
    chance = random.Random(seed)
    for _ in range(3):
        advance(programs, "evictor", machine)
    while programs:
        advance(programs, chance.choice(sorted(programs)), machine)


def places_of_waits(machine: Machine, acceptor: type[Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the acceptor's rank waits for a transfer, by the stream, or by "end", an iteration's.

    Counted while it runs.
    """
    places: Counter[str] = Counter()
    ending: list[bool] = []
    post, end = FakeDist._post, acceptor.end

    def watched_post(self: FakeDist, operation: str, buffer: Any, group: str) -> Any:
        work = post(self, operation, buffer, group)

        def wait() -> None:
            if machine.on.name == "acceptor":
                places["end" if ending else machine.on.current.name] += 1
            work.wait()

        return SimpleNamespace(wait=wait)

    def watched_end(self: Any) -> None:
        ending.append(True)
        end(self)
        ending.clear()

    monkeypatch.setattr(FakeDist, "_post", watched_post)
    monkeypatch.setattr(acceptor, "end", watched_end)
    return places


def test_no_computation_of_an_acceptor_waits_for_a_host_buffer(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[8] What waits for a host buffer is the stream of the next transfer into or out of it.

    Only at an iteration's end all of it waits.
    """
    machine = Machine()
    fakes(machine)
    places = places_of_waits(machine, ReceivingAcceptor, monkeypatch)
    assert run("two-sided", schedule(6, 12), machine, monkeypatch) == []
    assert set(places) > {"end"}
    assert "compute stream" not in places, places


def test_a_wait_beside_the_computation_holds_nothing_up(fakes: Callable[[Machine], None]) -> None:
    """The record's exposed time is what the computation stood still for."""
    machine = Machine()
    fakes(machine)
    beside, clock = Streams(CUDA), streams.Clock(CUDA)
    recorder = Recorder(clock)
    waited = {}
    for action, stream in (
        (Action(0, Kind.HOST, 1), beside.inbound()),
        (Action(0, Kind.EVICT, 1), contextlib.nullcontext()),
    ):
        recorder.started(action, host_buffer=0)
        with stream:
            recorder.waited(action, recorder.mark(), Done())
        waited[action.kind] = recorder._transfers[action].waited is not None
        assert recorder._transfers[action].end is not None
    assert waited == {Kind.HOST: False, Kind.EVICT: True}


def test_a_lane_of_its_own_starts_behind_what_the_computation_was_given(fakes: Callable[[Machine], None]) -> None:
    """It reads what the computation makes; what is given to the computation afterwards need not wait for it."""
    machine = Machine()
    fakes(machine)
    lane, made = streams.beside(CUDA, 1.0), ("logits", 0)
    machine.issue(machine.on.current, "forward", writes=[made])
    done = lane.run(lambda: machine.issue(machine.on.current, "second step", reads=[made]) and None)
    machine.issue(machine.on.current, "next forward", reads=[made])
    assert machine.findings() == []
    done.wait()
    machine.issue(machine.on.current, "backward", writes=[made])
    assert machine.findings() == []


def advance(programs: dict[str, Iterator[None]], name: str, machine: Machine) -> None:
    machine.on = machine.device(name)
    try:
        next(programs[name])
    except StopIteration:
        del programs[name]


@pytest.mark.parametrize("one_connection", [False, True], ids=["many connections", "one connection"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 4), (5, 9), (6, 12), (8, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_ordered(
    kind: str, p: int, m: int, one_connection: bool, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        machine = Machine(one_connection)
        fakes(machine)
        assert run(kind, schedule(p, m), machine, monkeypatch, seed) == []


@pytest.mark.parametrize("kind", KINDS)
def test_synchronous_transfers_are_ordered_too(
    kind: str, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    fakes(machine)
    assert run(kind, schedule(6, 12), machine, monkeypatch, synchronous=True) == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_more_memory_is_asked_for_after_the_first_iteration(
    kind: str, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an eviction frees is what the next forward and the next load take."""
    asked = []
    monkeypatch.setattr(
        Engine,
        "end",
        lambda engine, end=Engine.end: (asked.append(machine.devices["evictor"].asked_of_the_driver), end(engine)),
    )
    machine = Machine()
    fakes(machine)
    run(kind, schedule(6, 12), machine, monkeypatch)
    assert len(set(asked)) == 1


def test_copies_are_timed_only_where_an_iteration_is_recorded(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all streams share one queue, each mark of time holds up what is behind it; there were two a transfer,
    for nobody."""
    plan, counts = schedule(4, 8), num_transfers(schedule(4, 8), 0)
    for recorded in (False, True):
        machine = Machine()
        fakes(machine)
        # A recorder without a clock: the marks that are left are the copies' own.
        assert run("one-sided", plan, machine, monkeypatch, recorder=MagicMock() if recorded else None) == []
        marks = [node.label for node in machine.nodes if node.label.startswith("mark of time")]
        assert len(marks) == recorded * ITERATIONS * 2 * (counts.evictions + counts.loads)


# -- each wait, taken away
# --------------------------------------------------------------------------------------------------------------


def without_waiting_for_compute(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """[1] or [5]."""

    @contextlib.contextmanager
    def only_the_stream(self: Any) -> Iterator[None]:
        with streams.current(self._outbound if direction == "outbound" else self._inbound):
            yield

    monkeypatch.setattr(Streams, direction, only_the_stream)


def without_the_last_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """[8]."""
    lane_run = StreamLane.run
    monkeypatch.setattr(StreamLane, "run", lambda self, job, after=(): lane_run(self, job))


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "[1] a put without waiting for the forward": (
        lambda patch: without_waiting_for_compute("outbound", patch),
        "not ordered behind forward of",
    ),
    "[3] freed before the put has ended": (
        lambda patch: without_the_end_of(ActivationsState.AWAY, patch),
        "not ordered behind",
    ),
    "[5] a get into memory that compute still uses": (
        lambda patch: without_waiting_for_compute("inbound", patch),
        "not ordered behind",
    ),
    "[7] a backward without its load": (lambda patch: without_the_end_of(ActivationsState.HERE, patch), "backward of"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_wait_is_reported(
    name: str, kind: str, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    fakes(machine)
    breaking, message = BROKEN[name]
    breaking(monkeypatch)
    findings = run(kind, schedule(4, 8), machine, monkeypatch)
    assert any(message in finding for finding in findings), findings[:3]


def test_a_host_buffer_filled_again_before_it_was_read_is_reported(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[8]. With six stages a host buffer is filled again before the backward that its last load was for."""
    machine = Machine()
    fakes(machine)
    without_the_last_transfer(monkeypatch)
    findings = run("one-sided", schedule(6, 12), machine, monkeypatch)
    assert any("put" in finding and "not ordered behind get" in finding for finding in findings), findings[:3]


def test_an_acceptor_that_does_not_wait_for_its_host_buffer_is_refused(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """[8], two-sided: the buffer's states tell before its memory can."""
    machine = Machine()
    fakes(machine)
    monkeypatch.setattr(ReceivingAcceptor, "_settle", lambda self, buffer: None)
    with pytest.raises(
        RuntimeFault,
        match=r"host buffer \d+, holding 0HOST\d+: FILLING -> EMPTYING on 0RETURN\d+.* is a wait missing\?",
    ):
        run("two-sided", schedule(6, 12), machine, monkeypatch)


def test_opposite_orders_on_the_two_ends_are_a_deadlock(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a communicator does when its two ends do not agree: the fake must be able to see it."""
    machine = Machine()
    fakes(machine)
    dist = FakeDist(machine)
    here, there = FakeMemory(machine.on, 100), FakeMemory(machine.device("acceptor"), 100)
    for name, memory, order in (("evictor", here, ("one", "two")), ("acceptor", there, ("two", "one"))):
        machine.on = machine.device(name)
        for group in order:
            operation = dist.isend if name == "evictor" else dist.irecv
            dist.issue(operation, [memory.narrow(0, 0, 10)], 0, group)[0].wait()  # type: ignore[list-item]
    assert [finding.split(":")[0] for finding in machine.findings()] == ["deadlock"]
