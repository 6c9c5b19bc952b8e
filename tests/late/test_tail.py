"""Every path over every transport, also with differing sizes, is right in all directed orders and in random ones.

$BPIPE_LATE_SEEDS is the number of random orders of each case: 200 take a night.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from tests.late.cases import SCHEDULES
from tests.late.devices import Draw, draws
from tests.late.pipeline import KINDS, LatePipeline, wrong_bits
from tests.late.pipelined import LISTED, TorchPipeline, kinds_of
from tests.late.sharded import SHARDED, ShardedPipeline

SEEDS = int(os.environ.get("BPIPE_LATE_SEEDS", "5"))
ITERATIONS = 3
# Paths whose activations stay in the rank's own node: the transport between ranks does not matter, so one is tested.
OWN = ("own memory", "slices in own memory")
# Paths whose sizes cannot differ: only first slices are evicted, and these attend to the same number of keys.
ALIKE = ("slices",)


def pipelines(path: str) -> Iterator[LatePipeline]:
    if path in LISTED:
        yield from (TorchPipeline(LISTED[path](), kind) for kind in kinds_of(path))
        return
    pipeline_class, source = (ShardedPipeline, SHARDED) if path in SHARDED else (LatePipeline, SCHEDULES)
    for differing in (False,) if path in ALIKE else (False, True):
        for kind in KINDS if path not in OWN else ("host",):
            yield pipeline_class(source[path](), kind, differing=differing)


def is_right(pipeline: LatePipeline, draw: Draw) -> None:
    print(f"{pipeline.kind}{', sizes that differ' * pipeline.differing}: {draw}")
    assert wrong_bits(pipeline, draw, ITERATIONS) == []
    assert not pipeline.differing or differed(pipeline), "no sizes differed"


def differed(pipeline: LatePipeline) -> bool:
    """Whether micro-batches of differing sizes moved from some stage."""
    moved = defaultdict(set)
    for rank in pipeline.ranks:
        assert rank.engine is not None
        for (stage, _), nbytes in (rank.engine.sizing.moved_each if rank.engine.sizing else {}).items():
            moved[stage].add(nbytes)
    return any(len(sizes - {0}) > 1 for sizes in moved.values())


def test_what_is_called_differing_differs() -> None:
    """In three paths, the case of differing sizes had equal sizes."""
    is_right(LatePipeline(SCHEDULES["interleaved"](), "host", differing=True), Draw(1))
    alike = LatePipeline(SCHEDULES["slices"](), "host", differing=True)
    assert wrong_bits(alike, Draw(1)) == []
    assert not differed(alike)


@pytest.mark.parametrize(
    ("pipeline_class", "name", "kind"),
    [
        (ShardedPipeline, "vocabulary 1", "peer"),
        pytest.param(LatePipeline, "interleaved", "host", marks=pytest.mark.slow),
    ],
)
def test_directed_orders_of_a_case_are_right(pipeline_class: Callable[..., LatePipeline], name: str, kind: str) -> None:
    for draw in draws(1):
        is_right(pipeline_class({**SCHEDULES, **SHARDED}[name](), kind, differing=True), draw)


@pytest.mark.slow
@pytest.mark.parametrize("path", [*SCHEDULES, *SHARDED, *LISTED])
def test_directed_orders_and_a_few_seeds_of_a_path_are_right(path: str) -> None:
    for draw in draws(SEEDS):
        for pipeline in pipelines(path):
            is_right(pipeline, draw)
