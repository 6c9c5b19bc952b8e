"""Compute the error bars of predicted times anew from all published runs.

In: tests/data. Out: by kind, its `ErrorBars`. Needs no torch, writes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations

from bpipe.predict.error_bars import AMPERE, BLACKWELL, CALIBRATED, EXPERTS, HOPPER, MANY_RUNS, ErrorBars, error_bars
from validation.eight_bit import of_fp8
from validation.experts import of_experts
from validation.throughput import PEAK, kept_back, throughputs


def measured_bars() -> list[ErrorBars]:
    """Return the error bars of every kind, as the runs have them."""
    found: dict[str, list[float]] = {kind.kind: [] for kind in (AMPERE, HOPPER, BLACKWELL, EXPERTS)}
    for one in (*throughputs(), *kept_back(), *of_fp8(), *of_experts()):
        kind = error_bars(one.setup)
        if one.quantity != PEAK and kind is not None:
            found[kind.kind].append(1 / one.seconds_ratio)
    return [*(_bars(kind, ratios) for kind, ratios in found.items()), _bars(CALIBRATED.kind, list(_calibrated()))]


def _calibrated() -> Iterator[float]:
    by_source: dict[str, list[float]] = {}
    for one in throughputs():
        if one.quantity != PEAK:
            by_source.setdefault(one.source, []).append(1 / one.seconds_ratio)
    for ratios in by_source.values():
        yield from (other / one for one, other in permutations(ratios, 2))


def _bars(kind: str, ratios: Sequence[float]) -> ErrorBars:
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, high = min(percent), max(percent)
    if len(percent) >= MANY_RUNS:
        low, *_, high = statistics.quantiles(percent, n=20, method="inclusive")
    return ErrorBars(kind, len(percent), *_rounded((low, statistics.median(percent), high)))


def _rounded(values: Iterable[float]) -> list[int]:
    return [round(value) for value in values]
