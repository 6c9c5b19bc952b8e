"""Calibrations: how much slower a cluster is than predicted.

One factor covers computations and messages alike, because one run cannot tell them apart. Runs that say nothing about
the cluster are refused: those with too few or unsteady iterations, or with more FLOPs than the devices can do.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.config.flags.outputs import WARM_UP_ITERATIONS
from bpipe.plan.candidates import configuration
from bpipe.plan.predict import costs_of, steady_timing
from bpipe.predict.cluster import Cluster
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.layout import Setup
from bpipe.values import a_number, a_text, an_object, load_json

FORMAT, VERSION = "bpipe-calibration", 1
# Predictions of published runs are off by at most 23 %. A factor of two means another configuration or device.
SLOWEST = 2.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Ratio of a measured to a predicted iteration."""

    device: str
    factor: float
    """`measured_s` / `predicted_s`."""
    measured_s: float
    predicted_s: float
    source: str
    """Name of the run."""
    configuration: dict[str, Any]
    """Configuration of the run, as JSON values."""

    def __post_init__(self) -> None:
        if not 1 / SLOWEST <= self.factor <= SLOWEST:
            raise ValueError(
                f"{self.source}: {self.measured_s:.4g} s measured are {self.factor:.3g} times the "
                f"{self.predicted_s:.4g} s predicted, more than a cluster can differ (at most {SLOWEST:g} times "
                "either way); is this the configuration and the device of the run?"
            )

    def of(self, cluster: Cluster) -> Cluster:
        """Return the cluster, calibrated. Raises ValueError if its device is not the measured one."""
        if cluster.device.name != self.device:
            raise ValueError(
                f"it is for {self.device}, but the cluster has {cluster.device.name}: calibrate with a run on that "
                "device"
            )
        return replace(cluster, factor=self.factor)

    def document(self) -> dict[str, Any]:
        """Return the contents of the file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def write(self) -> str:
        return json.dumps(self.document(), indent=1, allow_nan=False) + "\n"


def read_calibration(path: str) -> Calibration:
    """Read a calibration file. Raises ValueError for another file, or a factor that contradicts its seconds."""
    try:
        document = an_object(load_json(Path(path).read_bytes()), "a calibration")
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"it is not marked as {FORMAT}, version {VERSION}: use a file that bpipe calibrate wrote")
        measured, predicted = (a_number(document.get(key), key) for key in ("measured_s", "predicted_s"))
        factor = a_number(document.get("factor"), "factor")
        if abs(factor * predicted - measured) > 1e-3 * measured:
            raise ValueError(
                f"factor is {factor:g}, but {measured:g} s measured and {predicted:g} s predicted give another one"
            )
        names = (a_text(document.get(key), key) for key in ("device", "source"))
        device, source = names
        return Calibration(
            device, factor, measured, predicted, source, dict(an_object(document.get("configuration"), "configuration"))
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


FEWEST = 3
# If the middle half of the iterations spreads wider than this, something else took the time.
LARGEST_SPREAD = 0.1


class Ran(NamedTuple):
    """Duration of each of some consecutive iterations: `first` to `last`, counted from 1."""

    first: int
    last: int
    seconds: float


class Steady(NamedTuple):
    """Median of the times after the warm-up, and the bounds of their middle half in seconds."""

    num: int
    left_out: int
    median_s: float
    low_s: float
    high_s: float


def steady(ran: Sequence[Ran], warm_up: int = WARM_UP_ITERATIONS) -> Steady:
    """Return the steady state: the times of all iterations but the first `warm_up`."""
    seconds = [line.seconds for line in ran if line.first >= ran[0].first + warm_up]
    if len(seconds) < FEWEST:
        raise ValueError(
            f"{len(seconds)} of {len(ran)} measured times are left after {warm_up} iterations of warm-up: a median "
            f"needs {FEWEST}; train longer, log more often, or give another --warm-up"
        )
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    if high - low > LARGEST_SPREAD * median:
        raise ValueError(
            f"the middle half of {len(seconds)} iterations took {low:.4g} to {high:.4g} s, more than "
            f"{100 * LARGEST_SPREAD:.0f} % apart: the run is not steady. Give a steady part of the log, or a longer "
            "--warm-up"
        )
    return Steady(len(seconds), len(ran) - len(seconds), median, low, high)


def calibrate(setup: Setup, measured_s: float, source: str) -> Calibration:
    """Return how far the prediction of the setup is from `measured_s`, seconds of one iteration."""
    if not measured_s > 0:
        raise ValueError(f"{source}: an iteration took {measured_s:g} s, but must take more than 0")
    device, count = setup.cluster.device, setup.cluster.num_devices
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, setup.padded_vocabulary)
    usage = mfu(flops, measured_s, count, setup.peak_flops_per_s)
    if usage >= 1:
        raise ValueError(
            f"{source}: {measured_s:.4g} s would be {100 * usage:.0f} % of what {count} {device.name} can compute: "
            f"is this the configuration and the device of the run?"
        )
    predicted = steady_timing(setup, costs_of(setup)).iteration_s
    return Calibration(device.name, measured_s / predicted, measured_s, predicted, source, configuration(setup))
