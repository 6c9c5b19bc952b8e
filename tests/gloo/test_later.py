"""A later Megatron, whose functions have further parameters with defaults, trains as by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_training import same

BATCH = ("--global-batch-size", "16")
# Its own loop, ours, and backwards in two halves, of which the linear layers' functions are replaced.
KINDS = {
    "megatrons_loop": BPIPE,
    "our_loop": ("--bpipe-executor", *BPIPE),
    "split": ("--bpipe-schedule", "zb-h1"),
}


@pytest.fixture(scope="module")
def trained(run_cases: Callable[..., Outcome]) -> Outcome:
    cases = [Case("stock", BATCH), *(Case(name, (*BATCH, *flags)) for name, flags in KINDS.items())]
    return run_cases(4, cases, 300, worker="later_worker.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_further_parameters_are_handed_on(trained: Outcome, kind: str) -> None:
    same(trained, "stock", kind, 4)
