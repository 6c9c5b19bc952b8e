"""Two pipes over 4 and 8 ranks, of every number of chunks and of micro-batches, equal stock with as many virtual
stages, bit by bit.

To Megatron they are pipelines of p/2 ranks with 2v virtual stages each in twice as many replicas, and that is "stock"
here, by its own interleaved loop. What a row has in common with stock stands in `FLAGS`, several features in one run;
one at a time they are in test_two_pipes_trained.py, with fewer sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.gloo.conftest import Case, Outcome, asked_for
from tests.gloo.test_parallelism import OVERLAPS
from tests.gloo.test_placed import alike
from tests.gloo.test_two_pipes_trained import ALIKE, by, chunks_of, pipeline, same_gradients

BUCKETS = ("--ddp-bucket-size", "20000")
FLAGS: dict[str, tuple[str, ...]] = {
    "plain": ("--gradients",),
    # Of gradients a rank then has the sums of its shard alone, and stock's shards are other weights.
    "sharded": (
        "--use-distributed-optimizer",
        "--calculate-per-token-loss",
        "--eval-interval",
        "1",
        "--eval-iters",
        "2",
    ),
    "eager": ("--overlap-grad-reduce", "--bf16", *BUCKETS),
    "overlaps": (*OVERLAPS, *BUCKETS),
    "unaligned": (*OVERLAPS, "--no-align-grad-reduce", "--no-align-param-gather"),
}
BY_CHUNKS = ("chimera", "bitpipe-2", "bitpipe-3")
# What lets more in differs from these in its orders alone.
ALSO_PLAIN = ("mixpipe", "bitpipe-early-2", "bitpipe-early-3")


class Sized(NamedTuple):
    row: str
    ranks: int
    microbatches: int
    schedule: str

    @property
    def stock(self) -> str:
        return f"{self.row}_{self.microbatches}_stock_{2 * chunks_of(self.schedule)}"

    @property
    def ours(self) -> str:
        return f"{self.row}_{self.microbatches}_{self.schedule}"

    def cases(self) -> list[Case]:
        """Stock's, and ours."""
        chunks = chunks_of(self.schedule)
        sizes = (
            "--num-layers",
            str(self.ranks * chunks),
            "--micro-batch-size",
            "1",
            "--global-batch-size",
            str(self.microbatches),
        )
        common = (*ALIKE, *sizes, "--train-iters", "2", *FLAGS[self.row])
        stock = Case(self.stock, (*common, *pipeline(self.ranks // 2, 2 * chunks)))
        return [stock, Case(self.ours, (*common, *by(self.schedule, self.ranks)))]


SIZED = [
    Sized(row, ranks, rounds * ranks, schedule)
    for row in FLAGS
    for ranks in (4, 8)
    for rounds in (1, 2, 3, 4)
    for schedule in (*BY_CHUNKS, *(ALSO_PLAIN if row == "plain" else ()))
]


@pytest.fixture(scope="module")
def outcome(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Callable[[int], Outcome]:
    done: dict[int, Outcome] = {}

    def of(ranks: int) -> Outcome:
        if ranks not in done:
            wanted = [Sized(*one) for one in asked_for(request, *Sized._fields)]
            cases = {case.name: case for one in sorted(wanted) if one.ranks == ranks for case in one.cases()}
            done[ranks] = run_cases(ranks, list(cases.values()), timeout_s=2400, worker="named_worker.py")
        return done[ranks]

    return of


@pytest.mark.slow
@pytest.mark.timeout(2460)
@pytest.mark.parametrize(Sized._fields, SIZED)
def test_every_size_trains_as_stock_does(
    outcome: Callable[[int], Outcome], row: str, ranks: int, microbatches: int, schedule: str
) -> None:
    one, run = Sized(row, ranks, microbatches, schedule), outcome(ranks)
    alike(run, one.stock, one.ours, world=ranks)
    if "--gradients" in FLAGS[row]:
        same_gradients(run, one.stock, one.ours, ranks)
    evaluations = run.record(one.ours, ranks - 1)["evaluations"]
    assert evaluations == run.record(one.stock, ranks - 1)["evaluations"]
    assert bool(evaluations) is ("--eval-interval" in FLAGS[row])
