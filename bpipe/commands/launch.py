"""Read what commands share: configurations, clusters, profiles, and launches.

A launch is given as `-- FLAGS` or `--launch FILE`, and the installed Megatron judges it. Options of the command line
itself come before those of the launch. Knows no flag of Megatron's.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bpipe.config.flags.configurations import LAUNCHED, PREDICTED
from bpipe.config.flags.flag import Flag, Group, Options
from bpipe.config.launch.capture import read_launches
from bpipe.config.launch.megatron_command import Reading, devices_of, read_command, split_command
from bpipe.config.launch.megatron_settings import unknown_flags, unknown_note, without
from bpipe.config.launch.validation import Judgement, judge
from bpipe.plan.options import setup_of
from bpipe.predict.cluster import Cluster, cluster_named
from bpipe.predict.layout import Setup
from bpipe.predict.profile import Profile, read_profile
from bpipe.predict.training import Traced
from bpipe.values import printable

# Flags that a launch may give: their defaults are filled in after it has been read.
TRAINED = tuple(group._replace(flags=tuple(replace(flag, default=None) for flag in group.flags)) for group in PREDICTED)
# One configuration, by flags or from a launch.
CONFIGURED: tuple[Group, ...] = (*TRAINED, LAUNCHED)
# More than the launches of any script.
_MOST_BYTES = 4_000_000
REFUSES = "Megatron refuses this launch"
# What Megatron's flags do not say, or what the launch leaves to its tokenizer.
_OF_NO_LAUNCH = ("cluster", "kernels", "memory", "min_bytes", "vocabulary")


def words_of(options: Options) -> list[str] | None:
    """Return the words of the launch that is given, or None."""
    if options.launch is None:
        return list(options.megatron) or None
    if options.megatron:
        raise ValueError("--launch and flags after -- say the same: give one of them")
    name, colon, number = options.launch.rpartition(":")
    if not colon or not number.isdecimal():
        name, number = options.launch, ""
    text = _content(name)
    try:
        launches = read_launches(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}: write it with bpipe capture --output FILE -- bash SCRIPT") from None
    if not number and len(launches) > 1:
        raise ValueError(f"{name} has {len(launches)} launches: choose one, such as the first with --launch {name}:1")
    place = int(number[:9] or 1)
    if not 1 <= place <= len(launches):
        raise ValueError(f"--launch {options.launch}: the last launch in the file is {len(launches)}")
    return launches[place - 1]


def reading_of(options: Options, searched: Sequence[Flag] = ()) -> Reading | None:
    """Return what the launch says, or None if no launch is given.

    Raises ValueError for one that Megatron refuses, unless other options change what Megatron would train. `searched`:
    flags of a search, whose defaults change nothing.
    """
    reading = _judged_reading(options)
    if reading is None or reading.refused is None:
        return reading
    fields = {flag.field for group in PREDICTED for flag in group.flags}
    defaults = {flag.field: flag.default for flag in searched}
    fields_of_launches = fields.difference(_OF_NO_LAUNCH)
    if all(getattr(options, field, None) in (None, False, defaults.get(field)) for field in fields_of_launches):
        raise ValueError(f"{REFUSES}: {reading.refused}")
    note = f"without the other options, {REFUSES}: {reading.refused}"
    return replace(reading, notes=(note, *reading.notes), trainer=())


def _judged_reading(options: Options) -> Reading | None:
    """Return what the launch says, and what Megatron says of it, or None if no launch is given."""
    words = words_of(options)
    if words is None:
        return None
    judgement = judgement_of(words, options.cluster)
    try:
        reading = read_command(words, judgement.unknown)
    except ValueError:
        if judgement.refused is not None:
            raise ValueError(f"{REFUSES}: {judgement.refused}") from None
        raise
    notes = reading.notes if judgement.unknown is not None else (judgement.by, *reading.notes)
    return replace(reading, notes=notes, refused=judgement.refused, trainer=judgement.trainer)


def judgement_of(words: list[str], cluster: str | None = None) -> Judgement:
    """Have Megatron judge a launch, on a cluster whose size its name tells, or on the launch's own devices."""
    launcher, flags = split_command(words)
    devices = devices_of(launcher)
    if cluster is not None:
        named = cluster_named(cluster, devices)
        devices = (named.num_nodes, named.devices_per_node) if devices is not None or ":" in cluster else None
    return judge(tuple(flags), devices, bool(launcher) or len(flags) < len(words))


def flags_of(words: list[str], unknown: Sequence[str] | None = None) -> list[str]:
    """Return the flags of a launch that Megatron or this project has; a line on stderr names the others."""
    _, flags = split_command(words)
    if unknown is None:
        unknown = unknown_flags(flags)
    if unknown:
        print(f"from the launch: {printable(unknown_note(unknown))}", file=sys.stderr)
    return without(unknown, flags)


def _content(name: str) -> bytes:
    """Read a file up to a limit: a device such as /dev/zero never ends."""
    if name != "-":
        with Path(name).open("rb") as file:
            return file.read(_MOST_BYTES)
    if sys.stdin is None:
        raise ValueError("--launch -: standard input is closed: pipe a capture into it, or name a file")
    return sys.stdin.buffer.read(_MOST_BYTES)


def lines(reading: Reading | None) -> list[str]:
    """Return the notes of the translation that a user must read."""
    if reading is None:
        return []
    notes = [f"from the launch: {note}" for note in reading.notes]
    notes += [f"not considered: {' '.join(reading.not_considered)}"] if reading.not_considered else []
    return list(map(printable, notes))


def launch_document(reading: Reading) -> dict[str, Any]:
    """Return the notes of the translation as JSON values."""
    return {"notes": list(reading.notes), "not_considered": list(reading.not_considered)}


def cluster_of(options: Options, reading: Reading | None = None) -> Cluster:
    """Return the cluster. If its text gives no numbers of nodes and devices, they are the launch's."""
    return cluster_named(options.cluster, None if reading is None else reading.devices)


def measured_of(options: Options) -> tuple[Profile | None, Traced | None]:
    """Return the profile of --profile if it has seconds, or the sizes of a trace."""
    profile = None if options.profile is None else read_profile(options.profile)
    return (profile, None) if profile is None or profile.traced is None else (None, profile.traced)


def predicted_of(options: Options, reading: Reading | None) -> tuple[Setup, Profile | None]:
    """Return the setup of filled options, and what --profile says of it: a trace's sizes are the setup's own.

    Raises ValueError for a trace of another setup.
    """
    profile, traced = measured_of(options)
    setup = setup_of(options, cluster_of(options, reading))
    conflict = None if traced is None else traced.conflict(setup)
    if conflict is not None:
        raise ValueError(f"--profile {options.profile}: {conflict}")
    return replace(setup, traced=traced), profile
