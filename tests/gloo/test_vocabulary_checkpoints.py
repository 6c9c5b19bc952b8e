"""Checkpoints of runs with the vocabulary in shards are stock's: its keys and shapes, and each loads and continues
the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.gloo.conftest import Case, Outcome
from tests.gloo.test_training import same
from tests.gloo.test_vocabulary import EMBEDDING, FP32, INPUT, SHARDS, UNTIED, near, pairs_of

FOUR_MORE = ("--global-batch-size", "16", "--train-iters", "4")


# The optimizer's state of two stages on two replicas each, filed by weight.
DISTRIBUTED = (
    *(*UNTIED, "--num-layers", "2", "--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"),
    "--dist-ckpt-optim-fully-reshardable",
)


# Of copies that several replicas have, each file is written by one of them.
TIED_DATA = ("--num-layers", "2", "--pipeline-model-parallel-size", "2")
# And how it is split.
SAVED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "untied": (UNTIED, SHARDS),
    "untied_by_algorithm_2": (UNTIED, ("--bpipe-vocabulary", "2")),
    "untied_inputs": (UNTIED, (*INPUT, "1")),
    "tied": ((), SHARDS),
    "tied_by_algorithm_2": ((), ("--bpipe-vocabulary", "2")),
    "tied_inputs": ((), (*INPUT, "1")),
    "distributed": (DISTRIBUTED, SHARDS),
    "distributed_by_algorithm_2": (DISTRIBUTED, ("--bpipe-vocabulary", "2")),
    "distributed_inputs": (DISTRIBUTED, (*INPUT, "1")),
    "tied_distributed_inputs": (DISTRIBUTED[1:], (*INPUT, "2")),
    "tied_data": (TIED_DATA, SHARDS),
    "tied_data_inputs": (TIED_DATA, (*INPUT, "1")),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "untied" else pytest.mark.slow) for name in SAVED]
)
def checkpoints(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> tuple[Outcome, int]:
    """Of as many stages: saved after two iterations of four, with and without shards; continued from both, with and
    without."""
    flags, shards = SAVED[request.param]
    common = [*flags, *FOUR_MORE]
    found = []
    for saved, ours in (("stock", ()), ("shards", shards)):
        found.append(Case(f"{saved}_whole", [*common, "--save", f"{{folder}}/{saved}", "--save-interval", "2", *ours]))
    for saved in ("stock", "shards"):
        for going, ours in (("stock", ()), ("shards", shards)):
            found.append(
                Case(f"{going}_from_{saved}", [*common, "--load", f"{{folder}}/{saved}", "--ckpt-step", "2", *ours])
            )
    return run_cases(4, found, timeout_s=300, worker="tensors_worker.py"), 2 if "--num-layers" in common else 4


@pytest.mark.timeout(360)
def test_checkpoints_have_the_keys_and_shapes_of_stocks(checkpoints: tuple[Outcome, int]) -> None:
    def said(case: str) -> dict[str, Any]:
        reader = FileSystemReader(str(checkpoints[0].folder / case / "iter_0000002"))
        return {key: getattr(found, "size", None) for key, found in reader.read_metadata().state_dict_metadata.items()}

    stock, shards = said("stock"), said("shards")
    weights = {key: size for key, size in stock.items() if size is not None}
    assert any(key.startswith("optimizer") and EMBEDDING in key for key in weights)
    assert {key: size for key, size in shards.items() if size is not None} == weights


@pytest.mark.timeout(360)
@pytest.mark.parametrize("saved", ["stock", "shards"])
def test_a_checkpoint_of_either_is_loaded_to_the_bit_and_continued(
    checkpoints: tuple[Outcome, int], saved: str
) -> None:
    outcome, stages = checkpoints
    pairs = pairs_of(outcome, f"shards_from_{saved}", f"stock_from_{saved}", "start", stages)
    assert all(torch.equal(one, other) for one, other in pairs.values())
    losses = [
        [float.fromhex(step["lm loss"]) for step in outcome.record(case, 3)["iterations"][-2:]]
        for case in (f"shards_from_{saved}", f"stock_from_{saved}", f"{saved}_whole")
    ]
    for found in zip(*losses, strict=True):
        assert all(near(one, found[0], FP32.later) for one in found), losses
    # From its own checkpoint a run goes on as if it had not ended.
    same(outcome, f"{saved}_whole", f"{saved}_from_{saved}", 4, last=2)
