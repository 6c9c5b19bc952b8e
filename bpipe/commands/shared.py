"""Groups of flags that several commands share, and how their values are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bpipe.config.flags.configurations import CONFIGURATION, EXPERTS, LAUNCHED, MODEL, TRAINING
from bpipe.config.flags.flag import Group, Options
from bpipe.config.launch.megatron_command import Reading
from bpipe.plan.calibrate import read_calibration
from bpipe.predict.cluster import Cluster
from bpipe.predict.cluster_file import cluster_named
from bpipe.predict.layout import Setup
from bpipe.predict.profile import Profile, read_profile
from bpipe.predict.training import Traced

# Flags that a launch may give: their defaults are filled in after it has been read.
TRAINED = tuple(
    group._replace(flags=tuple(replace(flag, default=None) for flag in group.flags))
    for group in (MODEL, TRAINING, EXPERTS, CONFIGURATION)
)
# One configuration, by flags or from a launch.
CONFIGURED: tuple[Group, ...] = (*TRAINED, LAUNCHED)


def cluster_of(options: Options, reading: Reading | None = None) -> Cluster:
    """Return the cluster. If its text gives no numbers of nodes and devices, they are the launch's."""
    cluster = cluster_named(options.cluster, None if reading is None else reading.devices)
    if options.calibration is None:
        return cluster
    calibration = read_calibration(options.calibration)
    try:
        return calibration.of(cluster)
    except ValueError as error:
        raise ValueError(f"--calibration {options.calibration}: {error}") from None


def measured_of(options: Options) -> tuple[Profile | None, Traced | None]:
    """Return the profile of --profile if it has seconds, or the sizes of a trace."""
    profile = None if options.profile is None else read_profile(options.profile)
    return (profile, None) if profile is None or profile.traced is None else (None, profile.traced)


def with_trace(setup: Setup, traced: Traced | None, file: str | None) -> Setup:
    """Return the setup with the sizes of a trace. Raises ValueError for a trace of another setup."""
    if traced is None:
        return setup
    conflict = traced.conflict(setup)
    if conflict is not None:
        raise ValueError(f"--profile {file}: {conflict}")
    return replace(setup, traced=traced)


def picture_file(name: str | None, suffixes: Sequence[str]) -> Path | None:
    """Return the file that --plot draws. Raises ValueError for a suffix that cannot be drawn."""
    if name is None or Path(name).suffix in suffixes:
        return None if name is None else Path(name)
    *others, last = suffixes
    raise ValueError(f"--plot {name}: the name must end in {', '.join(others)} or {last}")


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=1, allow_nan=False)
    print()
