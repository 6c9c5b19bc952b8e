"""The schedule's ranks and Megatron's: positions, stages, and the order of ranks for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig
from bpipe.placement import Part, Topology, pair_adjacent
from bpipe.schedule.layout import Layout, one_pipe
from megatron.scheduling.options.arguments import SchedulingConfig
from megatron.scheduling.placement.positions import Positions
from megatron.scheduling.placement.rank_order import rank_of


def rounds(num_ranks: int, *ways: int) -> Layout:
    """Chunks that go up the ranks (1) or down (-1)."""
    return one_pipe([rank for way in ways for rank in range(num_ranks)[::way]])


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("ways", "backwards"), [((1,), False), ((1, 1, 1), False), ((1, -1), True), ((1, -1, 1), False), ((-1, 1), False)]
)
def test_every_stage_is_built_where_the_schedule_computes_it(
    num_ranks: int, ways: tuple[int, ...], backwards: bool
) -> None:
    layout = rounds(num_ranks, *ways)
    positions = Positions.of(layout)
    assert positions.backwards is backwards
    for stage, position in enumerate(layout.placements[0]):
        rank, chunk = positions.rank_at(position), stage // num_ranks
        assert positions.position_of(rank) == position
        assert chunk * num_ranks + positions.seen(rank, chunk) == stage


@pytest.mark.parametrize("ways", [(1,), (1, 1, 1)])
def test_megatrons_own_placement_is_left_as_it_is(ways: tuple[int, ...]) -> None:
    positions = Positions.of(rounds(4, *ways))
    assert positions.native
    assert positions.in_order("abcd") == tuple("abcd")
    assert positions == SchedulingConfig(num_ranks=4, num_chunks=len(ways), balance=BalanceConfig()).positions
    own = ScheduleConfig("interleaved-1f1b" if len(ways) > 1 else "gpipe", 4, 8, num_chunks=len(ways))
    assert positions == SchedulingConfig(num_ranks=4, num_chunks=len(ways), own=own).positions


@pytest.mark.parametrize("placement", [(0, 0, 1, 1), (0, 2, 1, 3), (0, 1, 2, 0, 2, 1)])
def test_a_chunk_that_jumps_is_refused(placement: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"stages \d to \d are on ranks .* goes through ranks 0 to \d in ascending"):
        Positions.of(one_pipe(placement))


def opposite(num_ranks: int, *ways: int) -> Layout:
    """Two pipes, of which the second is the first one's mirror image."""
    (first,) = rounds(num_ranks, *ways).placements
    return Layout((first, tuple(num_ranks - 1 - rank for rank in first)))


@pytest.mark.parametrize("num_ranks", [4, 6, 8])
@pytest.mark.parametrize("ways", [(1,), (1, -1), (1, -1, 1), (1, 1), (-1,)])
def test_two_pipes_are_two_replicas_of_half_as_many_ranks(num_ranks: int, ways: tuple[int, ...]) -> None:
    """Each chunk is built as the stage that its rank computes, and reads the samples of that stage's pipe."""
    layout = opposite(num_ranks, *ways)
    positions = Positions.of(layout)
    assert (positions.num_ranks, positions.pipeline_size, positions.num_pipes) == (num_ranks, num_ranks // 2, 2)
    assert positions.folded
    seen = set()
    for position in range(num_ranks):
        rank, half = positions.rank_at(position), positions.half_of(position)
        assert positions.position_of(rank, half) == position
        assert rank == positions.rank_at(num_ranks - 1 - position), (
            "mirror images are one rank of Megatron's, of two replicas"
        )
        for chunk, stage in enumerate(layout.stages_of(position)):
            assert chunk * (num_ranks // 2) + positions.seen(rank, chunk) == stage
            for pair in (0, 4):
                pipe = positions.replica_of(pair + half, chunk) - pair
                assert layout.rank_of(stage, pipe) == position
                seen.add((stage, pipe))
    assert len(seen) == 2 * layout.num_stages
    first, last = (layout.rank_of(stage, 0) for stage in (0, layout.num_stages - 1))
    assert positions.rank_at(first) == positions.rank_at(last) == num_ranks // 2 - 1, (
        "Megatron's last rank has the loss"
    )


@pytest.mark.parametrize(
    "layout", [opposite(2, 1), Layout(((0, 1, 2, 3), (0, 1, 2, 3))), Layout(((0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3)))]
)
def test_other_pipes_are_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"[23] pipes over \d ranks: only two pipes in .* an even number of 4 or more"):
        Positions.of(layout)


TOPOLOGIES = st.builds(
    Topology,
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2, 3]),
    pipeline=st.integers(1, 17),
    data=st.integers(1, 5),
    gpus_per_node=st.sampled_from([1, 2, 4, 8, 16]),
)
ORDERS = [pytest.param(False, id="tp-cp-dp-pp"), pytest.param(True, id="tp-cp-pp-dp")]


@pytest.mark.parametrize("pipeline_before_data", ORDERS)
@given(topology=TOPOLOGIES)
def test_a_placement_is_a_permutation(pipeline_before_data: bool, topology: Topology) -> None:
    """Two processes with one rank, or a rank without a process, would hang the rendezvous."""
    ranks = [rank_of(part, topology, pipeline_before_data) for part in pair_adjacent(topology)]
    assert sorted(ranks) == list(range(topology.world))
    assert ranks[0] == 0, "rank 0 stays where the store is"


@pytest.mark.parametrize("pipeline_before_data", ORDERS)
@given(topology=TOPOLOGIES)
def test_tensor_groups_are_neighbours_in_rank_and_in_place(pipeline_before_data: bool, topology: Topology) -> None:
    ranks = [rank_of(part, topology, pipeline_before_data) for part in pair_adjacent(topology)]
    for place in range(0, topology.world, topology.block):
        first = ranks[place]
        assert first % topology.block == 0
        assert ranks[place : place + topology.block] == list(range(first, first + topology.block))


@pytest.mark.parametrize("pipeline_before_data", ORDERS)
@given(topology=TOPOLOGIES)
def test_dimensions_come_in_order_from_the_innermost(pipeline_before_data: bool, topology: Topology) -> None:
    """Slow and obvious: nest the loops from the outermost dimension to the innermost and count."""
    outer, inner = (topology.data, topology.pipeline) if pipeline_before_data else (topology.pipeline, topology.data)
    parts = (
        Part(
            stage=(b if pipeline_before_data else a),
            replica=(a if pipeline_before_data else b),
            context=context,
            tensor=tensor,
        )
        for a in range(outer)
        for b in range(inner)
        for context in range(topology.context)
        for tensor in range(topology.tensor)
    )
    for rank, part in enumerate(parts):
        assert rank_of(part, topology, pipeline_before_data) == rank


def test_the_sixteen_stages_of_the_paper() -> None:
    """On two nodes of eight GPUs, GPU 1 of the first node takes the last stage."""
    topology = Topology(tensor=1, context=1, pipeline=16, data=1, gpus_per_node=8)
    ranks = [rank_of(part, topology, False) for part in pair_adjacent(topology)]
    assert ranks == [0, 15, 1, 14, 2, 13, 3, 12, 4, 11, 5, 10, 6, 9, 7, 8]
