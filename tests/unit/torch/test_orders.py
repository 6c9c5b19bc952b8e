"""Our schedules in torch's form, and torch's in ours; what torch's runtime cannot run is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Kind
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.schedule import Schedule
from bpipe.torch import BalancedSchedule
from bpipe.torch.orders import (
    TORCH_NAMES,
    config_of,
    refuse_other_places,
    refuse_unrunnable,
    schedule_of_class,
    torch_orders,
)

P, M = 4, 8
ONE_PIPE = [name for name, family in FAMILIES.items() if family.num_pipes == 1]


def stages_on(rank: int, chunks: int = 1, v_shaped: bool = False, num_ranks: int = P) -> list[Any]:
    num_stages = num_ranks * chunks
    indices = (rank, num_stages - 1 - rank) if v_shaped else range(rank, num_stages, num_ranks)
    return [
        SimpleNamespace(
            stage_index=index,
            group_size=num_ranks,
            group_rank=rank,
            num_stages=num_stages,
            submod=None,
            has_backward=True,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            stage_index_to_group_rank={},
        )
        for index in indices
    ]


def computations(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for slot in row for action in slot.computations] for row in schedule.ranks]


@pytest.mark.parametrize("name", ONE_PIPE)
def test_every_family_is_lowered_by_torch_and_computes_the_same(name: str) -> None:
    chunks = max(2, FAMILIES[name].min_chunks) if FAMILIES[name].max_chunks != 1 else 1
    schedule = build(ScheduleConfig(name, P, M, num_chunks=chunks))
    refuse_unrunnable(schedule)
    order = torch_orders(schedule)
    flat = [[str(part) for action in order[rank] for part in action.sub_actions or (action,)] for rank in range(P)]
    assert flat == computations(schedule)
    lowered = schedules._add_send_recv(
        {rank: list(row) for rank, row in order.items()}, schedule.layout.placements[0].__getitem__, schedule.num_stages
    )
    assert all(len(lowered[rank]) > len(order[rank]) for rank in range(P))


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torchs_names_are_their_orders(name: str) -> None:
    v_shaped = name in ("ZBVZeroBubble", "DualPipeV")
    chunks = 1 if name in ("1F1B", "GPipe") else 2
    stages = stages_on(0, chunks, v_shaped)
    config = config_of(name, stages, M, None, None)
    schedule = build(config)
    refuse_other_places(schedule, stages)
    if chunks == 1:
        assert schedule.name == TORCH_NAMES[name]
        return
    assert schedule.name == name
    theirs = getattr(schedules, f"Schedule{name}")(stages, M).pipeline_order
    assert torch_orders(schedule) == {
        rank: [action for action in row if action is not None] for rank, row in theirs.items()
    }


def test_a_file_is_read_and_balanced_or_taken_as_it_stands(tmp_path: Path) -> None:
    plain, path = build(ScheduleConfig("zb-h1", P, M)), tmp_path / "schedule.csv"
    path.write_text(write_csv(plain))
    assert computations(build(config_of(path, stages_on(1), M, None, None))) == computations(plain)
    balanced = build(ScheduleConfig("1f1b", P, M, balance=BalanceConfig()))
    path.write_text(write_csv(balanced))
    schedule = build(config_of(str(path), stages_on(1), M, BalanceConfig(), None))
    assert (schedule.ranks, schedule.hosts) == (balanced.ranks, balanced.hosts)
    with pytest.raises(ValueError, match="schedule 1f1b is already balanced: leave bounds, memory and hosts out"):
        config_of(path, stages_on(1), M, BalanceConfig(bounds=(3,)), None)
    with pytest.raises(ValueError, match="is for 4 ranks and 8 micro-batches, but this pipeline has 4 and 16"):
        config_of(path, stages_on(1), 16, None, None)


class ListsItsMessages(schedules._PipelineScheduleRuntime):  # type: ignore[misc]
    """A schedule that lists its messages itself, like one in torch's own tests."""

    def __init__(self, stages: list[Any], n_microbatches: int) -> None:
        self.pipeline_order = {rank: [] for rank in range(stages[0].group_size)}


def test_a_class_that_lists_its_messages_itself_is_refused_with_that() -> None:
    """It was read as a schedule without computations."""
    with pytest.raises(ValueError, match=r"^ListsItsMessages lists its messages itself \(pipeline_order_with_comms\)"):
        schedule_of_class(ListsItsMessages, stages_on(0), M)


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'Interleave1F1B', did you mean 'Interleaved1F1B'"):
        config_of("Interleave1F1B", stages_on(0, 2), M, None, None)
    with pytest.raises(ValueError, match="group_size 4 is for bpipe's own families, and ZBVZeroBubble is not one"):
        config_of("ZBVZeroBubble", stages_on(0, 2, True), M, None, 4)
    with pytest.raises(ValueError, match="6 stages on 4 ranks: every rank computes equally many"):
        config_of("1f1b", [SimpleNamespace(group_size=4, num_stages=6)], M, None, None)


def test_stages_elsewhere_are_refused() -> None:
    schedule = build(ScheduleConfig("v-half", P, M, num_chunks=2))
    refuse_other_places(schedule, stages_on(1, 2, v_shaped=True))
    with pytest.raises(ValueError, match=r"rank 1 of the pipeline has stages 1 and 5, but v-half computes 1 and 6"):
        refuse_other_places(schedule, stages_on(1, 2))


def test_what_torchs_runtime_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="chimera has 2 pipes: torch's runtime supports one"):
        refuse_unrunnable(build(ScheduleConfig("chimera", P, M)))
    with pytest.raises(ValueError, match="cuts micro-batches into slices: torch's runtime supports whole ones only"):
        refuse_unrunnable(build(ScheduleConfig("1f1b", P, M, slices=2)))


def test_losses_in_another_order_are_refused() -> None:
    """Torch's runtime appends losses as they are made and looks them up by micro-batch."""
    schedule = build(ScheduleConfig("gpipe", 2, 2))
    swapped = tuple(
        tuple(
            slot
            if slot.compute is None
            else type(slot)(slot.compute.__class__(slot.compute.stage, slot.compute.kind, 1 - slot.compute.microbatch))
            for slot in row
        )
        for row in schedule.ranks
    )
    assert {action.kind for row in swapped for slot in row for action in slot.computations} == {
        Kind.FORWARD,
        Kind.BACKWARD,
    }
    with pytest.raises(ValueError, match=r"computes the losses of micro-batches in the order \[1, 0\]"):
        refuse_unrunnable(Schedule(schedule.name, 2, schedule.layout, swapped))


@pytest.mark.parametrize("option", [{"defer_pp_recv": True}, {"max_outstanding_sends": 2}])
def test_options_that_put_messages_or_waits_elsewhere_are_refused(option: dict[str, Any]) -> None:
    """The check before the first step assumes neither."""
    with pytest.raises(ValueError, match=f"^{next(iter(option))}.* leave it out$"):
        BalancedSchedule([], M, **option)
