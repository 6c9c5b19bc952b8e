"""Pair-adjacent placement: what must hold for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.placement import Topology, pair_adjacent, pairs_apart


def test_middle_stages_do_not_push_pairs_apart() -> None:
    """Five stages on nodes of four: laid out replica by replica, the second replica's pair (1, 3) would be on two
    nodes."""
    topology = Topology(tensor=1, context=1, pipeline=5, data=4, gpus_per_node=4)
    assert not pairs_apart(topology, pair_adjacent(topology))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="gpus_per_node is 0, but must be at least 1"):
        Topology(tensor=1, context=1, pipeline=4, data=1, gpus_per_node=0)


SIZES = st.builds(
    Topology,
    tensor=st.sampled_from([1, 2, 4, 8]),
    context=st.sampled_from([1, 2]),
    pipeline=st.integers(1, 17),
    data=st.integers(1, 5),
    gpus_per_node=st.sampled_from([1, 2, 4, 8, 16]),
)


@given(SIZES)
def test_any_placement(topology: Topology) -> None:
    parts = pair_adjacent(topology)
    assert len(set(parts)) == len(parts) == topology.world, "every part has one place"
    for place, part in enumerate(parts):
        assert (part.tensor, part.context) == (place % topology.tensor, place // topology.tensor % topology.context), (
            "blocks are contiguous"
        )
    assert parts[0] == (0, 0, 0, 0), "rank 0 stays where its store is"
    if 2 * topology.block <= topology.gpus_per_node:
        assert not pairs_apart(topology, parts)
