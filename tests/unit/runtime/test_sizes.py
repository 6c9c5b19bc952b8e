"""Sizes are told a stage at a time: an acceptor in front of its evictor, as in V-shaped schedules, waits for no
stage that needs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bpipe.balance.pairs import balance
from bpipe.build import ScheduleConfig, build
from bpipe.runtime import partners as partners_module
from bpipe.runtime.errors import TransferError
from bpipe.schedule.check import board
from bpipe.schedule.check.case import ScheduleError
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.check.rules import check
from bpipe.schedule.files.text import read_csv
from bpipe.schedule.host_buffers import Residency, host_buffers, num_measured, stages_in_buffers
from bpipe.schedule.hosts import Host
from bpipe.schedule.memory import num_transfers, peak_counts
from bpipe.schedule.schedule import Schedule
from bpipe.transport.layout import aligned
from tests.support.hand_made import v_flat
from tests.support.levels import STOOD
from tests.unit.runtime.pipeline import Model, in_one_piece
from tests.unit.runtime.threaded import KINDS, Pipeline

# Rank 0 evicts of its first stage before its last one, which is behind rank 1's, has run.
FLAT = balance(v_flat(2, 4), (3, 16))
UNEVEN: dict[str, Callable[[], Schedule]] = {
    "v-flat": lambda: FLAT,
    "v-flat, relieving the other rank": lambda: balance(v_flat(2, 4), (16, 3)),
    "v-flat of 4": lambda: balance(v_flat(4, 4), (3, 16, 16, 3), (1, 0, 3, 2)),
    "v-half of 4": lambda: balance(build(ScheduleConfig("v-half", 4, 6, num_chunks=2)), (4, 16, 16, 4), (1, 0, 3, 2)),
}


def all_at_once(schedule: Schedule, evictor: int, host: Host) -> dict[Residency, int]:
    """As it was: told when all stages that leave have run."""
    return dict.fromkeys(
        num_measured(schedule, evictor, host), len({stay.stage for stay in num_measured(schedule, evictor, host)})
    )


def test_what_leaves_first_leaves_before_the_other_stage_has_run() -> None:
    told = num_measured(FLAT, 0, Host(1))
    assert {(stay.stage, count) for stay, count in told.items()} == {(0, 1), (0, 2), (3, 2)}
    assert next(iter(told)) == Residency(0, 1, 0)
    assert num_measured(FLAT, 1, Host(0)) == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNEVEN)
def test_v_shaped_schedules_move_activations_and_give_the_bits_of_the_model_in_one_piece(name: str, kind: str) -> None:
    schedule = UNEVEN[name]()
    check(schedule)
    pipeline = Pipeline(schedule, kind, timeout_s=20.0)
    found = pipeline.run(3)
    assert all(map(torch.equal, found, in_one_piece(schedule.num_stages, schedule.num_microbatches, 3)))
    assert any(num_transfers(schedule, rank).evictions for rank in range(schedule.num_ranks))
    # Halves by TorchStages free nothing before the second, and that is what is counted: the last iteration's peak is
    # the schedule's.
    assert [meter.peak_microbatches for meter in pipeline.meters] == list(peak_counts(schedule))


@pytest.mark.parametrize("kind", KINDS)
def test_telling_all_sizes_at_once_stands_still(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 waits at its first HOST for the sizes of stage 3, and stage 3 for what rank 1 would compute next."""
    monkeypatch.setattr(partners_module, "num_measured", all_at_once)
    with pytest.raises(
        TransferError, match=r"0(HOST|EVICT)1 with stage \d did not (start|end).*; the time-out is 1 s, .*within 1 s"
    ):
        Pipeline(FLAT, kind, timeout_s=1.0).run()


def test_the_checker_sees_a_host_that_waits_for_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(blocked_ranks(FLAT, waits) for waits in STOOD)
    monkeypatch.setattr(board, "num_measured", all_at_once)
    blocked = {one.rank: (one.message, one.peer) for one in blocked_ranks(FLAT, WaitLevel.ASYNCHRONOUS)}
    assert blocked[1] == ("the sizes of what 0HOST1 carries", 0)
    with pytest.raises(ScheduleError, match=r"no deadlock: rank 0, slot 2, 0F2: .* rank 1 for rank 0 at slot 2"):
        check(FLAT)


class Wider(Model):
    """Stages save more the later they are, so that host buffers which were sized for the first are too small for
    others."""

    def part(self, stage: int, microbatch: int, *received: torch.Tensor) -> torch.Tensor:
        for _ in range(stage):
            received = tuple(tensor.sin() for tensor in received)
        return super().part(stage, microbatch, *received)


# One host buffer takes a micro-batch of rank 0's first stage before its second has run, and later one of that.
REUSED = """\
# bpipe schedule=folded microbatches=2 stage_to_rank=0,1,1,0 partners=1,0 bounds=4,6
0F0,0F1 0EVICT0,0LOAD0,3F0,3EVICT0,3F1 3LOAD0,3B0,3B1,,0B0,,0B1
,1F0 0HOST0,2F0 0RETURN0,1F1,2F1 3HOST0,3RETURN0,,2B0,1B0,2B1,1B1,
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["v-flat", "one buffer for both"])
def test_what_was_lent_too_early_is_lent_in_one_piece_from_the_second_iteration_on(name: str, kind: str) -> None:
    """In the first, a buffer may be there for a smaller stage, or another come later: both ends make room alike, and
    nothing is lost."""
    schedule = FLAT if name == "v-flat" else read_csv(REUSED)
    check(schedule)
    pipeline = Pipeline(schedule, kind, timeout_s=20.0, model=Wider(4))
    evictor, acceptor = pipeline.engines
    ended, seen, sizes = [engine.end for engine in pipeline.engines], [], {}

    def told() -> None:
        ended[0]()
        assert evictor._evictor is not None
        sizes.update(evictor._evictor.sizing.announced)

    def looked() -> None:
        ended[1]()
        seen.append(acceptor.host_bytes)

    evictor.end, acceptor.end = told, looked  # type: ignore[method-assign]
    found = pipeline.run(3)
    assert all(map(torch.equal, found, in_one_piece(4, schedule.num_microbatches, 3, Wider(4))))
    stages = stages_in_buffers(host_buffers(schedule, 1))
    taken = {stage: sum(map(aligned, lengths)) for stage, lengths in sizes.items()}
    in_one = sum(max(taken[stage] for stage in each) for each in stages)
    outgrown = taken[0] if name == "one buffer for both" else 0
    assert taken[0] < taken[3]
    assert seen == [in_one + outgrown, in_one, in_one]
