"""How far measured times lie from predicted ones, by kind of run.

The figures are those of the runs in docs/validation.md; scripts/bench/predictions.py computes them, and a test compares
them with this table. The formulas are too fast for some kinds of runs, so their predictions are multiplied by the
median of the published runs of that kind.
"""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bpipe.predict.cluster import Cluster

# From this number of runs on the range leaves out 5 % at each end; below it holds all.
MANY_RUNS = 20


class ErrorBars(NamedTuple):
    """Range of measured times of one kind of runs."""

    kind: str
    num_runs: int
    low: int
    """Percent by which the quickest took longer than predicted; negative if it was quicker."""
    median: int
    """The same of the median."""
    high: int
    """The same of the slowest."""
    time_factor: float = 1.0
    """What the formulas' seconds of such runs are multiplied by."""

    def range_s(self, predicted_s: float) -> tuple[float, float]:
        """Return the least and the most seconds that a run predicted so is likely to take."""
        return predicted_s * (1 + self.low / 100), predicted_s * (1 + self.high / 100)


AMPERE = ErrorBars("dense models on A100s", 65, -5, 2, 11)
HOPPER = ErrorBars("dense models on H100s", 7, -4, 1, 10)
BLACKWELL = ErrorBars("dense models on Blackwell", 7, -6, 0, 7, time_factor=1.18)
EXPERTS = ErrorBars("models with experts", 6, -10, 0, 44, time_factor=1.17)
# Of every two runs of one source, one predicted with the factor of the other.
CALIBRATED = ErrorBars("one source, one calibrating the other", 748, -6, 0, 6)

# By device, the runs of dense models of its generation.
_DENSE = {
    **dict.fromkeys(("a100-40g", "a100-80g", "a800-80g"), AMPERE),
    **dict.fromkeys(("h100-80g", "h200-141g"), HOPPER),
    **dict.fromkeys(("b200-180g", "gb200-186g"), BLACKWELL),
}


def _kind(device: str, has_experts: bool) -> ErrorBars | None:
    dense = _DENSE.get(device)
    return EXPERTS if dense is not None and has_experts else dense


def time_factor(cluster: Cluster, has_experts: bool) -> float:
    """Return what the formulas' seconds are multiplied by for such models on a cluster."""
    kind = _kind(cluster.device.name, has_experts)
    return cluster.factor if kind is None else cluster.factor * kind.time_factor


def error_bars(cluster: Cluster, has_experts: bool) -> ErrorBars | None:
    """Return the error bars of such models on a cluster: of calibrated clusters those of calibrated runs."""
    return CALIBRATED if cluster.factor != 1 else _kind(cluster.device.name, has_experts)


def is_never_calibrated(cluster: Cluster) -> bool:
    """Whether no run on such a device had a say in the constants of predictions, and none of the user's has."""
    return cluster.factor == 1 and cluster.device.name not in _DENSE


def range_words(bars: ErrorBars | None, predicted_s: float) -> str:
    """Return the range in seconds without brackets, its longest to three digits; nothing where none is known."""
    if bars is None:
        return ""
    least_s, most_s = bars.range_s(predicted_s)
    decimals = max(0, 2 - floor(log10(most_s)))
    return f"{least_s:.{decimals}f} to {most_s:.{decimals}f}"
