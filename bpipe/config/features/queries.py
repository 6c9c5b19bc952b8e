"""Ask the table of features: which apply to settings, which are guarded, and why a run is refused. Imports nothing, so
that a plan asks it as the trainer does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from bpipe.config.features.feature import Feature, Settings, State
from bpipe.config.features.table import FEATURES, SLICED
from bpipe.config.flags.launches import ARGUMENTS, SWITCHED_OFF

# What a launch has that does not say it, as far as the table asks.
_DEFAULTS = {
    "add_bias_linear": True,
    "ckpt_format": "torch_dist",
    "transformer_impl": "transformer_engine",
    "masked_softmax_fusion": True,
    "apply_rope_fusion": True,
    "untie_embeddings_and_output_weights": False,
}


def settings_of(flags: Iterable[str]) -> SimpleNamespace:
    """Return a launch's flags as the table reads them: by the names of Megatron's arguments, which has checked their
    values."""
    found: dict[str, Any] = dict(_DEFAULTS)
    name = ""
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = SWITCHED_OFF.get(flag) or ARGUMENTS.get(flag, flag[2:].replace("-", "_"))
            found[name] = _value(value) if equals else flag not in SWITCHED_OFF
        elif found.get(name) is True:
            found[name] = _value(word)
        elif name:
            before = found[name]
            found[name] = [*(before if isinstance(before, list) else [before]), _value(word)]
    return SimpleNamespace(**found)


def _value(word: str) -> int | str | None:
    return int(word) if word.isdecimal() else None if word == "None" else word


def features_of(settings: object, balance: bool, executor: bool = False) -> list[Feature]:
    """Return what applies with `--bpipe`, in our loop, or with `--bpipe-report` alone, the worst first."""
    asked = [one for one in FEATURES if (balance or not one.moving) and (executor or not one.own_loop)]
    return by_state(one for one in asked if one.applies(Settings(settings)))


def by_state(features: Iterable[Feature]) -> list[Feature]:
    """Return them with the worst first."""
    return sorted(features, key=lambda one: -[*State].index(one.state))


def reasons(settings: object, balance: bool, executor: bool = False, strict: bool = False) -> list[str]:
    """Return why these settings cannot train with `--bpipe`, or in our loop, or cannot be measured with
    `--bpipe-report`: a line each.

    Each names the flag that asks for it, as far as the settings say which: a model's configuration does not. `strict`:
    what is guarded is refused too.
    """
    wanted = "--bpipe" if balance else asked_by(settings) if executor else "--bpipe-report"
    return _lines(features_of(settings, balance, executor), wanted, strict)


def sliced_reasons(settings: object, slices: int, strict: bool = False) -> list[str]:
    """Return why these settings cannot train in so many slices, of 2 or more: a line each."""
    found = by_state(one for one in SLICED if one.applies(Settings(settings)))
    return _lines(found, f"--bpipe-slices {slices}", strict)


def _lines(found: Sequence[Feature], wanted: str, strict: bool) -> list[str]:
    lines = [f"{wanted}: {one.reason}; {one.remedy}" for one in found if one.state is State.REFUSED]
    if strict:
        lines += [
            f"--bpipe-strict: {one.name} is guarded: {one.reason}; {one.remedy}, or drop --bpipe-strict"
            for one in found
            if one.state is State.GUARDED
        ]
    return lines


def guarded(settings: object, balance: bool, executor: bool = False) -> list[Feature]:
    """Return what of these settings is guarded."""
    return [one for one in features_of(settings, balance, executor) if one.state is State.GUARDED]


def asked_by(settings: object) -> str:
    """Return the flag by which our own loop runs."""
    said = Settings(settings)
    asked = {
        "--bpipe-schedule": said.bpipe_schedule,
        "--bpipe-vocabulary": said.bpipe_vocabulary,
        "--bpipe-slices": None if said.bpipe_slices in (None, 1) else said.bpipe_slices,
    }
    for flag, value in asked.items():
        if value is not None:
            return f"{flag} {value}"
    return "--bpipe-executor" if said.bpipe_executor else "--bpipe-schedule"


def reasons_of(features: Sequence[Feature], settings: object, wanted: str) -> list[str]:
    """Return why these settings cannot train with `wanted`, a flag and its value: a line each."""
    return [
        f"{wanted}: {one.reason}; {one.remedy}"
        for one in features
        if one.state is State.REFUSED and one.applies(Settings(settings))
    ]
