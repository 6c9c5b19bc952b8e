"""Iterations captured into a graph with their transfers: replays have the bits of eager iterations, in any order.

A late device captures as CUDA does: captured operations do not run, hosts may not wait or query, memory is from a
private pool, and a stream that was not joined again is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from bpipe.balance.pairs import allocated_bytes
from bpipe.build import ScheduleConfig, build
from bpipe.runtime.partners import Partners
from bpipe.schedule.memory import memory_of, num_transfers, peak_counts
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule
from bpipe.transport.cuda_runtime import CudaRuntime
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw, begin, device, extension
from tests.late.loops import LateLoop
from tests.late.pipeline import KINDS, LatePipeline, noticed, wrong_bits
from tests.late.pipelined import LISTED, TorchPipeline, kinds_of
from tests.late.test_pipelined import DAILY
from tests.late.test_pipelines import number_of
from tests.late.waits import WAITS

REPLAYS = 3


@pytest.mark.parametrize(
    "kind", ["peer", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "peer")]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_replays_come_to_the_bits_of_iterations(name: str, kind: str) -> None:
    schedule, number = SCHEDULES[name](), number_of(name, kind)
    for draw in (DIRECTED[number % len(DIRECTED)], Draw.of(number)):
        print(draw)
        pipeline = LatePipeline(schedule, kind, measures=True, replays=REPLAYS)
        assert wrong_bits(pipeline, draw) == []
        assert any(rank.moved_bytes for rank in pipeline.ranks) or not any(
            num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks)
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_replays_in_drawn_orders(seed: int) -> None:
    names = [name for name in SCHEDULES if name != "1f1b of 8"]
    name, kind = names[seed % len(names)], KINDS[seed // len(names) % len(KINDS)]
    assert wrong_bits(LatePipeline(SCHEDULES[name](), kind, replays=REPLAYS), Draw.of(1000 + seed)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["peer", "host"])
def test_a_thousand_replays(kind: str) -> None:
    assert wrong_bits(LatePipeline(SCHEDULES["1f1b"](), kind, replays=1000), Draw.of(7)) == []


MEGATRONS: dict[str, tuple[Callable[[], Schedule], Exchange]] = {
    "1f1b": (SCHEDULES["1f1b"], Exchange.MEGATRON_1F1B),
    "interleaved": (SCHEDULES["interleaved"], Exchange.MEGATRON_INTERLEAVED),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MEGATRONS)
def test_megatrons_loops_are_captured(name: str, kind: str) -> None:
    schedule, exchange = MEGATRONS[name]
    assert wrong_bits(LateLoop(schedule(), kind, exchange, replays=REPLAYS), Draw.of(number_of(name, kind))) == []


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in LISTED]
)
def test_steps_of_torchs_runtime_are_captured(name: str) -> None:
    for kind in kinds_of(name):
        pipeline = TorchPipeline(LISTED[name](), kind, replays=REPLAYS)
        assert wrong_bits(pipeline, Draw.of([*LISTED].index(name))) == []
        assert any(rank.moved_bytes for rank in pipeline.ranks), "nothing has moved"


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_in_a_capture_is_noticed(name: str) -> None:
    """The iterations before the capture have all their waits."""
    for wait in WAITS[name]:
        is_noticed = noticed(
            lambda wait=wait: LatePipeline(
                SCHEDULES[wait.schedule](), wait.kind, replays=REPLAYS, in_capture=wait.taken_out()
            )
        )
        assert is_noticed, f"{name}, in {wait.schedule} by {wait.kind}: not noticed"


CANNOT_BE_CAPTURED = {
    "an order from before the capture": (
        lambda: patch.object(Partners, "forget_order", lambda partners: None),
        "cudaErrorStreamCaptureIsolation",
    ),
    "copies in one call": (
        lambda: patch.object(CudaRuntime, "is_capturing", lambda runtime, stream: False),
        "cudaErrorStreamCapture|sizes of activations are learned|in a capture|what was captured",
    ),
}


# In host memory, because device memory that a failed run has lent is kept until the process ends.
@pytest.mark.parametrize("name", CANNOT_BE_CAPTURED)
def test_what_cannot_be_captured_is_an_error(name: str) -> None:
    left_out, error = CANNOT_BE_CAPTURED[name]
    with pytest.raises(RuntimeError, match=error):
        LatePipeline(SCHEDULES["1f1b"](), "host", replays=1, in_capture=left_out()).run(Draw(1))


@pytest.mark.parametrize("differing", [False, True])
def test_sizes_have_to_be_known_before(differing: bool) -> None:
    flag = "--bpipe-differing-sizes" if differing else "--cuda-graph-warmup-steps 1"
    with pytest.raises(RuntimeError, match=flag):
        LatePipeline(SCHEDULES["1f1b"](), "host", replays=1, differing=differing).run(Draw(1), 2 * differing)


NUMBERS = 3 << 20
STORAGE_BYTES = 4 * NUMBERS


@pytest.mark.parametrize("kind", ["peer", pytest.param("host", marks=pytest.mark.slow)])
def test_a_captures_own_memory_is_smaller_by_what_leaves(kind: str) -> None:
    """A capture's pool holds its iteration's peak, without what was evicted."""
    balanced = SCHEDULES["1f1b"]()
    plain = build(ScheduleConfig("1f1b", 4, balanced.num_microbatches))
    pools = {}
    for schedule in (balanced, plain):
        pipeline = LatePipeline(schedule, kind, extra=lambda stage, microbatch: NUMBERS, replays=1)
        assert wrong_bits(pipeline, Draw(3)) == []
        pools[schedule] = [rank.pool_bytes for rank in pipeline.ranks]
    for rank in range(4):
        own, _ = allocated_bytes(balanced, rank, memory_of([1] * balanced.num_stages))
        freed = peak_counts(plain)[rank] - own
        freed_storages = (pools[plain][rank] - pools[balanced][rank]) / STORAGE_BYTES
        assert freed_storages == pytest.approx(freed, abs=0.02), f"rank {rank}: {[*pools.values()]}"


def test_a_capture_does_not_run_and_its_memory_stays_its_own() -> None:
    begin(Draw(1))
    late, here = extension(), device()
    total = torch.zeros(4, device=here)
    stream = torch.Stream(here)
    torch.accelerator.synchronize()
    with torch.accelerator.device_index(0):
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        late.begin_capture(0, stream.stream_id)
        result = total + 1
        total.copy_(result)
        address = result.data_ptr()
        del result
        again = torch.empty(4, device=here)
        assert again.data_ptr() == address, "memory that is freed in a capture is reused in it"
        del again
        with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnsupported"):
            torch.accelerator.synchronize()
        graph = late.end_capture(0)
        torch.accelerator.set_stream(before)
    assert total.cpu().tolist() == [0.0] * 4
    assert torch.empty(4, device=here).data_ptr() != address
    for _ in range(5):
        late.replay(graph, before.stream_id)
    assert total.cpu().tolist() == [5.0] * 4


def test_a_stream_that_has_not_come_back_is_an_error() -> None:
    begin(Draw(1))
    late, here = extension(), device()
    numbers, stream, current = torch.ones(4, device=here), torch.Stream(here), torch.Stream(here)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    late.begin_capture(0, stream.stream_id)
    current.wait_event(stream.record_event())
    torch.accelerator.set_stream(current)
    numbers.add_(1)
    torch.accelerator.set_stream(before)
    with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnjoined"):
        late.end_capture(0)
