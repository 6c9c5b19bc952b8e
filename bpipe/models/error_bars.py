"""Say how far measured times may lie from predicted ones.

In: a Setup. Out: `ErrorBars` of runs of its kind, or None where no run of any is known.

The figures are those of the runs in docs/validation.md, none of which was given a time; its script computes them anew,
and a test holds this table to it. Knows no prediction.
"""

from __future__ import annotations

from typing import NamedTuple

from bpipe.models.layout import Setup

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


AMPERE = ErrorBars("dense models on A100s", 65, -4, 3, 13)
NEWER = ErrorBars("dense models on H100s and Blackwell", 14, -6, 9, 24)
EXPERTS = ErrorBars("models with experts", 6, 5, 17, 68)
# Of every two runs of one source, one predicted with the factor of the other.
CALIBRATED = ErrorBars("one source, one calibrating the other", 748, -6, 0, 6)

_AMPERE_DEVICES = ("a100-40g", "a100-80g", "a800-80g")
_NEWER_DEVICES = ("h100-80g", "h200-141g", "b200-180g", "gb200-186g")


def error_bars(setup: Setup) -> ErrorBars | None:
    """Return the error bars of a setup: of calibrated clusters those of calibrated runs."""
    cluster = setup.cluster
    if cluster.factor != 1:
        return CALIBRATED
    if cluster.device.name not in _AMPERE_DEVICES + _NEWER_DEVICES:
        return None
    if setup.model.experts is not None:
        return EXPERTS
    return AMPERE if cluster.device.name in _AMPERE_DEVICES else NEWER


def range_text(setup: Setup, predicted_s: float) -> str:
    """Return the range of a predicted time as it stands behind it; nothing where no run of its kind is known."""
    bars = error_bars(setup)
    return "" if bars is None else " ({:.3g} to {:.3g})".format(*bars.range_s(predicted_s))
