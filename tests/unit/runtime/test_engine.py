"""The engine on a real autograd graph in one process, with poisoned memory and a transport that is as late as possible.

The late transport copies only when its `wait` is called, which is the latest moment the protocol allows. Whatever the
engine frees, fills or reads too early is then wrong every time, not just sometimes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from bpipe.runtime import RuntimeFault, TransferError
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.meter import Meter
from bpipe.runtime.partners import ReceivingAcceptor
from bpipe.runtime.recorder import Recorder, name_of
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.rules import check
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import read_hosts
from bpipe.schedule.memory import live_bytes, memory_of, peak_counts
from bpipe.schedule.schedule import Schedule, Slot
from bpipe.transport.config import TransferConfig
from bpipe.transport.memory import Sizes
from bpipe.transport.streams import Clock, Streams
from tests.unit.runtime.loop import WIDTH, gradient, new_weight, run_iteration, schedule, stage

CPU = torch.device("cpu")


class Late:
    """A transfer that happens when it is waited for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy()


class LateTransport:
    """A two-sided transport without a partner, whose host buffers are a dictionary."""

    one_sided: Literal[False] = False

    def __init__(self) -> None:
        self.taken: dict[int, list[torch.Tensor]] = {}
        self.sizes: dict[int, tuple[int, ...]] = {}

    def announce(self, sizes: Sizes) -> Late:
        self.sizes |= sizes
        return Late(lambda: None)

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(lengths) for stage, lengths in self.sizes.items()}

    def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        return Late(lambda: self.taken.__setitem__(host_buffer, [tensor.clone() for tensor in tensors]))

    def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        def copy() -> None:
            for tensor, stored in zip(tensors, self.taken.pop(host_buffer), strict=True):
                tensor.copy_(stored)

        return Late(copy)

    def host(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        return Late(lambda: None)

    give_back = host

    def release(self) -> None:
        assert not self.taken, f"host buffers {sorted(self.taken)} are still taken"

    abandon = release


def engine_for(
    plan: Schedule,
    transport: LateTransport | None = None,
    meter: Meter | None = None,
    minimum_bytes: int = 1,
    synchronous: bool = False,
    rank: int = 0,
) -> Engine:
    config = EngineConfig(
        f"rank {rank}",
        CPU,
        TransferConfig(minimum_bytes=minimum_bytes, timeout_s=1.0, poison=True, synchronous=synchronous),
    )
    return Engine(plan, rank, transport or LateTransport(), config, meter)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 4), (5, 9), (6, 6), (8, 16), (8, 8), (12, 20)])
def test_gradients_equal_to_the_last_bit(p: int, m: int) -> None:
    plan = schedule(p, m)
    assert torch.equal(gradient(engine_for(plan), plan, 2), gradient(None, plan, 2))


def test_an_engine_knows_whether_its_last_iteration_ended_well() -> None:
    """Only then may a rank wait for its partner at the end of the run: after an error, the partner never comes."""
    plan, engine = schedule(), engine_for(schedule())
    assert engine.ended_well
    gradient(engine, plan)
    assert engine.ended_well
    engine.begin()
    assert not engine.ended_well
    engine.abandon()
    assert not engine.ended_well
    assert engine.where() == "rank 0, stage 0, after the start, at 0F0"


def test_a_schedule_with_transfers_needs_a_transport() -> None:
    with pytest.raises(ValueError, match="there is no transport for them"):
        Engine(schedule(), 0, None, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 12), (8, 16)])
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_measured_peak_is_the_scheduled_one(p: int, m: int, balance: str) -> None:
    plan, meter = schedule(p, m, balance), Meter()
    gradient(engine_for(plan, LateTransport(), meter), plan)
    assert meter.peak_microbatches == peak_counts(plan)[0]
    # Every storage of this stage is movable, so an eviction frees all of a micro-batch. The weight does not count.
    assert meter.peak_bytes == peak_counts(plan)[0] * meter.saved_bytes[0]


def test_nothing_outlives_its_backward() -> None:
    """References in the engine would keep a micro-batch's memory after autograd has released it."""
    plan = schedule()
    engine = engine_for(plan)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    references = []

    def forward(weight: torch.nn.Parameter, received: torch.Tensor) -> torch.Tensor:
        references.append(StorageWeakRef(received.untyped_storage()))
        return stage(weight, received)

    run_iteration(engine, plan, weight, forward=forward)
    gc.collect()
    assert len(references) == 8
    assert all(reference.expired() for reference in references)


def test_another_operation_than_the_programs_is_refused() -> None:
    engine = engine_for(schedule())
    engine.begin()
    with pytest.raises(
        RuntimeFault,
        match=r"rank 0: the program expects 0F0, but the pipeline loop runs 0B0 \(stage 0, after the start, at 0F0\)",
    ):
        engine.before(Action(0, Kind.BACKWARD, 0))


def test_an_iteration_that_stops_early_is_refused() -> None:
    engine = engine_for(schedule())
    engine.begin()
    with pytest.raises(RuntimeFault, match=r"the pipeline loop ended before 0F0 \(stage 0, after the start, at 0F0\)"):
        engine.end()


def test_micro_batches_of_differing_size_are_refused() -> None:
    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    message = (
        r"0EVICT3: this micro-batch saved 5 movable storages \(6192 bytes\), .* sized for 5 \(8256 bytes\): "
        r"MmBackward0 3072 bytes instead of 4096, .*\. If micro-batches are meant to differ in size, use --bpipe-differing-sizes"
    )
    with pytest.raises(RuntimeFault, match=message):
        run_iteration(engine_for(plan), plan, weight, rows=lambda microbatch: 16 if microbatch < 3 else 12)


def test_where_nothing_is_large_enough_nothing_travels() -> None:
    """This ended the run at its first micro-batch, with a model that fits many times over."""

    class Untouched(LateTransport):
        def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            raise AssertionError("nothing was to be moved")

        get = host = give_back = put  # type: ignore[assignment]

    for rank in (0, 3):
        plan, meter = schedule(), Meter()
        transport = Untouched()
        transport.sizes = {0: ()}
        engine = engine_for(plan, transport, meter, minimum_bytes=1_000_000, rank=rank)
        engine.recorder = Recorder(Clock(CPU))
        assert torch.equal(gradient(engine, plan, 2, rank=rank), gradient(None, plan, 2, rank=rank))
        assert transport.sizes == {0: ()}, "the partner has to be told, or it would wait"
        assert (engine.moved_bytes, engine.num_host_buffers, engine.host_bytes) == ({0: 0} if rank == 0 else {}, 0, 0)
        assert meter.peak_microbatches == (4 if rank == 0 else 1)
        rows, _ = engine.recorder.rows(meter.saved_bytes, {0: 0})
        assert len(rows) == 2 * 8, "computations only"
        assert max(row.live_bytes or 0 for row in rows) == meter.peak_bytes


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_a_function_that_hides_what_it_saved_is_named() -> None:
    """TorchScript runs a function's first call node by node, and in one opaque node from its second on."""

    @torch.jit.script
    def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.matmul(x, weight))
        return hidden * torch.sigmoid(hidden)

    plan = schedule()
    message = (
        r"0EVICT1: this micro-batch saved .*tensors saved by torch::jit::.*DifferentiableGraphBackward \(1\) are hidden, "
        r"as TorchScript"
    )
    with pytest.raises(RuntimeFault, match=message):
        run_iteration(engine_for(plan), plan, new_weight(), forward=lambda weight, x: scripted(x, weight).exp())


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_a_part_of_a_micro_batch_leaves(share: float) -> None:
    """Just enough storages move to cover the part, and the peak falls by their size."""
    plan, whole, meter = schedule(), LateTransport(), Meter()
    gradient(engine_for(plan, whole), plan)
    part = int(share * sum(whole.sizes[0]))
    transport = LateTransport()
    config = EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0, poison=True), parts={0: part})
    engine = Engine(plan, 0, transport, config, meter)
    assert torch.equal(gradient(engine, plan, 2), gradient(None, plan, 2))
    left = sum(transport.sizes[0])
    assert part <= left < part + max(whole.sizes[0])
    assert engine.moved_bytes == {0: left}
    assert engine.shares[0].enough
    assert (" MB stay" in engine.shares[0].sentence) == (share < 1)
    memory = memory_of([meter.saved_bytes[0]] * 4, [left] * 4)
    assert meter.peak_bytes == max(live_bytes(plan, 0, memory))


def test_synchronous_transfers_are_waited_for_where_they_are_issued() -> None:
    """The cost of transfers is only visible if nothing overlaps them."""
    log: list[str] = []

    class Logged(LateTransport):
        def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            return self._logged("put", super().put(host_buffer, tensors))

        def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            return self._logged("get", super().get(host_buffer, tensors))

        def _logged(self, name: str, late: Late) -> Late:
            log.append(name)

            def copy() -> None:
                late.wait()
                log.append(f"{name} waited for")

            return Late(copy)

    plan = schedule()
    engine = engine_for(plan, Logged(), synchronous=True)
    assert torch.equal(gradient(engine, plan, computing=lambda: log.append("computing")), gradient(None, plan))
    transfers = [position for position, entry in enumerate(log) if entry in ("put", "get")]
    assert len(transfers) == 6
    assert [log[position + 1] for position in transfers] == [f"{log[position]} waited for" for position in transfers]
    log.clear()
    gradient(engine_for(plan, Logged()), plan, computing=lambda: log.append("computing"))
    assert [log[log.index(name) + 1] for name in ("put", "get")] == ["computing"] * 2


def test_a_loop_that_does_not_say_what_was_sent_is_refused() -> None:
    engine = engine_for(schedule())
    engine.begin()
    engine.before(Action(0, Kind.FORWARD, 0))
    engine.after(Action(0, Kind.FORWARD, 0))
    with pytest.raises(RuntimeFault, match=r"rank 0: 0F1 is about to run, but sent\(\) was not called for the .* 0F0"):
        engine.before(Action(0, Kind.FORWARD, 1))


def test_a_range_ends_with_the_error_of_its_computation() -> None:
    """If it stayed open, the profile would show everything that follows inside it."""
    plan = schedule(balance="none")
    engine = Engine(plan, 0, None, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))

    def failing(weight: torch.nn.Parameter, received: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such token")

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(ValueError, match="no such token"):
            run_iteration(engine, plan, new_weight(), forward=failing)
        engine.abandon()
        torch.ones(2).sum()
    events = profiler.events() or []
    (forward,) = (event for event in events if event.name.startswith("bpipe "))
    after = max(event.time_range.start for event in events if event.name == "aten::sum")
    assert forward.time_range.end < after


def test_a_slice_is_named_by_its_micro_batch() -> None:
    assert name_of(Action(1, Kind.BACKWARD_INPUT, 7), 4) == "bpipe dgrad stage 1 micro-batch 1 slice 3"
    assert name_of(Action(2, Kind.SHARD_FORWARD, 5)) == "bpipe output shard forward rank 2 micro-batch 5"


def test_a_micro_batch_goes_to_one_host_only() -> None:
    """A file may name another host for its second eviction, but the engine keeps one host per micro-batch."""
    plain = FAMILIES["1f1b"].generate(4, 4, 1)
    rows = [list(row) for row in plain.ranks]
    for slot, host, kinds in ((2, 2, "EH"), (3, 2, "LR"), (4, 3, "EH"), (5, 3, "LR")):
        own, host_kind = (Kind.EVICT, Kind.HOST) if kinds == "EH" else (Kind.LOAD, Kind.RETURN)
        for rank, kind in ((0, own), (host, host_kind)):
            rows[rank][slot] = Slot(rows[rank][slot].compute, (*rows[rank][slot].transfers, Action(0, kind, 1)))
    schedule = replace(plain, ranks=tuple(map(tuple, rows)), hosts=read_hosts("2+3,none,none,none"))
    check(schedule)
    with pytest.raises(ValueError, match=r"rank 0: micro-batch 1 of stage 0 is evicted both to rank 2 and to rank 3"):
        Engine(
            schedule, 0, {}, EngineConfig("rank 0", torch.device("cpu"), TransferConfig(minimum_bytes=1, timeout_s=1.0))
        )


HOSTED, RETURNED = Action(0, Kind.HOST, 5), Action(0, Kind.RETURN, 5)


class NothingTravels:
    """A two-sided transport for stages without storages."""

    one_sided = False

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {0: ()}


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([RETURNED], "0RETURN5: host buffer 0 holds nothing"),
        ([HOSTED, Action(0, Kind.RETURN, 6)], "0RETURN6: host buffer 0 holds 0HOST5"),
        ([HOSTED, Action(0, Kind.HOST, 6)], "0HOST6: host buffer 0 still holds 0HOST5"),
        ([HOSTED, RETURNED, RETURNED], "0RETURN5: host buffer 0 holds nothing"),
        ([HOSTED], "host buffer 0 still holds 0HOST5 at the end of the iteration: its RETURN is missing"),
    ],
)
def test_a_host_buffer_is_filled_and_emptied_in_turn(actions: list[Action], message: str) -> None:
    cpu, transport = torch.device("cpu"), cast(Any, NothingTravels())
    acceptor = ReceivingAcceptor([frozenset({0})], transport, Streams(cpu), cpu, lambda pending, *_: pending.wait())
    acceptor.hear(1)

    def run() -> None:
        for action in actions:
            (acceptor.host if action.kind is Kind.HOST else acceptor.give_back)(action, 0)
        acceptor.end()

    with pytest.raises((RuntimeFault, TransferError), match=message):
        run()
