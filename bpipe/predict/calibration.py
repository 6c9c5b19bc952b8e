"""Hold by how much a cluster is slower than its prediction.

In: a JSON file of `bpipe calibrate`. Out: a checked `Calibration`, and back.

One factor for all that takes time, computations and messages alike: one run does not tell them apart. Knows no run and
no setup.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bpipe.predict.cluster import Cluster
from bpipe.values import a_number, a_text, an_object, load_json

FORMAT, VERSION = "bpipe-calibration", 1
# Predictions of published runs are 23 % wrong at most. Twice or half of one is another configuration, or another
# device.
SLOWEST = 2.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Ratio of a measured to a predicted iteration: `factor` is `measured_s` / `predicted_s`.

    `source` names the run, `configuration` says how it was cut.
    """

    device: str
    factor: float
    measured_s: float
    predicted_s: float
    source: str
    configuration: dict[str, Any]

    def __post_init__(self) -> None:
        if not 1 / SLOWEST <= self.factor <= SLOWEST:
            raise ValueError(
                f"{self.source}: {self.measured_s:.4g} s measured are {self.factor:.3g} times the "
                f"{self.predicted_s:.4g} s predicted, more than a cluster can differ (at most {SLOWEST:g} times "
                "either way); is this the configuration and the device of the run?"
            )

    def of(self, cluster: Cluster) -> Cluster:
        """Return the cluster, calibrated. Raises ValueError for another device than the one that was measured."""
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
    """Read a calibration file.

    Raises ValueError for another file, or a factor that does not follow from its seconds.
    """
    try:
        found = an_object(load_json(Path(path).read_bytes()), "a calibration")
        if found.get("format") != FORMAT or found.get("version") != VERSION:
            raise ValueError(f"it is not marked as {FORMAT}, version {VERSION}: use a file that bpipe calibrate wrote")
        measured, predicted = (a_number(found.get(key), key) for key in ("measured_s", "predicted_s"))
        factor = a_number(found.get("factor"), "factor")
        if abs(factor * predicted - measured) > 1e-3 * measured:
            raise ValueError(
                f"factor is {factor:g}, but {measured:g} s measured and {predicted:g} s predicted give another one"
            )
        names = (a_text(found.get(key), key) for key in ("device", "source"))
        device, source = names
        return Calibration(
            device, factor, measured, predicted, source, dict(an_object(found.get("configuration"), "configuration"))
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
