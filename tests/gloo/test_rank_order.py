"""Our order of ranks equals that of Megatron's RankGenerator.

It is not a unit test, because importing Megatron takes seconds.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from bpipe.placement import Part, Topology
from megatron.scheduling.placement.rank_order import rank_of
from tests.gloo.conftest import finish, free_ports, start

ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}
# tensor, context, pipeline, data: the paper's runs and odd sizes.
SIZES = [
    (1, 1, 4, 1),
    (1, 1, 16, 1),
    (2, 1, 4, 2),
    (4, 1, 8, 1),
    (4, 1, 12, 1),
    (2, 2, 4, 3),
    (1, 3, 5, 2),
    (8, 1, 4, 2),
    (2, 1, 1, 4),
]

# Megatron itself adds an axis of sharded weights to the order; with a size of 1 it must change nothing.
ASK_MEGATRON = """
import json, sys
from megatron.core.parallel_state import RankGenerator, _inject_gtp_remat_axis
answers = []
for (tp, cp, pp, dp), order in json.loads(sys.argv[1]):
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=_inject_gtp_remat_axis(order, after="tp"))
    answers.append({token: dense.get_ranks(token) for token in ("tp", "cp", "dp", "pp")})
    # Expert parallelism takes ranks from data parallelism; the pipelines must not change. Megatron refuses it with the
    # pipeline before the data.
    if cp == 1 and dp % 2 == 0 and order.endswith("pp"):
        expert = RankGenerator(tp=tp, ep=2, dp=dp // 2, pp=pp, cp=1, order=_inject_gtp_remat_axis(order, after="ep"))
        answers[-1]["expert pp"] = expert.get_ranks("pp")
print("ANSWERS", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def megatron_groups(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[tuple[int, ...], bool], dict[str, list[list[int]]]]:
    queries = list(product(SIZES, ORDERS))
    question = json.dumps([(sizes, ORDERS[before_data]) for sizes, before_data in queries])
    folder = tmp_path_factory.mktemp("groups")
    script = folder / "ask.py"
    script.write_text(ASK_MEGATRON)
    ended = finish(start(1, [str(script), question], folder, free_ports(1)[0]), folder, 240)
    assert ended.codes == [0], ended.logs[0][-3000:]
    (line,) = [line for line in ended.logs[0].splitlines() if line.startswith("ANSWERS ")]
    answers: list[Any] = json.loads(line.removeprefix("ANSWERS "))
    return dict(zip(queries, answers, strict=True))


def groups(topology: Topology, pipeline_before_data: bool, along: str) -> list[list[int]]:
    """Return the groups of ranks that differ only in one dimension, in that dimension's order."""
    sizes = {
        "stage": topology.pipeline,
        "replica": topology.data,
        "context": topology.context,
        "tensor": topology.tensor,
    }
    fixed = [name for name in sizes if name != along]
    result = []
    for values in product(*(range(sizes[name]) for name in fixed)):
        parts = (Part(**dict(zip(fixed, values, strict=True)), **{along: index}) for index in range(sizes[along]))
        result.append([rank_of(part, topology, pipeline_before_data) for part in parts])
    return sorted(result)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pipeline_before_data", ORDERS, ids=ORDERS.values())
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_groups_are_those_of_megatron(
    megatron_groups: dict[Any, Any], sizes: tuple[int, ...], pipeline_before_data: bool
) -> None:
    tensor, context, pipeline, data = sizes
    topology = Topology(tensor, context, pipeline, data, gpus_per_node=8)
    theirs = megatron_groups[sizes, pipeline_before_data]
    for token, along in (("tp", "tensor"), ("cp", "context"), ("dp", "replica"), ("pp", "stage")):
        assert groups(topology, pipeline_before_data, along) == sorted(theirs[token]), token
    if "expert pp" in theirs:
        assert groups(topology, pipeline_before_data, "stage") == sorted(theirs["expert pp"])
