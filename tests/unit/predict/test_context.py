"""Context parallelism: equal steps of a ring, exposed exchanges, parts where Megatron places them, and refusals."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.plan.predict import predict
from bpipe.predict.cluster import Cluster, parse_cluster
from bpipe.predict.exchanges import Grid, exchange_bytes, nodes_of_copies
from bpipe.predict.layers.attention import core_seconds
from bpipe.predict.layers.layer import layer_saved
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.profile import Profile
from bpipe.predict.sizes import LINK_EFFICIENCY, LINK_LATENCY_S, Rates, total
from bpipe.predict.training import CP_COMM_TYPES
from tests.unit.predict.published import DEEPSEEK_V3

LLAMA = Setup(PRESETS["llama3-8b"], parse_cluster("h100-80g:4x8"), 2, 2, 1, 32, 131072, (16, 16), recompute="none")


@pytest.mark.parametrize("context", [2, 4, 8])
def test_steps_of_a_ring_are_of_equal_work(context: int) -> None:
    """Each rank has two of 2c parts, one from the front and one from the back. On the diagonal half of the pairs of
    tokens count."""
    size = 4
    ours = [[part, 2 * context - 1 - part] for part in range(context)]

    def pairs(query: int, key: int) -> float:
        return size * size if key < query else size * size / 2 if key == query else 0

    work = {
        (rank, step): sum(pairs(query, key) for query in ours[rank] for key in ours[(rank - step) % context])
        for rank in range(context)
        for step in range(context)
    }
    assert set(work.values()) == {(2 * context * size) ** 2 / 2 / context**2}


def test_what_is_gathered_is_waited_for() -> None:
    fast = replace(LLAMA, cluster=Cluster(replace(LLAMA.cluster.device, memory_bytes_per_s=1e30), 1, 64), context=4)
    core = core_seconds(replace(fast, context=1), Rates.of(fast))[0] / 4
    both, query = 2 * 2 * 32768 * 1024 // 2, 2 * 32768 * 4096 // 2
    link = fast.cluster.device.inside_bytes_per_s * LINK_EFFICIENCY
    result = {how: core_seconds(replace(fast, cp_comm_type=how), Rates.of(fast))[0] - core for how in CP_COMM_TYPES}
    assert result["all_gather"] == pytest.approx(3 * both / link + LINK_LATENCY_S)
    assert result["a2a"] == pytest.approx(3 / 4 * (2 * query + both) / link + 2 * LINK_LATENCY_S)
    assert result["p2p"] == pytest.approx(0.0, abs=1e-12)
    # Two of four ranks are on another node: half of what is sent takes the port; two gathered parts take two ports.
    apart = replace(fast, cluster=Cluster(fast.cluster.device, 16, 4))
    port = fast.cluster.device.between_bytes_per_s * LINK_EFFICIENCY
    result = {how: core_seconds(replace(apart, cp_comm_type=how), Rates.of(apart))[0] - core for how in CP_COMM_TYPES}
    assert result["all_gather"] == pytest.approx(both / port + LINK_LATENCY_S)
    assert result["a2a"] == pytest.approx((2 * query + both) / 2 / port + 2 * LINK_LATENCY_S)


@pytest.mark.parametrize("how", CP_COMM_TYPES)
def test_an_iteration_on_the_same_devices_is_hardly_slower_over_fast_links(how: str) -> None:
    whole = replace(LLAMA, global_batch=512)
    parted = replace(whole, context=4, cp_comm_type=how)
    assert predict(parted).mfu == pytest.approx(predict(whole).mfu, rel=0.06)
    assert predict(parted).setup.data * 4 == whole.data
    assert exchange_bytes(parted) > 0 == exchange_bytes(whole)


def _megatrons_groups(tensor: int, context: int, pipeline: int, data: int, token: str) -> list[list[int]]:
    """`RankGenerator` of Megatron's parallel_state.py, without the rest of it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.submodule_search_locations
    source = (Path(next(iter(spec.submodule_search_locations))) / "parallel_state.py").read_text()
    names = ("RankGenerator", "generate_masked_orthogonal_rank_groups", "_inject_gtp_remat_axis")
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", "") in names]
    future = ast.parse("from __future__ import annotations").body
    namespace: dict[str, Any] = {"List": list, "Optional": Any}
    exec(compile(ast.Module([*future, *nodes], []), "parallel_state.py", "exec"), namespace)
    generator = namespace["RankGenerator"](
        tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp", rank_offset=0
    )
    groups: list[list[int]] = generator.get_ranks(token)
    return groups


@pytest.mark.slow
@given(*(st.sampled_from([1, 2, 4]) for _ in range(4)), st.sampled_from([2, 4, 8]))
def test_parts_lie_where_megatron_puts_them(tensor: int, context: int, pipeline: int, data: int, per_node: int) -> None:
    nodes = nodes_of_copies(Grid(tensor, context, pipeline, data, per_node, per_node), False, None)
    # Of the first tensor-parallel rank: data- and context-parallel ranks reduce gradients together.
    for number, group in enumerate(_megatrons_groups(tensor, context, pipeline, data, "dp-cp")[::tensor]):
        assert [nodes[number, copy] for copy in range(data * context)] == [rank // per_node for rank in group]
    rings = _megatrons_groups(tensor, context, pipeline, data, "cp")[::tensor]
    for number, ring in enumerate(rings):
        rank, replica = divmod(number, data)
        assert [nodes[rank, replica * context + part] for part in range(context)] == [
            member // per_node for member in ring
        ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 3}, "does not divide the 32 devices"),
        ({"context": 0}, "context is 0, but must be at least 1"),
        ({"context": 2, "cp_comm_type": "ring"}, "unknown cp_comm_type 'ring'"),
        ({"context": 4, "sequence": 2 * 4 * 1000 + 4}, r"must be a multiple of 2\*c and t\*c = 8"),
        ({"context": 4, "attention": "unfused"}, "needs flash attention on GPUs"),
        ({"context": 2, "attention": "unfused", "kernels": "cpu"}, "needs flash attention on GPUs"),
        ({"context": 8, "cp_comm_type": "a2a"}, r"t\*c = 16 does not divide the 32 heads and 8 query groups"),
        ({"context": 2, "model": replace(PRESETS["llama3-8b"], window=4096)}, "give --cp-comm-type all_gather or a2a"),
        (
            {"context": 2, "model": replace(DEEPSEEK_V3, num_layers=32, experts=None), "cp_comm_type": "a2a"},
            "give --cp-comm-type p2p",
        ),
    ],
)
def test_impossible_setups_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **changes)


def test_profiles_without_context_parallelism_do_not_apply() -> None:
    two = replace(LLAMA, context=2)
    assert "measured without context parallelism" in str(Profile("file", (), (("tensor", 2),)).conflict(two))
    # The output of attention before its exchange is kept, and so is the input of the projection.
    rows = {how: total(layer_saved(replace(two, cp_comm_type=how))) for how in CP_COMM_TYPES}
    assert rows["all_gather"] == rows["a2a"] == rows["p2p"] + 2 * 65536 * 4096 // 2
