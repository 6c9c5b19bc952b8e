"""Whatever of shards of the vocabulary is done wrongly on purpose, a comparison with stock notices, or the run ends.

Whoever does not wait takes what is there, and one rank is late; the run that is late and does nothing else wrong
passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gloo.conftest import Case, Outcome
from tests.gloo.test_parallelism import OVERLAPS
from tests.gloo.test_vocabulary import FP32, INPUT, PARTS, UNTIED, as_stock

EIGHT = (*UNTIED, "--global-batch-size", "16")
# Two replicas, whose weights are gathered while the first micro-batches are computed; a shard's in a bucket that is
# nobody else's.
GATHERED = (
    *(*UNTIED, "--num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "8"),
    *(*OVERLAPS, "--ddp-bucket-size", "1000"),
)
# What is done wrongly, in which run, by which algorithm.
WRONG = [
    ("statistics", EIGHT, "1"),
    ("sum", EIGHT, "1"),
    ("sum", EIGHT, "interlaced"),
    ("second-step", EIGHT, "2"),
    ("early", EIGHT, "2"),
    ("order", EIGHT, "1"),
    ("order", EIGHT, "2"),
    ("weight", GATHERED, "1"),
    ("weight", GATHERED, "2"),
    ("lookups", EIGHT, "1"),
    ("gradients", EIGHT, "1"),
    ("no-lookup", EIGHT, "2"),
    ("no-gradient", EIGHT, "2"),
]
# What goes wrong with the embedding's shards.
INPUTS = ("lookups", "gradients", "no-lookup", "no-gradient")


# What ends a run that does not come so far as to be compared: another rank's message, the run's own check, or
# Megatron's.
ENDED = {
    "second-step": "not enough values to unpack",
    "order": "--bpipe-timeout|did not pass",
    "no-lookup": "--bpipe-timeout|did not pass",
    "weight": "param_gather_handle is None",
    # Memory that nobody has filled may hold what makes a loss infinite.
    "statistics": "weight of each token depends on the losses|Unexpected result -?(inf|nan)",
    "sum": "weight of each token depends on the losses",
    "early": "weight of each token depends on the losses",
}


def trained(run_cases: Callable[..., Outcome], wrong: str, flags: tuple[str, ...], algorithm: str) -> Outcome:
    ours = ("--bpipe-vocabulary", algorithm, "--bpipe-timeout", "10", *(INPUT[:1] if wrong in INPUTS else ()))
    cases = [Case("stock", flags), Case(f"stock_{wrong}", (*flags, *ours))]
    return run_cases(4, cases, timeout_s=110, worker="wrong_shards.py")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("flags", "algorithm"), [(EIGHT, "1"), (EIGHT, "2"), (GATHERED, "1")], ids=["1", "2", "gathered"]
)
def test_one_rank_that_is_late_changes_nothing(
    run_cases: Callable[..., Outcome], flags: tuple[str, ...], algorithm: str
) -> None:
    gathered = flags is GATHERED
    as_stock(
        trained(run_cases, "nothing", flags, algorithm),
        "stock",
        "nothing",
        PARTS if gathered else FP32,
        2 if gathered else 4,
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("wrong", "flags", "algorithm"), WRONG, ids=[f"{wrong}-{algorithm}" for wrong, _, algorithm in WRONG]
)
def test_what_is_done_wrongly_is_noticed(
    run_cases: Callable[..., Outcome], wrong: str, flags: tuple[str, ...], algorithm: str
) -> None:
    outcome = trained(run_cases, wrong, flags, algorithm)
    assert (outcome.folder / "stock.rank3.json").exists(), outcome.logs[3][-3000:]
    if any(outcome.codes):
        lines = [line for log in outcome.logs for line in log.splitlines()]
        ended = [line for line in lines if re.match(r"(\[rank\d\]: )*[\w.]*(Error|Fault)\b", line)]
        print(*dict.fromkeys(ended), sep="\n")
        assert any(re.search(ENDED[wrong], line) for line in lines), ended
        return
    gathered = flags is GATHERED
    with pytest.raises(AssertionError):
        as_stock(outcome, "stock", wrong, PARTS if gathered else FP32, 2 if gathered else 4)
