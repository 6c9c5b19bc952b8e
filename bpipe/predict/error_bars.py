"""Say how far measured times may lie from predicted ones.

In: a Setup. Out: `ErrorBars` of runs of its kind, or None where no run of any is known.

The figures are those of the runs in docs/validation.md, none of which was given a time; its script computes them anew,
and a test holds this table to it. Knows no prediction.
"""

from __future__ import annotations

from math import floor, log10
from typing import NamedTuple

from bpipe.predict.cluster import Cluster
from bpipe.predict.layout import Setup

# Of so many runs and more the range leaves out 5 % of them at each end; of fewer it holds all.
MANY_RUNS = 20


class ErrorBars(NamedTuple):
    """Range of measured times of `num_runs` runs of one kind, and their median: in percent, how much longer than
    predicted they took."""

    kind: str
    num_runs: int
    low: int
    median: int
    high: int

    def range_s(self, predicted_s: float) -> tuple[float, float]:
        """Return the least and the most seconds that a run predicted so is likely to take."""
        return predicted_s * (1 + self.low / 100), predicted_s * (1 + self.high / 100)


AMPERE = ErrorBars("dense models on A100s", 65, -5, 2, 11)
HOPPER = ErrorBars("dense models on H100s", 7, -4, 1, 10)
BLACKWELL = ErrorBars("dense models on Blackwell", 7, 11, 18, 27)
EXPERTS = ErrorBars("models with experts", 6, 5, 17, 68)
# Of every two runs of one source, one predicted with the factor of the other.
CALIBRATED = ErrorBars("one source, one calibrating the other", 748, -6, 0, 6)

# By device, the runs of dense models of its generation.
_DENSE = {
    **dict.fromkeys(("a100-40g", "a100-80g", "a800-80g"), AMPERE),
    **dict.fromkeys(("h100-80g", "h200-141g"), HOPPER),
    **dict.fromkeys(("b200-180g", "gb200-186g"), BLACKWELL),
}
# The generations whose runs decided the constants of predictions (`rates`).
_CALIBRATED_KINDS = (AMPERE, HOPPER)


def error_bars(setup: Setup) -> ErrorBars | None:
    """Return the error bars of a setup: of calibrated clusters those of calibrated runs."""
    if setup.cluster.factor != 1:
        return CALIBRATED
    dense = _DENSE.get(setup.cluster.device.name)
    return EXPERTS if dense is not None and setup.model.experts is not None else dense


def is_never_calibrated(cluster: Cluster) -> bool:
    """Return whether no run on such a device had a say in the constants of predictions, and none of the user's has."""
    return cluster.factor == 1 and _DENSE.get(cluster.device.name) not in _CALIBRATED_KINDS


def range_words(setup: Setup, predicted_s: float) -> str:
    """Return the range in seconds without brackets, its longest to three digits; nothing where none is known."""
    bars = error_bars(setup)
    if bars is None:
        return ""
    least_s, most_s = bars.range_s(predicted_s)
    decimals = max(0, 2 - floor(log10(most_s)))
    return f"{least_s:.{decimals}f} to {most_s:.{decimals}f}"
