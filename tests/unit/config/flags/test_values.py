"""Sizes as people type them: understood in any case, and never taken for another unit."""

from __future__ import annotations

import pytest

from bpipe.config.flags.budgets import read_budget, read_gib
from bpipe.config.flags.values import tokens
from bpipe.predict.cluster import GIB, parse_cluster


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("70", 70 * GIB), ("70g", 70 * GIB), ("70GiB", 70 * GIB), ("70GB", 70 * 10**9), ("0.5gib", GIB // 2)],
)
def test_a_budget_may_say_its_unit(text: str, num_bytes: int) -> None:
    assert read_gib(text) == (num_bytes,)
    assert read_budget(f"auto:{text}").budget_bytes == (num_bytes,)


@pytest.mark.parametrize("text", ["70MB", "70 GiB", "GB", "70GBB", "-1GB", "70,,70", "1e2"])
def test_another_unit_of_a_budget_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of GiB above 0"):
        read_gib(text)


def test_thousands_of_tokens_are_of_1024() -> None:
    assert [tokens(text) for text in ("8192", "8k", "128K")] == [8192, 8192, 131072]
    for text in ("8m", "0k", "8.5k", "k", "-8k"):
        with pytest.raises(ValueError, match="must be a whole number"):
            tokens(text)


@pytest.mark.parametrize("text", ["H100-80GB:16X8", "h100-80gb:16x8", "H100-80g:16x8"])
def test_a_cluster_is_read_in_any_case(text: str) -> None:
    assert parse_cluster(text) == parse_cluster("h100-80g:16x8")
