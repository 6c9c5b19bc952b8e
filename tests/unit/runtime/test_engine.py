"""The engine over a real autograd graph, without processes: a transport that is as late as it may be, and poisoned memory.

The late transport copies only when its `wait` is called, which is the latest moment the protocol allows. Whatever the engine frees,
fills or reads before the wait it owes is then wrong every time, not now and then.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.ir.action import Action, Kind
from bpipe.ir.schedule import Schedule
from bpipe.passes.steps import Step, steps
from bpipe.runtime import engine as engine_module
from bpipe.runtime import evictor
from bpipe.runtime.capture import Found, find
from bpipe.runtime.engine import Engine, EngineConfig
from bpipe.runtime.errors import RuntimeFault, TransferError
from bpipe.runtime.meter import Meter
from bpipe.simulate.memory import num_transfers, peak_counts
from bpipe.transport.layout import SlotLayout
from tests.unit.runtime.loop import WIDTH, gradient, inputs_of, new_weight, run_iteration, schedule, stage

CPU = torch.device("cpu")


class Late:
    """A transfer that happens when it is waited for."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy()


class LateTransport:
    """Two-sided, but the partner is not there: its slots are a dictionary."""

    one_sided: Literal[False] = False

    def __init__(self) -> None:
        self.slots: dict[int, list[torch.Tensor]] = {}
        self.sizes: dict[int, Sequence[int]] = {}

    def announce(self, sizes: Mapping[int, Sequence[int]], layout: SlotLayout) -> Late:
        self.sizes = dict(sizes)
        return Late(lambda: None)

    def learn(self) -> dict[int, tuple[int, ...]]:
        return {stage: tuple(lengths) for stage, lengths in self.sizes.items()}

    def put(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
        return Late(lambda: self.slots.__setitem__(slot, [buffer.clone() for buffer in buffers]))

    def get(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
        def copy() -> None:
            for buffer, stored in zip(buffers, self.slots.pop(slot), strict=True):
                buffer.copy_(stored)

        return Late(copy)

    def host(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
        return Late(lambda: None)

    give_back = host

    def release(self) -> None:
        assert not self.slots, f"slots {sorted(self.slots)} are still taken"

    abandon = release


def engine_for(
    plan: Schedule,
    transport: LateTransport | None = None,
    meter: Meter | None = None,
    minimum_bytes: int = 1,
    synchronous: bool = False,
) -> Engine:
    config = EngineConfig("rank 0", CPU, minimum_bytes=minimum_bytes, timeout_s=1.0, poison=True, synchronous=synchronous)
    return Engine(plan, 0, transport or LateTransport(), config, meter)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 4), (5, 9), (6, 6), (8, 16), (8, 8), (12, 20)])
def test_gradients_equal_to_the_last_bit(p: int, m: int) -> None:
    plan = schedule(p, m)
    assert torch.equal(gradient(engine_for(plan), plan, 2), gradient(None, plan, 2))


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
    plain_after = engine.after

    def after(op: Action, outputs: Sequence[torch.Tensor] = (), inputs: Sequence[torch.Tensor] = ()) -> None:
        references.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in inputs)
        plain_after(op, outputs, inputs)

    engine.after = after  # type: ignore[method-assign, assignment]
    run_iteration(engine, plan, weight)
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

    def watched(slot: int, buffers: Sequence[torch.Tensor]) -> Late:
        references = [StorageWeakRef(buffer.untyped_storage()) for buffer in buffers]
        late = put(slot, buffers)
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
    with pytest.raises(RuntimeFault, match="rank 0: the program says 0F0, the pipeline loop runs 0B0, stage 0, after the start, at 0F0"):
        engine.before(Action(0, Kind.BACKWARD, 0))


def test_an_iteration_that_stops_early_is_refused() -> None:
    engine = engine_for(schedule())
    engine.begin()
    with pytest.raises(RuntimeFault, match="the pipeline loop is over stage 0, after the start, at 0F0"):
        engine.end()


def test_micro_batches_of_differing_size_are_refused() -> None:
    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    with pytest.raises(RuntimeFault, match=r"0EVICT3: this micro-batch saved .* Micro-batches of differing size are not supported"):
        run_iteration(engine_for(plan), plan, weight, rows=lambda microbatch: 16 if microbatch < 3 else 12)


def test_nothing_large_enough_is_refused() -> None:
    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    with pytest.raises(RuntimeFault, match="nothing that 0F0 saved can be moved: no storage of at least 1000000 bytes"):
        run_iteration(engine_for(plan, minimum_bytes=1_000_000), plan, weight)


def test_a_failing_transfer_names_rank_stage_and_action() -> None:
    class Broken(LateTransport):
        def put(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
            def fail() -> None:
                raise OSError("connection closed by peer")

            return Late(fail)

    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    message = r"rank 0, stage 0: 0EVICT1 with stage 3 did not end \(it was leaving\); the time-out is 1 s, --bpipe-timeout: connection"
    with pytest.raises(TransferError, match=message):
        run_iteration(engine_for(plan, Broken()), plan, weight)


def test_a_schedule_with_transfers_needs_a_transport() -> None:
    with pytest.raises(ValueError, match="there is no transport to make them"):
        Engine(schedule(), 0, None, EngineConfig("rank 0", CPU, 1, 1.0))


def test_small_storages_stay() -> None:
    """Below the limit a storage stays on its stage: still right, and the transport never sees it."""
    plan = schedule()
    transport = LateTransport()
    engine = engine_for(plan, transport, minimum_bytes=16 * WIDTH * 4)
    assert torch.equal(gradient(engine, plan), gradient(None, plan))
    assert transport.sizes
    assert min(transport.sizes[0]) >= 16 * WIDTH * 4


def test_micro_batches_that_stay_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a meter, only what leaves is walked, and once the first micro-batch, to learn how large they are."""
    walks: list[int] = []

    def counted(roots: Sequence[object], inputs: Sequence[torch.Tensor | None] = ()) -> tuple[Found, ...]:
        walks.append(1)
        return find(roots, inputs)

    monkeypatch.setattr(evictor, "find", counted)
    monkeypatch.setattr(engine_module, "find", counted)
    plan = schedule()
    weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    engine = engine_for(plan)
    evictions = num_transfers(plan, 0).evictions
    run_iteration(engine, plan, weight)
    assert len(walks) == evictions + 1
    run_iteration(engine, plan, weight)
    assert len(walks) == 2 * evictions + 1


def test_the_stages_output_is_not_kept() -> None:
    """The loop frees what it has sent on; a reference of the engine's would keep it for as long as its micro-batch lives."""
    plan = schedule()
    engine = engine_for(plan)
    engine.begin()
    engine.before(Action(0, Kind.FORWARD, 0))
    received = inputs_of(0)
    output = stage(torch.nn.Parameter(torch.randn(WIDTH, WIDTH)), received)
    tensor, storage = weakref.ref(output), StorageWeakRef(output.untyped_storage())
    engine.after(Action(0, Kind.FORWARD, 0), [output], [received])
    del output
    assert tensor() is None
    assert storage.expired()


def test_a_released_engine_measures_and_announces_again() -> None:
    """Programs for several numbers of micro-batches take turns; only one holds slots."""
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
    """What they would cost can only be seen if nothing runs beside them; and an eviction has freed its memory by then."""
    log: list[str] = []

    class Logged(LateTransport):
        def put(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
            return self._logged("put", super().put(slot, buffers))

        def get(self, slot: int, buffers: Sequence[torch.Tensor]) -> Late:
            return self._logged("get", super().get(slot, buffers))

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


def test_an_eviction_in_a_bubble_ends_before_the_next_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generator makes such a schedule today, and the grid allows it: an eviction that has a bubble's place to itself."""

    def moved(plan: Schedule, rank: int) -> tuple[Step, ...]:
        program = list(steps(plan, rank))
        place = next(place for place, step in enumerate(program) if any(action.kind is Kind.EVICT for action in step.before))
        program[place - 1] = replace(program[place - 1], after=program[place].before)
        program[place] = replace(program[place], before=())
        return tuple(program)

    monkeypatch.setattr(engine_module, "steps", moved)
    plan = schedule()
    engine = engine_for(plan)
    evictor_there = engine._evictor
    assert evictor_there is not None
    leaving = []

    def look() -> None:
        leaving.append(sum(each.state is evictor.State.LEAVING for each in evictor_there._known.values()))

    assert torch.equal(gradient(engine, plan, computing=look), gradient(None, plan))
    assert leaving[:4] == [0, 0, 0, 0], "0EVICT1 stands after 0F1 now, so at 0F2 it has left"


def test_the_announcement_of_the_sizes_is_waited_for_once() -> None:
    """Nobody else would ever see that it failed, and what is sent must live until then."""
    waited: list[int] = []

    class Announcing(LateTransport):
        def announce(self, sizes: Mapping[int, Sequence[int]], layout: SlotLayout) -> Late:
            super().announce(sizes, layout)
            return Late(lambda: waited.append(1))

    plan = schedule()
    gradient(engine_for(plan, Announcing()), plan, 2)
    assert waited == [1]


def test_an_eviction_has_ended_when_the_operation_beside_it_has() -> None:
    """What it frees is then there for what the loop receives next, and for a load that stands behind the operation."""
    plan = schedule()
    engine = engine_for(plan)
    seen: list[tuple[int, int]] = []
    after = engine.after

    def looked(op: Action, *arguments: Sequence[torch.Tensor]) -> None:
        leaving = [sum(each.state is evictor.State.LEAVING for each in engine._evictor._known.values())]  # type: ignore[union-attr]
        after(op, *arguments)
        leaving.append(sum(each.state is evictor.State.LEAVING for each in engine._evictor._known.values()))  # type: ignore[union-attr]
        seen.append((leaving[0], leaving[1]))

    engine.after = looked  # type: ignore[method-assign, assignment]
    run_iteration(engine, plan, new_weight())
    assert sum(during for during, _ in seen) == 3
    assert all(afterwards == 0 for _, afterwards in seen)
