"""What a model is evaluated with: every forward once, in order, and nobody waits for ever, whatever the layout."""

from __future__ import annotations

import pytest

from bpipe.schedule.action import Action, Kind
from bpipe.schedule.check.deadlock import WaitLevel, blocked_ranks
from bpipe.schedule.layout import Layout, Vocabulary, one_pipe
from bpipe.schedule.lowering.forward_only import forwards_only
from bpipe.schedule.program import Exchange
from bpipe.schedule.schedule import Schedule

LAYOUTS = {
    "one stage": one_pipe([0]),
    "a line": one_pipe(range(4)),
    "round robin": one_pipe([*range(4)] * 3),
    "v": one_pipe([0, 1, 2, 3, 3, 2, 1, 0]),
    "two pipes": Layout(((0, 1, 2, 3), (3, 2, 1, 0))),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_every_forward_once_and_in_order(layout: Layout, num_microbatches: int) -> None:
    schedule = forwards_only(layout, num_microbatches)
    for rank, row in enumerate(schedule.ranks):
        ran = [slot.compute for slot in row if slot.compute is not None]
        for stage in layout.stages_of(rank):
            own = [microbatch for microbatch in range(num_microbatches) if layout.rank_of(stage, microbatch) == rank]
            assert [one for one in ran if one.stage == stage] == [
                Action(stage, Kind.FORWARD, microbatch) for microbatch in own
            ]
        assert all(not slot.transfers for slot in row)
    assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.POSTED)


def test_a_line_takes_no_longer_than_it_must() -> None:
    assert {len(row) for row in forwards_only(one_pipe(range(4)), 8).ranks} == {11}


def test_round_robin_fills_and_then_never_waits() -> None:
    """A rank of two chunks computes two a micro-batch."""
    schedule = forwards_only(one_pipe([*range(4)] * 2), 16)
    assert {len(row) for row in schedule.ranks} <= set(range(2 * 16, 2 * 16 + 8))


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_shards_of_the_output_layer_follow_the_last_stage_in_one_order(num_microbatches: int) -> None:
    layout = Layout((tuple(range(4)),), Vocabulary.ONE)
    schedule = forwards_only(layout, num_microbatches)
    shards = [[one for one in computed(schedule, rank) if one.kind is not Kind.FORWARD] for rank in range(4)]
    assert [[(one.kind, one.microbatch) for one in of_rank] for of_rank in shards] == [
        [(o.kind, o.microbatch) for o in shards[0]]
    ] * 4
    assert {one.stage for one in shards[3]} == {3}
    assert len(shards[0]) == 2 * num_microbatches
    assert not blocked_ranks(schedule, WaitLevel.ONE_QUEUE, Exchange.POSTED)


def computed(schedule: Schedule, rank: int) -> list[Action]:
    return [slot.compute for slot in schedule.ranks[rank] if slot.compute is not None]


@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_shards_of_the_embedding_come_before_the_first_stage(num_microbatches: int) -> None:
    schedule = forwards_only(Layout((tuple(range(4)),), Vocabulary.ONE, input_shards=True), num_microbatches)
    for rank in range(4):
        looked_up = [one for one in computed(schedule, rank) if one.kind is Kind.INPUT_FORWARD]
        assert looked_up == [Action(rank, Kind.INPUT_FORWARD, microbatch) for microbatch in range(num_microbatches)]
    first = computed(schedule, 0)
    for microbatch in range(num_microbatches):
        assert first.index(Action(0, Kind.INPUT_FORWARD, microbatch)) < first.index(Action(0, Kind.FORWARD, microbatch))
    assert not blocked_ranks(schedule, WaitLevel.IN_EVERY_OPERATION, Exchange.POSTED)
