"""What a rank's meter counts: micro-batches and bytes, between the halves of a backward and in shards, too."""

from __future__ import annotations

import torch

from bpipe.runtime.capture import SavedStorage
from bpipe.runtime.executor import Executor
from bpipe.runtime.meter import Meter
from bpipe.runtime.recorder import Recorder
from bpipe.runtime.stage import Tensors
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.memory import live_counts
from bpipe.schedule.schedule import Schedule
from bpipe.transport.streams import Clock, Done
from tests.unit.runtime.loop import Layer, Small, drawn, inputs_of, new_weight, schedule, stage
from tests.unit.runtime.test_engine import engine_for


class Holding(Small):
    """Holds the input of the last backward while the next forward runs, as Megatron's loop does."""

    last: Tensors = ()

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        self.last, _ = self._held[action.stage, action.microbatch]
        return super().backward(action, gradients)


def run_holding(meter: Meter, plan: Schedule, forward: Layer = stage) -> None:
    """Two iterations of a rank that receives its inputs from another."""
    engine = engine_for(plan, None, meter, rank=1)
    holding = Holding(plan, 1, new_weight(), forward=forward)
    for _ in range(2):
        Executor(plan, 1, holding, drawn()).run(engine)
        assert holding.last
        holding.last = ()


def test_what_is_left_after_its_backward_is_no_micro_batch() -> None:
    """One micro-batch too many was counted if a stage saved only its input."""
    plan, meter = schedule(8, 16, "none"), Meter()
    run_holding(meter, plan, lambda weight, received: received @ weight)
    nbytes = inputs_of(0).untyped_storage().nbytes()
    assert meter.saved_bytes == {1: nbytes}
    assert meter.peak_bytes == (max(live_counts(plan, 1)) + 1) * nbytes
    assert meter.peak_microbatches == max(live_counts(plan, 1))


def test_between_the_halves_of_its_backward_a_micro_batch_is_here_with_what_is_left() -> None:
    """The first half may free most of a micro-batch, which was then taken for an evicted one."""
    meter = Meter()
    tensors = {microbatch: [torch.zeros(30), torch.zeros(10)] for microbatch in range(2)}
    for microbatch, saved in tensors.items():
        storages = [tensor.untyped_storage() for tensor in saved]
        meter.saved(
            Action(0, Kind.FORWARD, microbatch), [SavedStorage(storage, storage.nbytes(), True) for storage in storages]
        )
        del storages
        del tensors[microbatch][0]
        meter.touched(Action(0, Kind.BACKWARD_INPUT, microbatch))
        assert meter.sample(0, 0) == 40 * (microbatch + 1)
    assert (meter.peak_microbatches, meter.peak_bytes) == (2, 80)
    meter.touched(Action(0, Kind.BACKWARD_WEIGHT, 0))
    tensors[0].clear()
    assert meter.sample(1, 0) == 40
    assert meter.peak_microbatches == 2, "one that is over makes room"


def test_what_waits_for_the_second_half_counts_whether_it_was_saved_or_is_new() -> None:
    """A linear layer's input was saved, unless recomputed; its output's gradient is new."""
    meter = Meter()
    common = torch.zeros(1000)
    for iteration in range(2):
        meter.begin()
        for microbatch in range(2):
            saved = [torch.zeros(30), torch.zeros(10)]
            storages = [tensor.untyped_storage() for tensor in saved]
            meter.saved(
                Action(0, Kind.FORWARD, microbatch),
                [SavedStorage(storage, storage.nbytes(), True) for storage in storages],
            )
            del storages
            waiting = [saved[0], torch.zeros(25), common]
            del saved
            meter.waiting(Action(0, Kind.BACKWARD_INPUT, microbatch), [tensor.untyped_storage() for tensor in waiting])
            meter.touched(Action(0, Kind.BACKWARD_INPUT, microbatch))
            shared = 4000 if (iteration, microbatch) == (0, 0) else 0
            assert meter.sample(0, 0) == 220 + shared
            assert meter.held() == {(0, microbatch): 220 + shared}
            del waiting
            meter.touched(Action(0, Kind.BACKWARD_WEIGHT, microbatch))
            assert meter.sample(0, 0) == 0 + shared
    assert meter.saved_bytes == {0: 160}
    assert meter.after_input_bytes == {0: 220}
    assert meter.peak_bytes == 220


def test_a_row_has_bytes_where_its_action_saves_or_moves_them() -> None:
    recorder = Recorder(Clock(torch.device("cpu")))
    recorder.begin()
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.BACKWARD):
        recorder.started(Action(0, kind, 0))
        recorder.computed(None)
    recorder.started(Action(0, Kind.EVICT, 0), host_buffer=0)
    recorder.waited(Action(0, Kind.EVICT, 0), recorder.mark(), Done())
    rows, _ = recorder.rows({0: 40}, {0: 30})
    assert {str(row.action): row.bytes for row in rows} == {
        "0F0": 40,
        "0I0": None,
        "0W0": None,
        "0B0": None,
        "0EVICT0": 30,
    }


def test_what_a_shard_holds_counts_from_s_to_t() -> None:
    """It counts in bytes, not as a micro-batch, while the storages exist; after T they belong to messages."""
    meter, first, second = Meter(), Action(1, Kind.SHARD_FORWARD, 0), Action(1, Kind.SHARD_FORWARD, 1)
    logits, part = torch.zeros(100, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8)
    meter.shard_saved(first, [logits.untyped_storage(), part.untyped_storage()])
    assert meter.sample(0, 5) == 125
    later = torch.zeros(30, dtype=torch.uint8)
    meter.shard_saved(second, [later.untyped_storage()])
    assert (meter.sample(0, 0), meter.shard_bytes) == (150, 120)
    del logits
    assert meter.sample(0, 0) == 50
    meter.shard_over(Action(1, Kind.SHARD_BACKWARD, 0))
    assert meter.sample(0, 0) == 30
    assert (meter.peak_bytes, meter.peak_microbatches) == (150, 0)
    meter.begin()
    assert (meter.sample(0, 0), meter.shard_bytes) == (0, 0)
