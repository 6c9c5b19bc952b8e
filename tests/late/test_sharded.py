"""A sharded vocabulary on late devices has the bits of its plan on CPU tensors, and no deadlock with any queues."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bpipe.transport import collectives
from tests.late.devices import AS_LATE, COMPUTE_LAST, DIRECTED, Draw
from tests.late.pipeline import KINDS, noticed, wrong_bits
from tests.late.sharded import SHARDED, ShardedPipeline


@pytest.mark.parametrize("name", SHARDED)
def test_no_bit_differs_from_the_same_plan_on_a_cpu(name: str) -> None:
    first = [*SHARDED].index(name)
    for number, kind in enumerate(KINDS, first):
        for draw in (DIRECTED[number % len(DIRECTED)], Draw.of(number)):
            pipeline = ShardedPipeline(SHARDED[name](), kind)
            assert wrong_bits(pipeline, draw) == [], f"{kind}: {draw}"
            assert any(rank.moved_bytes for rank in pipeline.ranks)


@pytest.mark.parametrize("name", ["vocabulary 1", "vocabulary 2"])
@pytest.mark.parametrize("connections", [1, 2, 3, 5, 8])
def test_nobody_stands_still_whatever_queues_streams_share(name: str, connections: int) -> None:
    order = AS_LATE if connections % 2 else COMPUTE_LAST
    assert wrong_bits(ShardedPipeline(SHARDED[name](), "two-sided"), Draw(1, order, connections=connections)) == []


def test_several_kernels_for_what_one_rank_makes_stand_still_in_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage makes its output, labels and token weights. The second broadcast, posted ahead, heads the
    queue until the first ends, before the computation that the last stage waits for."""

    def one_by_one(group: object, tensors: Sequence[torch.Tensor], start: Callable[[torch.Tensor], Any]) -> list[Any]:
        return [start(tensor) for tensor in tensors]

    monkeypatch.setattr(collectives, "in_one_call", one_by_one)
    with pytest.raises(RuntimeError, match="nobody can go on"):
        ShardedPipeline(SHARDED["vocabulary 1"](), "two-sided").run(Draw(1, AS_LATE, connections=1))


@pytest.mark.parametrize("name", ["vocabulary 1", "vocabulary 2"])
def test_a_collective_that_nobody_waits_for_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = collectives.Collectives.wait

    def hasty(self: collectives.Collectives, message: Any) -> Any:
        passing = self._passing.get(message.value)
        return wait(self, message) if passing is None else (*passing.result, *passing.later_result)

    monkeypatch.setattr(collectives.Collectives, "wait", hasty)
    assert noticed(lambda: ShardedPipeline(SHARDED[name](), "two-sided"))
