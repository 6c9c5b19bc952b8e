"""Layers that predict further tokens stand in a layout by hand where stages are placed as a V or in both directions:
trained as stock does, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_placed import ALIKE, FOUR, TWO, alike

AHEAD = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
LAYOUT = "--pipeline-model-parallel-layout"
UNTIED = "--untie-embeddings-and-output-weights"
STOCK = {
    "four": (*FOUR, LAYOUT, "Et*2|t*2|t*2|t*2mL"),
    "four_untied": (*FOUR, UNTIED, LAYOUT, "Et*2|t*2|t*2|t*2mL"),
    "two": (*TWO, LAYOUT, "Et*4|t*4mL"),
}
# By what is trained: the stock pipeline that it is compared with, and flags of ours.
RUNS = {
    "v-half": ("four", ("--bpipe-schedule", "v-half")),
    "v-min_balanced": ("four_untied", (UNTIED, "--bpipe-schedule", "v-min", *BPIPE)),
    "bitpipe": ("two", ("--bpipe-schedule", "bitpipe")),
}
# And with the logits of all tokens in shards, which add up in another order.
SHARDS = {
    "v-half_shards": ("--bpipe-schedule", "v-half", "--bpipe-vocabulary", "1"),
    "grouped_shards": ("--bpipe-schedule", "grouped-interleaved", "--bpipe-vocabulary", "2", *BPIPE),
}


@pytest.fixture(scope="module")
def trained(run_cases: Callable[..., Outcome]) -> Outcome:
    common = (*ALIKE, "--global-batch-size", "16", *AHEAD)
    cases = [Case(name, (*common, *flags)) for name, flags in STOCK.items()]
    for name, (_, flags) in RUNS.items():
        cases.append(Case(name, (*common, *FOUR, LAYOUT, "Et|t|t|t|t|t|t|tmL", *flags)))
    for name, flags in SHARDS.items():
        cases.append(Case(name, (*common, *FOUR, UNTIED, LAYOUT, "Et|t|t|t|t|t|t|tmL", *flags)))
    return run_cases(4, cases, 300, worker="named_worker.py")


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", RUNS)
def test_further_tokens_of_a_layout_are_where_the_loss_is(trained: Outcome, name: str) -> None:
    alike(trained, RUNS[name][0], name)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", SHARDS)
def test_further_tokens_of_a_layout_have_their_logits_in_shards(trained: Outcome, name: str) -> None:
    for place, (one, other) in enumerate(zip(losses(trained, name), losses(trained, "four_untied"), strict=True)):
        assert math.isclose(one, other, rel_tol=1e-6 if place else 2.5e-7), f"iteration {place + 1}"


def losses(outcome: Outcome, case: str) -> list[float]:
    """Of whichever rank has the loss."""
    ranks = [outcome.record(case, rank)["iterations"] for rank in range(4)]
    (found,) = ([float.fromhex(one["lm loss"]) for one in each] for each in ranks if "lm loss" in each[0])
    assert len(found) == 3
    return found
