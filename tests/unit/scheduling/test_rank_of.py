"""The rank a part of the model has in Megatron's order, for any sizes: every rank once, neighbours where Megatron wants
them.

That Megatron itself agrees is tested in tests/gloo/test_rank_order.py, because importing it takes seconds.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.placement import Part, Topology, pair_adjacent
from megatron.scheduling.placement.rank_order import rank_of

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
    """On two nodes of eight GPUs, GPU 1 of the first node takes the last stage, and the last GPU of the second stage
    8."""
    topology = Topology(tensor=1, context=1, pipeline=16, data=1, gpus_per_node=8)
    ranks = [rank_of(part, topology, False) for part in pair_adjacent(topology)]
    assert ranks == [0, 15, 1, 14, 2, 13, 3, 12, 4, 11, 5, 10, 6, 9, 7, 8]
