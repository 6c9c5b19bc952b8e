"""What a first iteration measures, by slice and by process, and what the log and a report say of it; without Megatron."""

from collections.abc import Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import RuntimeFault
from bpipe.runtime.evictor import Sizing, Unmoved
from bpipe.runtime.links import host_buffers
from bpipe.schedule.memory import KeptMemory, peak_counts
from bpipe.transport.host_memory import Buffers
from megatron.scheduling.loop import log
from megatron.scheduling.loop.log import MOST_TOLD, Differing, sufficiency
from megatron.scheduling.loop.measurements import (
    Besides,
    FirstMeasured,
    kept_at_peak,
    latest_by_place,
    most_by_place,
    moved_by_place,
)
from megatron.scheduling.replanning import ProcessMemory, devices_of, measure_process
from megatron.scheduling.slices.cuts import Cutting, RepeatedRows, joined

# Two slices; the first micro-batch also counts 5 bytes that all micro-batches share.
EACH = {(0, 0): 65, (0, 1): 45, (0, 2): 60, (0, 3): 40}


def test_sizes_are_those_of_the_last_of_each_slice_or_of_the_most() -> None:
    assert latest_by_place(EACH, 2) == {0: 60, 1: 40}
    assert most_by_place(EACH, 2) == {0: 65, 1: 45}
    assert latest_by_place({(1, 3): 7}, 1) == {1: 7}
    assert latest_by_place({(1, 3): 7}, 2) == {3: 7}


def test_what_of_a_slice_moves_is_known_or_as_of_another_of_its_stage() -> None:
    saved = {0: 60, 1: 40, 2: 60, 3: 40}
    assert moved_by_place({0: 50}, {}, saved, 2, differing=False) == {0: 50, 1: 50}
    # The second slice did not move, so the first one's share is used: 48 of 60 are four fifths.
    assert moved_by_place({0: 48}, {(0, 2): 48, (0, 3): 0}, saved, 2, differing=True) == {0: 48, 1: 32}
    assert moved_by_place({}, {}, saved, 2, differing=True) == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_kept_keys_when_most_is_held(rank: int) -> None:
    """Rank 0 holds three slices of two micro-batches in the first B. On rank 1 the next micro-batch's first slice comes
    while the other's keys and sums still exist."""
    schedule = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    key_memory = {stage: KeptMemory(20, 40) for stage in range(2)}
    assert kept_at_peak(schedule, rank, {0: 60, 1: 59, 2: 60, 3: 59}, key_memory) == 2 * 20 + 40


def test_all_plan_with_sizes_by_slice_and_what_is_kept() -> None:
    plain = build(ScheduleConfig("1f1b", 2, 2, slices=2))
    processes = []
    for place in (0, 1):
        saved = {2 * place: 60, 2 * place + 1: 40}
        key_memory = {place: KeptMemory(20 + place, 40)}
        measured = FirstMeasured(saved, {0: 50} if place == 0 else {}, {place: 30}, 0, 0, 0, 0, 0, kept=key_memory)
        processes.append(ProcessMemory(place, measured, 1000, 0, 0, Fraction(0)))
    memory = devices_of(processes, plain, (5000, 5000)).memory
    assert (memory.slices, memory.kept) == (2, (KeptMemory(20, 40), KeptMemory(21, 40)))
    assert [(stage.saved_bytes, stage.moved_bytes, stage.after_input_bytes) for stage in memory.stages] == [
        *((60, 50, 30), (40, 40, 30)),
        *((60, 60, 30), (40, 40, 30)),
    ]
    assert devices_of(processes, plain, (5000, 5000)).parts == ((50,), (60,))


GIB = 1 << 30
CUDA = torch.device("cuda")
# Weights and gradients 20 GiB, Adam's later moments 10; contexts and communicators 2; micro-batches 12, host buffers
# 14; temporary tensors 3, and 1 in the update.
STATE, MOMENTS, OUTSIDE, HELD, HOSTED, WORKING, UPDATING = (n * GIB for n in (20, 10, 2, 12, 14, 3, 1))


def seen_with(lent_bytes: int, monkeypatch: pytest.MonkeyPatch) -> ProcessMemory:
    """What a device with these host buffers reports if `lent_bytes` are outside torch's allocator."""
    inside = HOSTED - lent_bytes
    allocated = STATE + HELD + inside + WORKING
    updated = STATE + MOMENTS + UPDATING + inside
    reserved = max(allocated, updated)
    answers = {
        "mem_get_info": (80 * GIB - reserved - lent_bytes - OUTSIDE, 80 * GIB),
        "memory_reserved": reserved,
        "max_memory_allocated": reserved,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    measured = FirstMeasured({}, {}, {}, 0, 0, HELD + HOSTED, allocated, allocated, lent_bytes)
    return measure_process(
        0, measured, Besides(10 * GIB, 10 * GIB, 0, None), Besides(10 * GIB, 10 * GIB, MOMENTS, None), CUDA
    )


@pytest.mark.parametrize("lent_bytes", [0, HOSTED])
def test_lent_buffers_are_counted_once(lent_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `peer` they were counted on top of the micro-batches' peak: 37 GiB instead of 27."""
    memory = seen_with(lent_bytes, monkeypatch)
    assert (memory.fixed_bytes, memory.working_bytes, memory.fragmentation) == (STATE + MOMENTS + OUTSIDE, WORKING, 0)


@pytest.mark.parametrize(("stage", "count"), [(0, 4), (1, 3), (2, 2), (3, 0), (7, 0)])
def test_a_stage_may_come_to_pin_its_share_of_its_device_for_every_buffer(stage: int, count: int) -> None:
    """The device fits as many micro-batches as the bound, so none is larger than an equal part of it."""
    plan = build(ScheduleConfig("1f1b", 8, 32, balance=BalanceConfig()))
    buffers = host_buffers(plan, stage, 80 * GIB)
    assert buffers.count == count
    assert buffers == (Buffers(count, 80 * GIB // peak_counts(plan)[stage]) if count else Buffers(0))


def test_on_a_cpu_nobody_knows_how_large_they_may_be() -> None:
    assert host_buffers(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig())), 0, 0).most_bytes == 0


def engine(stayed: Unmoved, differs: bool = True) -> Any:
    sizing = Sizing(differs)
    sizing.stayed, sizing.most_bytes, sizing.num_grown = stayed, {0: 4096}, 1
    return SimpleNamespace(sizing=sizing)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "say", lambda line, everywhere: lines.append(line))
    monkeypatch.setattr(log, "pipeline_begins_with_rank_0", lambda: True)
    return lines


def test_what_stayed_is_told_and_added_up(lines: list[str]) -> None:
    differing = Differing()
    differing.ended(engine(Unmoved(2, 5_000_000, 1, 3_000_000)), 0)
    differing.ended(engine(Unmoved()), 0)
    differing.ended(engine(Unmoved(1, 2_000_000, 2, 2_000_000)), 0)
    assert lines[0] == (
        "stage 0: 2 micro-batches (5 MB in all) were too large for their host buffers and stayed here; the next "
        "iteration has room for them. The bound was exceeded by at most 1 micro-batch (3 MB)"
    )
    assert len(lines) == 2
    assert (
        differing.sums.stayed_microbatches,
        differing.sums.stayed_bytes,
        differing.sums.passed_microbatches,
        differing.sums.passed_bytes,
    ) == (3, 7_000_000, 2, 3_000_000)
    assert (differing.sums.largest_bytes, differing.sums.times_grown) == ({0: 4096}, 1)


def test_not_every_iteration_is_told(lines: list[str]) -> None:
    differing = Differing()
    for _ in range(MOST_TOLD + 3):
        differing.ended(engine(Unmoved(1, 10, 1, 10)), 2)
    assert len(lines) == MOST_TOLD
    assert lines[-1].endswith("; the report lists further ones")
    assert differing.sums.stayed_microbatches == MOST_TOLD + 3


def test_nothing_is_said_where_sizes_are_alike(lines: list[str]) -> None:
    differing = Differing()
    differing.ended(engine(Unmoved(), differs=False), 0)
    differing.ended(SimpleNamespace(sizing=None), 0)  # type: ignore[arg-type]
    assert (lines, differing) == ([], Differing())


BOUNDS = (0, 3, 5)


def rows() -> Iterator[dict[str, int]]:
    yield from ({"row": number} for number in range(6))


def test_every_slice_is_given_the_rows_of_the_first() -> None:
    """A script may take two rows per micro-batch."""
    cutting = Cutting(BOUNDS)
    again = iter(RepeatedRows(rows(), cutting))
    taken = []
    for number in range(4):
        with cutting.at(number):
            taken.append([next(again)["row"], next(again)["row"]])
    assert taken == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_the_end_of_the_data_and_what_an_iterator_has_besides_are_handed_on() -> None:
    class Counting:
        left = 0

        def __next__(self) -> Any:
            raise StopIteration

    cutting = Cutting(BOUNDS)
    again = RepeatedRows(Counting(), cutting)  # type: ignore[arg-type]
    assert again.left == 0
    with cutting.at(0), pytest.raises(StopIteration):
        next(again)


def test_reports_of_slices_add_up() -> None:
    first, second = (
        {
            "pair": torch.tensor([total, 10.0]),
            "mean": torch.tensor(mean),
            "tuple": (torch.tensor(total), torch.tensor(10)),
        }
        for total, mean in ((2.0, 0.5), (3.0, 0.25))
    )
    report = joined([first, second])
    assert report["pair"].tolist() == [5.0, 10.0]
    assert float(report["mean"]) == 0.75
    assert [float(part) for part in report["tuple"]] == [5.0, 10.0]
    assert first["pair"].tolist() == [2.0, 10.0], "a script's own report stays as it is"


def test_rows_are_cut_and_losses_padded_by_the_slice_that_is_computed() -> None:
    cutting = Cutting(BOUNDS)
    tokens, mask = torch.arange(10).view(2, 5), torch.ones(1, 1, 5, 5, dtype=torch.bool).triu(1)
    assert cutting.cut(tokens) is tokens, "outside of a slice"
    with cutting.at(3, stage=2) as now:
        assert now == (1, 1, 2)
        assert cutting.cut(tokens).tolist() == [[3, 4], [8, 9]]
        assert cutting.cut(mask).tolist() == [[[[False, False, False, False, True], [False] * 5]]]
        hidden = torch.zeros(5, 2, 8)
        assert cutting.cut(hidden) is hidden
        assert cutting.cut(None) is None
        assert cutting.pad(torch.ones(2, 2)).tolist() == [[0, 0, 0, 1, 1]] * 2
        with pytest.raises(RuntimeFault, match=r"the last stage returned \(2, 5\), but with slices .* \(batch, 2\)"):
            cutting.pad(torch.ones(2, 5))
        with pytest.raises(AssertionError, match="is still computed"), cutting.at(0):
            pass
    with pytest.raises(AssertionError, match="no slice is computed now"):
        cutting.span  # noqa: B018


def test_a_link_that_keeps_up_and_one_that_does_not() -> None:
    enough, sentence = sufficiency(0, 7, 3_000_000_000, 0.3, 25e9)
    assert enough
    assert sentence == (
        "stage 0 moves 3000 MB to stage 7 and back while a micro-batch computes, about 300 ms: 20 GB/s of the link's "
        "25 GB/s, enough"
    )
    enough, sentence = sufficiency(0, 7, 3_000_000_000, 0.3, 12.5e9)
    assert not enough
    assert "20 GB/s of the link's 12.5 GB/s, NOT enough: transfers will delay the computation" in sentence
