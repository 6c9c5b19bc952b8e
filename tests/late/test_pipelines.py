"""Whole pipelines on late devices have equal bits and no deadlocks, in any order of operations that nothing orders.

A wait of the protocol that is removed is noticed.
"""

import pytest
import torch

from bpipe.balance.pairs import allocated_bytes
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.memory import memory_of, num_transfers, peak_counts
from bpipe.transport.memory import DeviceMemory
from megatron.scheduling.slices.attention import KeptKeys
from tests.late.cases import SCHEDULES
from tests.late.devices import DIRECTED, Draw, draws
from tests.late.pipeline import KINDS, LatePipeline, noticed, wrong_bits
from tests.late.waits import WAITS

ITERATIONS = 2


def runs_right(name: str, kind: str, draw: Draw, differing: bool = False) -> None:
    print(f"{name}, {kind}{', sizes that differ' if differing else ''}: {draw}")
    pipeline = LatePipeline(SCHEDULES[name](), kind, differing=differing)
    assert wrong_bits(pipeline, draw) == []
    if any(num_transfers(pipeline.schedule, rank).evictions for rank in range(pipeline.schedule.num_ranks)):
        assert any(rank.moved_bytes for rank in pipeline.ranks), "nothing has moved"


def number_of(name: str, kind: str) -> int:
    """Number the cases, so that they have different draws."""
    return [*SCHEDULES].index(name) * len(KINDS) + KINDS.index(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "1f1b of 8"])
def test_no_bit_differs(name: str, kind: str) -> None:
    number = number_of(name, kind)
    runs_right(name, kind, DIRECTED[number % len(DIRECTED)])
    runs_right(name, kind, Draw.of(number), differing=True)


@pytest.mark.parametrize("draw", draws(4), ids=str)
def test_slices_agree_in_every_directed_order(draw: Draw) -> None:
    """Kept keys and their gradients are on the compute stream, while the rest of a slice is evicted on another."""
    kind = KINDS[draws(4).index(draw) % len(KINDS)]
    for differing in (False, True):
        runs_right("slices", kind, draw, differing)


def test_keys_that_are_freed_before_their_last_reader_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = KeptKeys.collected

    def freeing(keys: KeptKeys, gradient: torch.Tensor) -> torch.Tensor:
        now = keys.cutting.now
        assert now is not None
        for both in keys._kept[now.stage, now.microbatch].values():
            for kept in both:
                kept.whole.untyped_storage().resize_(0)
        return collected(keys, gradient)

    monkeypatch.setattr(KeptKeys, "collected", freeing)
    with pytest.raises(RuntimeError, match="storage"):
        LatePipeline(SCHEDULES["slices"](), "two-sided").run(Draw(1), ITERATIONS)


def test_gradients_of_keys_that_are_left_out_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    collected = KeptKeys.collected
    pipeline = LatePipeline(SCHEDULES["slices"](), "two-sided")
    expected = pipeline.model.expected(pipeline.schedule, ITERATIONS)
    monkeypatch.setattr(KeptKeys, "collected", lambda keys, gradient: collected(keys, gradient).zero_())
    gradients = pipeline.run(Draw(1), ITERATIONS)
    assert not any(torch.equal(gradients[place], gradient) for place, gradient in expected.items())


# A pool of hosts, both tiers, differing sizes, and two pipes: schedule, transport, and whether sizes differ.
PATHS = (
    ("pool", "two-sided", False),
    ("own memory", "host", False),
    ("behind devices", "peer", False),
    ("1f1b of 6", "two-sided", True),
    ("bidirectional", "two-sided", False),
)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_is_noticed(name: str) -> None:
    for wait in WAITS[name]:
        paths = [(wait.schedule, wait.kind, False)]
        if not name.startswith("[8]"):
            paths += PATHS if wait is WAITS[name][0] else ()
        elif wait.kind == "two-sided":
            # Of the copies, only that case uses a buffer that is refilled while it is read.
            paths += [path for path in PATHS if path[1] == "two-sided"]
        for schedule, kind, differing in paths:
            plan = SCHEDULES[schedule]()
            with wait.taken_out():
                is_noticed = noticed(
                    lambda plan=plan, kind=kind, differing=differing: LatePipeline(plan, kind, differing=differing)
                )
            assert is_noticed, f"{name}, in {schedule} by {kind}: not noticed"


def test_a_rank_that_cannot_lend_tells_its_partner_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: DeviceMemory, nbytes: int) -> None:
        raise MemoryError(f"no {nbytes} bytes")

    monkeypatch.setattr(DeviceMemory, "make", make)
    with pytest.raises(RuntimeError, match="the partner could not allocate the host buffers that it lends"):
        LatePipeline(SCHEDULES["1f1b"](), "peer").run(Draw(1), 1)


def test_memory_made_for_a_partner_while_receives_are_posted() -> None:
    """This deadlocks if cudaMalloc waits for kernels, as it may: the host's device runs a receive whose message the
    partner sends only once it knows the memory. Only a GPU can show whether it waits. Megatron's own loops post no
    receive
    ahead. A pipeline without balancing would also deadlock when torch's allocator takes a segment."""
    draw = Draw(1, lending_synchronizes=True)
    with pytest.raises(
        RuntimeError,
        match=r"nobody can go on: (.|\n)*host 0 waits to hear from host 1 about MEMORY(.|\n)*a host waits for device 1",
    ):
        LatePipeline(SCHEDULES["bidirectional"](), "peer").run(draw)


NUMBERS = 1 << 19
STORAGE_BYTES = 4 * NUMBERS


@pytest.mark.parametrize(("name", "kind"), [("1f1b", "two-sided"), ("interleaved", "peer"), ("v-half", "two-sided")])
def test_memory_is_what_the_schedule_says_and_is_taken_once(name: str, kind: str) -> None:
    """Compare the allocator's peaks with those without transfers; no segment is taken after the first iteration."""
    balanced = SCHEDULES[name]()
    plain = build(
        ScheduleConfig(balanced.name, 4, balanced.num_microbatches, num_chunks=len(balanced.layout.stages_of(0)))
    )
    peaks = {}
    for schedule in (balanced, plain):
        pipeline = LatePipeline(schedule, kind, extra=lambda stage, microbatch: NUMBERS)
        assert wrong_bits(pipeline, Draw(3), 3) == []
        for rank in pipeline.ranks:
            assert len({(reserved, taken) for reserved, taken, _ in rank.memory}) == 1, (
                f"rank {rank.rank}: {rank.memory}"
            )
        peaks[schedule] = [rank.memory[-1][-1] for rank in pipeline.ranks]
    for rank in range(4):
        own, hosted = allocated_bytes(balanced, rank, memory_of([1] * balanced.num_stages))
        more = own + (hosted if kind == "two-sided" else 0) - peak_counts(plain)[rank]
        measured = (peaks[balanced][rank] - peaks[plain][rank]) / STORAGE_BYTES
        # Each micro-batch also saves three storages of half a kibibyte, and messages are in flight.
        assert measured == pytest.approx(more, abs=0.02), (
            f"rank {rank} holds {measured} micro-batches more than without transfers, not {more}"
        )
