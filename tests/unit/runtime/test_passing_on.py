"""A rank that passes on: slots that refuse every step but the next, two buffers on its device, and what goes back next there ahead."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bpipe.check.deadlock import Waits, blocked_ranks
from bpipe.check.rules import check
from bpipe.ir.action import Action, Kind
from bpipe.ir.host_buffers import STAGING, num_host_buffers, num_own_buffers, num_passed_on, passed_on_for, returned_to
from bpipe.ir.hosts import OWN_MEMORY, through
from bpipe.ir.memory import counts_of, peak_counts
from bpipe.ir.schedule import Schedule
from bpipe.passes.pool import leaving, with_hosts
from bpipe.passes.room import Rooms
from bpipe.program import BalanceConfig, ScheduleConfig, build
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.runtime.passing_on import PassingAcceptor
from bpipe.runtime.streams import copying_on
from bpipe.transport.base import Done, Pending
from bpipe.transport.host_memory import Budget, Buffers, Neighbour, Room
from bpipe.transport.layout import aligned
from bpipe.transport.one_sided import Host, Reaching
from bpipe.transport.passing import Passing
from tests.unit.runtime.pipeline import in_one_piece
from tests.unit.runtime.threaded import Pipeline
from tests.unit.transport.loopback import AtOnce

CPU = torch.device("cpu")
LENGTHS = (600, 40)
SIZE = sum(map(aligned, LENGTHS))


def hosting(microbatch: int, stage: int = 0) -> Action:
    return Action(stage, Kind.HOST, microbatch)


def returning(microbatch: int, stage: int = 0) -> Action:
    return Action(stage, Kind.RETURN, microbatch)


class Noted:
    """A transport that notes what it is asked for, and with which memory."""

    one_sided = False

    def __init__(self, sizes: dict[int, Sequence[int]]) -> None:
        self._sizes = [{stage: lengths} for stage, lengths in sizes.items()]
        self.asked: list[str] = []
        self.memory: dict[str, set[int]] = {"coming": set(), "going": set()}

    def reach(self, layout: object) -> None:
        """Nothing lies anywhere."""

    def learn(self) -> dict[int, Sequence[int]]:
        return self._sizes.pop(0)

    def host(self, slot: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._note("host", slot, "coming", tensors)

    def bring(self, slot: int, tensors: Sequence[torch.Tensor]) -> None:
        self._note("bring", slot, "going", tensors)

    def give_back(self, slot: int, tensors: Sequence[torch.Tensor]) -> Pending:
        return self._note("give back", slot, "going", tensors)

    def _note(self, what: str, slot: int, way: str, tensors: Sequence[torch.Tensor]) -> Pending:
        self.asked.append(f"{what} {slot}")
        self.memory[way].add(tensors[0].data_ptr())
        return Done()


class AnyStreams:
    """In order by themselves."""

    def inbound(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    outbound = inbound


class Rank:
    """One that passes on, what its transport was asked for, and what was waited for."""

    def __init__(self, returns: Sequence[int], num_slots: int = 2, sizes: dict[int, Sequence[int]] | None = None) -> None:
        self.transport, self.waited = Noted(sizes or {0: LENGTHS}), list[Action]()
        roles: Any = (self.transport, AnyStreams(), CPU, lambda pending, action, state: self.waited.append(action))
        stages = frozenset(sizes or {0: LENGTHS})
        self.acceptor = PassingAcceptor([stages] * num_slots, [(0, microbatch) for microbatch in returns], *roles)
        self.acceptor.hear(hosting(0), len(stages))

    def asked(self) -> list[str]:
        asked, self.transport.asked = self.transport.asked, []
        return asked


def test_what_goes_back_next_is_brought_ahead_and_nothing_else() -> None:
    rank = Rank(returns=(1, 0, 2), num_slots=3)
    rank.acceptor.host(hosting(0), 0)
    assert rank.asked() == ["host 0"]
    rank.acceptor.host(hosting(1), 1)
    assert rank.asked() == ["host 1", "bring 1"]
    rank.acceptor.host(hosting(2), 2)
    assert rank.asked() == ["host 2"]
    rank.acceptor.give_back(returning(1), 1)
    assert rank.asked() == ["give back 1", "bring 0"]
    rank.acceptor.give_back(returning(0), 0)
    rank.acceptor.give_back(returning(2), 2)
    assert rank.asked() == ["give back 0", "bring 2", "give back 2"]
    rank.acceptor.end()
    assert rank.waited == [hosting(0), hosting(1), hosting(2), returning(1), returning(0), returning(2)]
    # The next iteration is the same.
    rank.acceptor.host(hosting(0), 0)
    assert rank.asked() == ["host 0"]


def test_all_pass_through_two_buffers() -> None:
    rank = Rank(returns=range(4), num_slots=2)
    for first in (0, 2):
        rank.acceptor.host(hosting(first), 0)
        rank.acceptor.host(hosting(first + 1), 1)
        rank.acceptor.give_back(returning(first), 0)
        rank.acceptor.give_back(returning(first + 1), 1)
    coming, going = rank.transport.memory["coming"], rank.transport.memory["going"]
    assert len(coming) == len(going) == 1
    assert coming != going
    assert (rank.acceptor.num_host_buffers, rank.acceptor.host_buffer_bytes) == (STAGING, STAGING * SIZE)
    assert rank.acceptor.slots == (2, 2 * SIZE)
    assert rank.acceptor.moved_bytes == {0: sum(LENGTHS)}
    assert not rank.acceptor.is_scattered
    rank.acceptor.release()
    assert (rank.acceptor.num_host_buffers, rank.acceptor.host_buffer_bytes, rank.acceptor.slots) == (0, 0, (0, 0))


def test_a_larger_stage_that_is_measured_later_gets_room_in_both() -> None:
    """What is on the device already is sent from where it is."""
    rank = Rank(returns=(0,), sizes={0: (100,), 3: (5000,)})
    del rank.acceptor._hearing.sizes[3]
    rank.acceptor.host(hosting(0), 0)
    rank.acceptor._hearing.sizes[3] = (5000,)
    rank.acceptor.host(hosting(1, stage=3), 1)
    rank.acceptor.give_back(returning(0), 0)
    assert len(rank.transport.memory["coming"]) == 2
    assert len(rank.transport.memory["going"]) == 1
    assert rank.acceptor.is_scattered
    rank.acceptor.let_go()
    assert not rank.acceptor.is_scattered


def test_of_what_has_no_storages_nothing_travels() -> None:
    rank = Rank(returns=(0,), sizes={0: ()})
    rank.acceptor.host(hosting(0), 0)
    rank.acceptor.give_back(returning(0), 0)
    rank.acceptor.end()
    assert rank.asked() == []
    assert rank.acceptor.num_host_buffers == 0


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            lambda acceptor: acceptor.give_back(returning(5), 0),
            "slot 0 of the node's memory, holding None: FREE -> FREE on 0RETURN5, but only KEPT may follow FREE; is a wait missing",
        ),
        (
            lambda acceptor: [acceptor.host(hosting(1), 0), acceptor.host(hosting(2), 0)],
            "slot 0 of the node's memory, holding 0HOST1: KEPT -> KEPT on 0HOST2, but only AHEAD may follow KEPT",
        ),
        (
            lambda acceptor: [acceptor.host(hosting(1), 0), acceptor.give_back(returning(1), 0)],
            "holding 0HOST1: KEPT -> FREE on 0RETURN1, but only AHEAD may follow KEPT",
        ),
        (
            lambda acceptor: [acceptor.host(hosting(0), 0), acceptor.host(hosting(1), 0)],
            "holding 0HOST0: AHEAD -> KEPT on 0HOST1, but only FREE may follow AHEAD",
        ),
    ],
)
def test_any_other_step_is_refused(does: Callable[[PassingAcceptor], object], message: str) -> None:
    with pytest.raises(RuntimeFault, match=message):
        does(Rank(returns=(0, 1)).acceptor)


def test_what_was_not_given_back_is_named_at_the_end() -> None:
    rank = Rank(returns=(0, 1))
    rank.acceptor.host(hosting(0), 0)
    with pytest.raises(TransferError, match="slot 0 of the node's memory still holds 0HOST0 at the end of the iteration: its RETURN is"):
        rank.acceptor.end()
    rank.acceptor.abandon()


# -- with all else ------------------------------------------------------------------------------------------------------------------------


def by_ports(name: str, p: int, m: int, v: int, bound: int) -> Schedule:
    return build(ScheduleConfig(name, p, m, v, balance=BalanceConfig((bound,), hosts="ports")))


SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "1f1b": lambda: by_ports("1f1b", 4, 8, 1, 3),
    "of eight, three pass on": lambda: by_ports("1f1b", 8, 16, 1, 5),
    "one passes on for one of five": lambda: by_ports("1f1b", 8, 16, 1, 3),
    "chunks": lambda: by_ports("interleaved-1f1b", 4, 8, 2, 8),
    "groups": lambda: by_ports("grouped-interleaved", 8, 16, 2, 9),
    "halves": lambda: by_ports("1f1b-split", 4, 8, 1, 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_model_in_one_piece(name: str) -> None:
    """Freed and refilled memory is poisoned. Devices hold what the schedule says, and memory what it counts."""
    schedule = SCHEDULES[name]()
    pipeline = Pipeline(schedule, "two-sided", timeout_s=20.0)
    found = pipeline.run(3, release=False)
    ranks = range(schedule.num_ranks)
    passing = [rank for rank in ranks if passed_on_for(schedule, rank)]
    assert passing
    for rank in ranks:
        engine = pipeline.engines[rank]
        assert engine.num_host_buffers == num_host_buffers(schedule, rank) == STAGING * (rank in passing)
        assert (engine.passed_on[0], engine.own_memory[0]) == (num_passed_on(schedule, rank), num_own_buffers(schedule, rank))
        # All buffers are as large as the largest of the stages that use them; here all are alike.
        sizes = {engine.host_bytes // STAGING, engine.passed_on[1] // engine.passed_on[0]} if rank in passing else {0}
        assert len(sizes) == 1
        assert pipeline.meters[rank].peak_microbatches == peak_counts(schedule)[rank] + engine.num_host_buffers
    assert all(map(torch.equal, found, in_one_piece(schedule.num_stages, schedule.num_microbatches, 3)))
    pipeline.run(1)


def sent(through_of: dict[int, int]) -> Schedule:
    """Of 1F1B in which ranks 0 and 1 keep two, every second of a rank's goes through the one that is named for it."""
    plain = build(ScheduleConfig("1f1b", 4, 8))
    memory = counts_of(plain)
    rooms = Rooms((6 * memory.parts,) * 4, memory)
    plans, _ = leaving(plain, Rooms((2 * memory.parts,) * 4, memory))
    host_of = {}
    for rank, plan in plans.items():
        left = [action for _, actions in sorted(plan.items()) for action in actions if action.kind is Kind.EVICT]
        for number, one in enumerate(left):
            host_of[one.stage, one.microbatch] = through(through_of[rank]) if number % 2 and rank in through_of else OWN_MEMORY
    return with_hosts(plain, plans, host_of, rooms)


def test_who_passes_on_may_have_transfers_of_its_own_and_pass_on_for_several() -> None:
    """No family's plan has that, a file may: all go their own ways at once."""
    for through_of, passing in (({0: 1}, 1), ({0: 3, 1: 3}, 3)):
        schedule = sent(through_of)
        check(schedule)
        pipeline = Pipeline(schedule, "two-sided", timeout_s=20.0)
        found = pipeline.run(3, release=False)
        assert all(map(torch.equal, found, in_one_piece(4, 8, 3)))
        engine = pipeline.engines[passing]
        assert engine.num_host_buffers == num_host_buffers(schedule, passing) == STAGING * len(through_of)
        assert engine.passed_on[0] == num_passed_on(schedule, passing)
        assert engine.own_memory[0] == num_own_buffers(schedule, passing) == (2 if passing == 1 else 0)
        pipeline.run(1)


@pytest.mark.parametrize("waits", Waits)
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_do_not_wait_for_each_other(name: str, waits: Waits) -> None:
    assert blocked_ranks(SCHEDULES[name](), waits) == ()


def engine_of(schedule: Schedule, **how: Any) -> Engine:
    config = EngineConfig("rank 1", CPU, minimum_bytes=1, timeout_s=1.0, **how)
    return Engine(schedule, 1, None, config)


def test_sizes_that_differ_are_refused_with_the_reason() -> None:
    """By every rank alike: one that waits for another's message would learn of it only by a time-out."""
    message = (
        r"rank 1: what leaves stage 0 goes through stage 3 into a node's memory \(host via3\), and micro-batches differ in size: stage 3"
    )
    with pytest.raises(ValueError, match=message):
        engine_of(SCHEDULES["1f1b"](), differing=True)


def test_who_passes_on_may_not_send_to_whom_it_does_that_for() -> None:
    with pytest.raises(ValueError, match=r"\(host via0\), and stage 0 sends to stage 1, too: .*Let it send to another rank"):
        engine_of(sent({0: 1, 1: 0}))


def test_errors_name_the_way() -> None:
    pipeline = Pipeline(SCHEDULES["1f1b"](), "two-sided", timeout_s=1.0)
    here, there = (pipeline.engines[rank]._partners for rank in (0, 3))
    ways = {here.named(Action(0, Kind.LOAD, microbatch)) for _, microbatch in returned_to(pipeline.schedule, 3, 0)}
    assert ways == {"a node's memory through stage 3"}
    assert there.named(Action(0, Kind.RETURN, 3)) == "stage 0"
    pipeline.close()


def test_a_node_without_room_for_what_is_passed_on_is_refused_with_the_numbers() -> None:
    """Another rank's one slot and the evictor's own buffer share 100 bytes."""
    schedule = SCHEDULES["1f1b"]()
    room = Room("machine", "the machine's memory (MemAvailable)", 100)
    counts = [num_own_buffers(schedule, rank) + num_passed_on(schedule, rank) for rank in range(4)]
    neighbours = [Neighbour(Buffers(count), (room,)) for count in counts]
    memory = Reaching(Host(copying_on(CPU), Budget(neighbours[3], neighbours), "--bpipe-hosts", "Let less leave"), AtOnce(), AtOnce())
    pipeline = Pipeline(schedule, "two-sided", timeout_s=2.0)
    inner = pipeline.engines[3]._partners._transports[0]
    assert isinstance(inner, Passing)
    passing = Passing(inner._inner, memory, AtOnce(), AtOnce())
    pipeline.engines[3] = Engine(schedule, 3, {0: passing}, EngineConfig("rank 3", CPU, 1, 2.0))
    pattern = (
        r"rank 3, stage 3: 0HOST\d with stage 0 did not start; .*--bpipe-hosts: the host buffers of 2 ranks would take .* GiB, and of the "
        r"machine's memory \(MemAvailable\) .* GiB are available, a tenth of which stays free\. Let less leave, move less"
    )
    with pytest.raises((TransferError, TimeoutError)) as error:
        pipeline.run(1)
    assert re.search(pattern, str(error.value)), str(error.value)


def test_a_partner_that_never_sends_is_named_within_the_time_out() -> None:
    """The host does not wait before the iteration's end; then it says which transfer, with whom."""
    schedule = SCHEDULES["1f1b"]()
    pipeline = Pipeline(schedule, "two-sided", timeout_s=0.3)
    acceptor = pipeline.engines[3]._acceptor
    assert isinstance(acceptor, PassingAcceptor)
    acceptor._hearing.sizes[0] = LENGTHS
    stage, microbatch = returned_to(schedule, 3, 0)[0]
    acceptor.host(hosting(microbatch, stage), 0)
    acceptor.give_back(returning(microbatch, stage), 0)
    with pytest.raises(
        TransferError, match=rf"rank 3, stage 3: 0HOST{microbatch} with stage 0 did not end \(it was coming to be passed on\)"
    ):
        acceptor.end()
    pipeline.close()
