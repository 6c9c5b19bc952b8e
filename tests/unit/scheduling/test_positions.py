"""A schedule's ranks and Megatron's are the same processes, counted from one end or the other; stages are built where they are computed."""

from __future__ import annotations

import pytest

from bpipe.ir.layout import Layout, one_pipe
from bpipe.program import ScheduleConfig
from megatron.scheduling.arguments import SchedulingConfig
from megatron.scheduling.positions import Positions


def rounds(num_ranks: int, *ways: int) -> Layout:
    """Chunks that go up the ranks (1) or down (-1)."""
    return one_pipe([rank for way in ways for rank in range(num_ranks)[::way]])


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("ways", "backwards"), [((1,), False), ((1, 1, 1), False), ((1, -1), True), ((1, -1, 1), False), ((-1, 1), False)])
def test_every_stage_is_built_where_the_schedule_computes_it(num_ranks: int, ways: tuple[int, ...], backwards: bool) -> None:
    layout = rounds(num_ranks, *ways)
    positions = Positions.of(layout)
    assert positions.backwards is backwards
    for stage, position in enumerate(layout.only_placement):
        rank, chunk = positions.rank_at(position), stage // num_ranks
        assert positions.position_of(rank) == position
        assert chunk * num_ranks + positions.seen(rank, chunk) == stage


@pytest.mark.parametrize("ways", [(1,), (1, 1), (1, -1), (1, -1, 1), (-1, 1)])
def test_megatrons_last_rank_has_the_last_stage(ways: tuple[int, ...]) -> None:
    layout = rounds(4, *ways)
    positions = Positions.of(layout)
    assert positions.rank_at(layout.only_placement[-1]) == 3
    assert positions.folded is (layout.only_placement[0] == layout.only_placement[-1])


def test_a_v_counts_backwards() -> None:
    positions = Positions.of(rounds(4, 1, -1))
    assert positions == Positions(4, backwards=True, mirrored=(True, False))
    assert positions.in_order(["last", "third", "second", "first"]) == ("first", "second", "third", "last")
    assert positions.in_order([30, 20, 10, 0]) == (0, 10, 20, 30)
    assert not positions.native


@pytest.mark.parametrize("ways", [(1,), (1, 1, 1)])
def test_megatrons_own_placement_is_left_as_it_is(ways: tuple[int, ...]) -> None:
    positions = Positions.of(rounds(4, *ways))
    assert positions.native
    assert positions.in_order("abcd") == tuple("abcd")
    assert positions == SchedulingConfig(balance=True, num_ranks=4, num_chunks=len(ways)).positions
    own = ScheduleConfig("interleaved-1f1b" if len(ways) > 1 else "gpipe", 4, 8, len(ways))
    assert positions == SchedulingConfig(balance=False, num_ranks=4, num_chunks=len(ways), own=own).positions


def test_one_rank_has_one_way() -> None:
    assert Positions.of(one_pipe([0, 0])).native


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 2, 1, 3), (0, 1, 2, 0, 2, 1)])
def test_a_chunk_that_jumps_is_refused(placement: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"stages \d to \d are on ranks .* goes through ranks 0 to \d in order, one way or the other"):
        Positions.of(one_pipe(placement))


def test_two_pipes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 pipes"):
        Positions.of(Layout(((0, 1), (1, 0))))
