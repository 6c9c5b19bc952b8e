"""The engine over a real autograd graph, without processes: a transport that is as late as it may be, and poisoned
memory.

The late transport copies only when its `wait` is called, which is the latest moment the protocol allows. Whatever the
engine frees, fills or reads before the wait it owes is then wrong every time, not now and then.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import engine as engine_module
from bpipe.runtime import evictor
from bpipe.runtime.capture import SavedStorage, find
from bpipe.runtime.config import EngineConfig
from bpipe.runtime.engine import Engine
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.runtime.executor import Executor
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.stage import Tensors
from bpipe.runtime.streams import Clock
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import live_bytes, memory_of, num_transfers, peak_counts
from bpipe.schedule.program import Message
from bpipe.schedule.schedule import Schedule
from bpipe.schedule.steps import Step, steps
from bpipe.transport.config import TransferConfig
from bpipe.transport.layout import Sizes
from tests.support.alone import Alone
from tests.support.late_loads import with_late_loads
from tests.unit.runtime.loop import WIDTH, Small, drawn, gradient, inputs_of, new_weight, run_iteration, schedule, stage

CPU = torch.device("cpu")


class Late:
    """A transfer that happens when it is waited for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy()


class LateTransport:
    """Two-sided, but the partner is not there: its host buffers are a dictionary."""

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
    """Only then may a rank wait for its partner at the end of the run: after an error that one does not come."""
    plan, engine = schedule(), engine_for(schedule())
    assert engine.ended_well
    gradient(engine, plan)
    assert engine.ended_well
    engine.begin()
    assert not engine.ended_well
    engine.abandon()
    assert not engine.ended_well


def test_an_engine_that_was_dropped_between_iterations_has_not_ended_well() -> None:
    engine = engine_for(schedule())
    engine.abandon()
    assert not engine.ended_well


@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 12), (8, 16)])
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_measured_peak_is_the_scheduled_one(p: int, m: int, balance: str) -> None:
    plan, meter = schedule(p, m, balance), Meter()
    gradient(engine_for(plan, LateTransport(), meter), plan)
    assert meter.peak_microbatches == peak_counts(plan)[0]
    # Every storage of this stage can move, so a micro-batch more or less is all of its bytes. The weight is nobody's.
    assert meter.peak_bytes == peak_counts(plan)[0] * meter.saved_bytes[0]


def test_nothing_outlives_its_backward() -> None:
    """The engine's own references would keep a micro-batch's memory although autograd let go of it."""
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


def test_an_evicted_micro_batch_has_no_bytes_here() -> None:
    plan = schedule()
    transport = LateTransport()
    engine = engine_for(plan, transport)
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    seen: list[int] = []
    put = transport.put

    def watched(host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        references = [StorageWeakRef(buffer.untyped_storage()) for buffer in tensors]
        late = put(host_buffer, tensors)
        finish = engine._evictor.finish_evictions  # type: ignore[union-attr]

        def finish_and_look() -> None:
            finish()
            storages = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in references]
            seen.append(sum(storage.nbytes() for storage in storages if storage is not None))
            engine._evictor.finish_evictions = finish  # type: ignore[union-attr, method-assign]

        engine._evictor.finish_evictions = finish_and_look  # type: ignore[union-attr, method-assign]
        return late

    transport.put = watched  # type: ignore[method-assign]
    run_iteration(engine, plan, weight)
    assert seen == [0, 0, 0]


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
    """It ended the run, at its first micro-batch, for a model that fits many times over."""

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


def test_a_failing_transfer_names_rank_stage_and_action() -> None:
    class Broken(LateTransport):
        def put(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            def fail() -> None:
                raise OSError("connection closed by peer")

            return Late(fail)

    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    message = r"rank 0, stage 0: 0EVICT1 with stage 3 did not end \(it was leaving\); the time-out is 1 s, --bpipe-timeout: connection"
    with pytest.raises(TransferError, match=message):
        run_iteration(engine_for(plan, Broken()), plan, weight)


def test_a_schedule_with_transfers_needs_a_transport() -> None:
    with pytest.raises(ValueError, match="there is no transport for them"):
        Engine(schedule(), 0, None, EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))


def test_small_storages_stay() -> None:
    """Below the limit a storage stays on its stage: still right, and the transport never sees it."""
    plan = schedule()
    transport = LateTransport()
    engine = engine_for(plan, transport, minimum_bytes=16 * WIDTH * 4)
    assert torch.equal(gradient(engine, plan), gradient(None, plan))
    assert transport.sizes
    assert min(transport.sizes[0]) >= 16 * WIDTH * 4


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_a_part_of_a_micro_batch_leaves(share: float) -> None:
    """As many storages as hold it, and no more; every micro-batch's the same, and what is held falls by that much."""
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


def noted_in(counts: list[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Count the calls of a function."""

    def counted(*arguments: Any) -> Any:
        counts.append(1)
        return function(*arguments)

    return counted


def test_micro_batches_that_stay_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a meter only what leaves is looked at, and as a whole only the first micro-batch, to learn how large
    they are, and the first that leaves; of the others it is known where they saved it. A look at all took 13 ms of
    the main thread, before every such backward."""
    walks: list[int] = []

    def counted(
        roots: Sequence[object],
        inputs: Sequence[torch.Tensor | None],
        device: torch.device,
        held: Sequence[torch.Tensor],
    ) -> tuple[SavedStorage, ...]:
        walks.append(1)
        return find(roots, inputs, device, held)

    monkeypatch.setattr(evictor, "find", counted)
    monkeypatch.setattr(engine_module, "find", counted)
    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    engine = engine_for(plan)
    evictions = num_transfers(plan, 0).evictions
    again: list[int] = []
    monkeypatch.setattr(evictor.Retrace, "find", noted_in(again, evictor.Retrace.find))
    run_iteration(engine, plan, weight)
    assert (len(walks), len(again)) == (2, evictions - 1)
    run_iteration(engine, plan, weight)
    assert (len(walks), len(again)) == (2, 2 * evictions - 1)


def test_the_stages_output_is_not_kept() -> None:
    """The loop frees what it has sent on; a reference of the engine's would keep it for as long as its micro-batch
    lives."""
    plan = schedule()
    engine = engine_for(plan)
    engine.begin()
    engine.before(Action(0, Kind.FORWARD, 0))
    received = inputs_of(0)
    output = stage(torch.nn.Parameter(torch.randn(WIDTH, WIDTH)), received)
    tensor, storage = weakref.ref(output), StorageWeakRef(output.untyped_storage())
    engine.after(Action(0, Kind.FORWARD, 0), [output], [received])
    engine.sent(Action(0, Kind.FORWARD, 0))
    del output
    assert tensor() is None
    assert storage.expired()


def test_a_released_engine_measures_and_announces_again() -> None:
    """Programs for several numbers of micro-batches take turns; only one holds host buffers."""
    plan = schedule()
    transport = LateTransport()
    engine = engine_for(plan, transport)
    weight = new_weight()
    run_iteration(engine, plan, weight)
    announced, transport.sizes = transport.sizes, {}
    engine.release()
    assert engine.moved_bytes == {}
    run_iteration(engine, plan, weight)
    assert transport.sizes == announced
    assert weight.grad is not None
    assert torch.equal(weight.grad, gradient(None, plan, 2))


def test_synchronous_transfers_are_waited_for_where_they_are_issued() -> None:
    """What they would cost can only be seen if nothing runs beside them; and an eviction has freed its memory by
    then."""
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


def into_the_bubble_before(patch: pytest.MonkeyPatch, found: Callable[[set[Kind], set[Kind]], bool]) -> None:
    """What starts with a computation starts in the bubble before it: with the first whose kinds, and those of the
    one before, are such."""

    def moved(plan: Schedule, rank: int) -> tuple[Step, ...]:
        program = list(steps(plan, rank))
        kinds = [{action.kind for action in step.before} for step in program]
        place = next(place for place in range(1, len(program)) if found(kinds[place - 1], kinds[place]))
        program[place - 1] = program[place - 1]._replace(after=program[place].before)
        program[place] = program[place]._replace(before=())
        return tuple(program)

    patch.setattr(engine_module, "steps", moved)


def test_an_eviction_in_a_bubble_ends_before_the_next_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction that has a bubble's place to itself."""
    into_the_bubble_before(monkeypatch, lambda before, step: Kind.EVICT in step)
    plan = schedule()
    engine = engine_for(plan)
    leaving: list[int] = []
    assert torch.equal(
        gradient(engine, plan, computing=lambda: leaving.append(leaving_in(engine))), gradient(None, plan)
    )
    assert leaving[:4] == [0, 0, 0, 0], "0EVICT1 stands after 0F1 now, so at 0F2 it has left"


def test_the_announcement_of_the_sizes_is_waited_for_once() -> None:
    """Nobody else would ever see that it failed, and what is sent must live until then."""
    waited: list[int] = []

    class Announcing(LateTransport):
        def announce(self, sizes: Sizes) -> Late:
            super().announce(sizes)
            return Late(lambda: waited.append(1))

    plan = schedule()
    gradient(engine_for(plan, Announcing()), plan, 2)
    assert waited == [1]


def leaving_in(engine: Engine) -> int:
    """Evicted micro-batches whose storages are still here."""
    assert engine._evictor is not None
    return sum(each.state is evictor.ActivationsState.LEAVING for each in engine._evictor._known.values())


def test_an_eviction_ends_before_the_next_operation_and_not_before_the_output_is_sent() -> None:
    """Megatron's loop sends an operation's output when its hooks return: waiting for the eviction there kept the
    next stage waiting."""
    plan = schedule(6, 12)
    engine = engine_for(plan)
    sending: list[int] = []
    before: list[int] = []
    sent = engine.sent

    def looked(op: Action) -> None:
        sent(op)
        sending.append(leaving_in(engine))

    engine.sent = looked  # type: ignore[method-assign]
    run_iteration(engine, plan, new_weight(), computing=lambda: before.append(leaving_in(engine)))
    beside = [any(action.kind is Kind.EVICT for action in step.before) for step in steps(plan, 0)[1:-1]]
    assert sum(beside) == num_transfers(plan, 0).evictions
    assert sending == before == [int(evicts) for evicts in beside], (
        "each is under way beside its own operation and beside no other"
    )


def test_an_eviction_ends_before_a_load_in_the_bubble_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load takes its memory while no computation comes in between: together they would hold one micro-batch
    more."""
    into_the_bubble_before(monkeypatch, lambda before, step: (before, step) == ({Kind.EVICT}, {Kind.LOAD}))
    plan, transport = schedule(6, 12), LateTransport()
    engine = engine_for(plan, transport)
    get, leaving = transport.get, []

    def watched(host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
        leaving.append(leaving_in(engine))
        return get(host_buffer, tensors)

    transport.get = watched  # type: ignore[method-assign]
    assert torch.equal(gradient(engine, plan), gradient(None, plan))
    assert leaving == [0] * num_transfers(plan, 0).loads


def test_an_eviction_in_a_bubble_ends_before_a_load_in_the_next() -> None:
    """Both start behind one computation: in its own node's memory, at the lowest bound, a rank held one micro-batch
    more than that."""
    plan = build(ScheduleConfig("1f1b", 4, 6, balance=BalanceConfig(hosts="host")))
    both = [[action.kind for action in step.after] for step in steps(plan, 0)]
    assert [Kind.EVICT, Kind.LOAD] in both
    config = EngineConfig("rank 0", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0, poison=True))
    engine, leaving = Engine(plan, 0, {0: LateTransport()}, config), []
    load = engine._start[Kind.LOAD]

    def watched(action: Action, host_buffer: int) -> None:
        leaving.append(leaving_in(engine))
        load(action, host_buffer)

    engine._start[Kind.LOAD] = watched
    assert torch.equal(gradient(engine, plan), gradient(None, plan))
    assert leaving == [0] * num_transfers(plan, 0).loads


def test_what_stands_behind_a_computation_starts_when_its_output_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load in the bubble waits for an eviction before it, and that for the partner, who may need the output to
    come so far."""
    into_the_bubble_before(monkeypatch, lambda before, step: Kind.LOAD in step)
    log: list[str] = []

    class Logged(LateTransport):
        def get(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            log.append("load")
            return super().get(host_buffer, tensors)

    plan = schedule()
    engine, messages = engine_for(plan, Logged()), drawn()
    send = messages.send

    def sending(message: Message, tensors: Tensors) -> None:
        log.append(f"send {message}")
        send(message, tensors)

    messages.send = sending  # type: ignore[method-assign]
    Executor(plan, 0, Small(plan, 0, new_weight()), messages).run(engine)
    assert log[log.index("load") - 1 : log.index("load") + 2] == ["send 0F3>1F3", "load", "send 0F4>1F4"]


def test_a_loop_that_does_not_say_what_was_sent_is_refused() -> None:
    engine = engine_for(schedule())
    engine.begin()
    engine.before(Action(0, Kind.FORWARD, 0))
    engine.after(Action(0, Kind.FORWARD, 0))
    with pytest.raises(
        RuntimeFault, match=r"rank 0: 0F1 is about to run, but sent\(\) was not called for the outputs of 0F0"
    ):
        engine.before(Action(0, Kind.FORWARD, 1))


class Keeping(Alone):
    """Messages that some micro-batches' outputs are long in."""

    def __init__(self) -> None:
        super().__init__(drawn()._drawn)
        self._kept: list[Tensors] = []

    def send(self, message: Message, tensors: Tensors) -> None:
        if message.made_by[0].microbatch % 2:
            self._kept.append(tensors)


class LettingGo(Small):
    """Frees its outputs once they are sent, as Megatron does, by exchanging what lies behind them."""

    def after(self, op: Action) -> None:
        for output in self._held[op.stage, op.microbatch][1]:
            output.data = torch.empty_like(output)


def test_an_output_that_is_saved_too_stays_however_long_it_is_being_sent() -> None:
    """Some micro-batches would be larger than others: the host buffers have one size."""

    def forward(weight: torch.nn.Parameter, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).exp()

    plan, weight = schedule(), new_weight()
    engine = engine_for(plan)
    stage_here = LettingGo(plan, 0, weight, forward=forward)
    calls: Any = SimpleNamespace(begin=engine.begin, before=engine.before, after=engine.after, end=engine.end)
    calls.communicated = engine.communicated

    def sent(op: Action) -> None:
        engine.sent(op)
        if op.kind is Kind.FORWARD:
            stage_here.after(op)

    calls.sent = sent
    Executor(plan, 0, stage_here, Keeping()).run(calls)
    expected = new_weight()
    run_iteration(None, plan, expected, forward=forward)
    assert torch.equal(weight.grad, expected.grad)  # type: ignore[arg-type]
    # What it received and what tanh made; exp saved what it made, which went on.
    assert engine.moved_bytes == {0: 2 * 16 * WIDTH * 4}


def test_what_stands_behind_the_last_computation_starts_when_the_loop_has_sent_its_last_message() -> None:
    """In front of that message it could make the partner wait for what waits for it: one queue for all streams is
    enough."""
    returned: list[int] = []

    class Watched(LateTransport):
        def give_back(self, host_buffer: int, tensors: Sequence[torch.Tensor]) -> Late:
            returned.append(host_buffer)
            return Late(lambda: None)

    plan, transport = with_late_loads(schedule(6, 12)), Watched()
    transport.sizes = {0: (64,)}
    end = steps(plan, 5)[-1]
    assert [str(action) for action in end.after] == ["0RETURN10"]
    engine = Engine(plan, 5, transport, EngineConfig("rank 5", CPU, TransferConfig(minimum_bytes=1, timeout_s=1.0)))
    seen: list[int] = []

    def looking(does: Callable[[], None]) -> Callable[[], None]:
        def looked() -> None:
            seen.append(len(returned))
            does()
            seen.append(len(returned))

        return looked

    calls: Any = SimpleNamespace(
        begin=engine.begin, before=engine.before, after=engine.after, sent=engine.sent, end=looking(engine.end)
    )
    calls.communicated = looking(engine.communicated)
    run_iteration(calls, plan, new_weight(), rank=5)
    assert seen == [4, 5, 5, 5]
    calls.communicated = lambda: None
    run_iteration(calls, plan, new_weight(), rank=5)
    assert seen[4:] == [9, 10], "a loop that does not say when it has sent its last message has when it ends"


def test_where_it_stands_is_said_at_the_end_too() -> None:
    """After its last transfers have started it has not gone back to the start."""
    plan = schedule()
    engine = engine_for(plan)
    communicated, where = engine.communicated, []

    def looked() -> None:
        where.append(engine.where())
        communicated()
        where.append(engine.where())

    engine.communicated = looked  # type: ignore[method-assign]
    run_iteration(engine, plan, new_weight())
    # Once from the loop, once from the engine's own end.
    assert where == ["rank 0, stage 0, after 0B7"] * 4
