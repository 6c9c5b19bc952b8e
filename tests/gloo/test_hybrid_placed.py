"""A hybrid model's pattern of layers is dealt out by stage: in a V and in both directions it trains as stock does, from
stock's weights and to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_placed import ALIKE, FOUR, TWO, alike

# The same layers in four, eight and two stages.
LAYERS = ("M*", "-*", "M", "-M", "*-", "M-", "M", "*-")
SCRIPT = ("--script", "plain_script_hybrid.py", "--global-batch-size", "16")


def pattern(stages: int) -> tuple[str, str]:
    each = len(LAYERS) // stages
    return "--hybrid-layer-pattern", "|".join("".join(LAYERS[at : at + each]) for at in range(0, len(LAYERS), each))


# The stock pipeline's ranks and stages, and what is trained: of two pipes each is one of half as many ranks.
RUNS = {
    "v-half": (FOUR, 4, ("--bpipe-schedule", "v-half")),
    "v-min_balanced": (FOUR, 4, ("--bpipe-schedule", "v-min", *BPIPE)),
    "bitpipe": (TWO, 4, ("--bpipe-schedule", "bitpipe")),
}


@pytest.fixture(scope="module")
def trained(run_cases: Callable[..., Outcome]) -> Outcome:
    common, cases = (*ALIKE, *SCRIPT), {}
    for name, (stock, stages, ours) in RUNS.items():
        cases[stock] = Case(f"stock_{stock[1]}", (*common, *stock, *pattern(stages)))
        cases[name] = Case(name, (*common, *FOUR, *pattern(8), *ours))
    return run_cases(4, list(cases.values()), 400, worker="named_worker.py")


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", RUNS)
def test_a_pattern_is_dealt_out_by_stage(trained: Outcome, name: str) -> None:
    alike(trained, f"stock_{RUNS[name][0][1]}", name)
