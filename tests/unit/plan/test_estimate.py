"""The two formulas of Huang et al. 2024, by their own example: t=4, p=8, B=128."""

from __future__ import annotations

import pytest

from bpipe.plan.estimate import estimate, iteration_seconds, verdict


def test_the_authors_examples() -> None:
    recomputed = estimate(128, 8, 2, 1, 0.552, 0.378)
    assert recomputed.ratio == pytest.approx((128 + 7) / (128 + 14) * 55.2 / 37.8)
    # They measured 34.0 -> 45.8 %, 1.347.
    assert recomputed.ratio == pytest.approx(45.8 / 34.0, rel=0.04)
    flash = estimate(128, 8, 2, 1, 0.624, 0.577)
    # They measured 52.0 -> 51.7 %.
    assert flash.ratio == pytest.approx(51.7 / 52.0, rel=0.04)
    assert iteration_seconds(128, 8, 2, 0.43127) == pytest.approx(71 * 0.43127)


def test_the_verdict_allows_for_the_formulas_error() -> None:
    gains = ((0.552, 0.378, "gains 1.388x"), (0.624, 0.577, "does not clearly help"), (0.5, 0.577, "does not help"))
    for larger, smaller, words in gains:
        assert words in verdict(estimate(128, 8, 2, 1, larger, smaller), 2, 1, larger, smaller)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((128, 8, 3, 1, 0.5, 0.5), "micro-batch 3 does not divide the global batch 128"),
        ((128, 8, 2, 1, 1.1, 0.5), "a stage MFU is 110 %"),
        ((0, 8, 2, 1, 0.5, 0.5), "global batch is 0, but must be at least 1"),
    ],
)
def test_refusals(values: tuple[int, int, int, int, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(*values)
