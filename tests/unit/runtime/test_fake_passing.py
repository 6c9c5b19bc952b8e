"""What goes through a rank into its node's memory, on devices that order nothing by themselves: see `test_fake_device`.

The evictor keeps every second micro-batch in its own node's memory; the other rank passes the others on.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

from bpipe.ir.host_buffers import num_passed_on, passed_on_for
from bpipe.ir.schedule import Schedule
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.passing_on import PassingAcceptor
from bpipe.runtime.streams import StreamLane, Streams
from bpipe.transport.base import Transport
from bpipe.transport.one_sided import Reaching
from bpipe.transport.passing import Passing
from tests.unit.runtime.fake_device import Machine, put_under
from tests.unit.runtime.test_fake_device import CUDA, Way, places_of_waits, program, take_turns, transports


def by_ports(p: int = 4, m: int = 8, bound: int = 3) -> Schedule:
    return build(ScheduleConfig("1f1b", p, m, balance=BalanceConfig((bound,), hosts="ports")))


def helper_of(plan: Schedule) -> int:
    """The rank that passes on for rank 0."""
    return next(rank for rank in range(plan.num_ranks) if 0 in passed_on_for(plan, rank))


# One slot, two, and three; more micro-batches than slots.
PLANS = {"one slot": by_ports(m=12), "two slots": by_ports(8, 16, 5), "three slots": by_ports(8, 16, 3)}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    return functools.partial(put_under, monkeypatch)


def memory(machine: Machine) -> Reaching:
    """A node's memory, reached by whatever stream is current."""
    return Reaching(Way(machine), StreamLane(), StreamLane())  # type: ignore[arg-type]


def ends(plan: Schedule, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, Transport]]:
    both, _ = transports("two-sided", machine, monkeypatch)
    inner = both["acceptor"]
    assert not inner.one_sided
    helper = helper_of(plan)
    return {
        "evictor": {0: memory(machine), helper: both["evictor"]},
        "acceptor": {0: Passing(inner, memory(machine), StreamLane(), StreamLane())},
    }


def run(plan: Schedule, machine: Machine, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> list[str]:
    """All findings of some iterations, the hosts of the two ranks taking turns at random."""
    ranks, programs = {"evictor": 0, "acceptor": helper_of(plan)}, {}
    for name, mine in ends(plan, machine, monkeypatch).items():
        machine.on = machine.device(name)
        engine = Engine(plan, ranks[name], mine, EngineConfig(name, CUDA, minimum_bytes=1, timeout_s=1.0, poison=True))
        programs[name] = program(plan, ranks[name], engine, machine.on)
    take_turns(programs, machine, seed)
    return machine.findings()


def test_the_plans_differ() -> None:
    assert [num_passed_on(plan, helper_of(plan)) for plan in PLANS.values()] == [1, 2, 3]


@pytest.mark.parametrize("one_connection", [False, True], ids=["many connections", "one connection"])
@pytest.mark.parametrize("name", PLANS)
def test_everything_is_ordered(name: str, one_connection: bool, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        machine = Machine(one_connection)
        fakes(machine)
        assert run(PLANS[name], machine, monkeypatch, seed) == []


def test_nothing_of_the_rank_that_passes_on_waits_but_its_own_streams(
    fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its computation nor the streams of its other transfers; only at an iteration's end all of it is waited for."""
    machine = Machine()
    fakes(machine)
    places = places_of_waits(machine, PassingAcceptor, monkeypatch)
    shared: set[str] = set()
    streams_of = Streams.others

    def noted(self: Streams, rank: int) -> Streams:
        shared.update((self._outbound.name, self._inbound.name))  # type: ignore[attr-defined]
        return streams_of(self, rank)

    monkeypatch.setattr(Streams, "others", noted)
    assert run(PLANS["two slots"], machine, monkeypatch) == []
    assert len(set(places)) == 2
    assert not set(places) & {"compute stream", *shared}, places


# -- each wait, taken away --------------------------------------------------------------------------------------------------------------


def without_arriving(patch: pytest.MonkeyPatch) -> None:
    """Copied into the memory before it has come."""
    patch.setattr(Passing, "host", lambda self, slot, tensors: (self._inner.host(slot, tensors), self._memory.put(slot, tensors))[0])


def without_the_last_in_the_slot(patch: pytest.MonkeyPatch) -> None:
    """[8] Brought from a slot, or kept in it, whatever is under way there."""
    lane_run = StreamLane.run
    patch.setattr(StreamLane, "run", lambda self, job, after=(): lane_run(self, job))


def without_having_gone(patch: pytest.MonkeyPatch) -> None:
    """The next is brought into the buffer from which the last is still being sent."""
    patch.setattr(Passing, "give_back", lambda self, slot, tensors: self._inner.give_back(slot, tensors))


def without_waiting_for_compute(patch: pytest.MonkeyPatch) -> None:
    """[5] What comes is written where the computation may have something."""

    @contextlib.contextmanager
    def only_the_stream(self: Any) -> Any:
        from bpipe.runtime import streams

        with streams.torch.cuda.stream(self._inbound):
            yield

    patch.setattr(Streams, "inbound", only_the_stream)


BROKEN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "kept before it has come": (without_arriving, "not ordered behind"),
    "a slot used again too early": (without_the_last_in_the_slot, "not ordered behind"),
    "brought over what is being sent": (without_having_gone, "not ordered behind"),
    "[5]": (without_waiting_for_compute, "not ordered behind"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_wait_is_reported(name: str, fakes: Callable[[Machine], None], monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, message = BROKEN[name]
    for plan in PLANS.values():
        machine = Machine()
        with monkeypatch.context() as patch:
            put_under(patch, machine)
            breaks(patch)
            if any(message in finding for finding in run(plan, machine, patch)):
                return
    pytest.fail("nobody noticed")
