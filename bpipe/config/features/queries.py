"""Questions to the table of features: which apply to settings, which are guarded, and why a run is refused."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from bpipe.config.features.table import FEATURES, SLICED, Feature, Settings, State
from bpipe.config.flags.trainer import SWITCHED_OFF, argument_of

# Megatron's defaults that the table asks for.
_DEFAULTS = {
    "add_bias_linear": True,
    **dict.fromkeys(("bias_dropout_fusion", "bias_gelu_fusion", "bias_swiglu_fusion"), True),
    "ckpt_format": "torch_dist",
    "transformer_impl": "transformer_engine",
    "masked_softmax_fusion": True,
    "apply_rope_fusion": True,
    "untie_embeddings_and_output_weights": False,
}


def settings_of(flags: Iterable[str]) -> SimpleNamespace:
    """Return a launch's flags by the names of Megatron's arguments. Megatron has checked their values."""
    settings: dict[str, Any] = dict(_DEFAULTS)
    name = ""
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            name = SWITCHED_OFF.get(flag) or argument_of(flag)
            settings[name] = _value(value) if equals else flag not in SWITCHED_OFF
        elif settings.get(name) is True:
            settings[name] = _value(word)
        elif name:
            before = settings[name]
            settings[name] = [*(before if isinstance(before, list) else [before]), _value(word)]
    return SimpleNamespace(**settings)


def _value(word: str) -> int | str | None:
    return int(word) if word.isdecimal() else None if word == "None" else word


def _asked(balance: bool, executor: bool) -> list[Feature]:
    return [row for row in FEATURES if (balance or not row.moving) and (executor or not row.own_loop)]


def features_of(settings: object, balance: bool, executor: bool = False) -> list[Feature]:
    """Return the features that apply with `--bpipe`, in our loop, or with `--bpipe-report` alone, the worst first."""
    return by_state(feature for feature in _asked(balance, executor) if feature.applies(Settings(settings)))


def by_state(features: Iterable[Feature]) -> list[Feature]:
    """Return features with the worst first."""
    return sorted(features, key=lambda feature: -[*State].index(feature.state))


def reasons(settings: object, balance: bool, executor: bool = False, strict: bool = False) -> list[str]:
    """Return why these settings cannot train with `--bpipe` or in our loop, or be measured with `--bpipe-report`.

    A reason is a line that names the flag that asks for it, if the settings have it: a model's configuration does not.
    `strict`: guarded features are refused too.
    """
    wanted = "--bpipe" if balance else asked_by(settings) if executor else "--bpipe-report"
    return reasons_of(_asked(balance, executor), settings, wanted, strict)


def sliced_reasons(settings: object, slices: int, strict: bool = False) -> list[str]:
    """Return why these settings cannot train in two or more slices, a line per reason."""
    return reasons_of(SLICED, settings, f"--bpipe-slices {slices}", strict)


def guarded(settings: object, balance: bool, executor: bool = False) -> list[Feature]:
    """Return the guarded features of these settings."""
    return [feature for feature in features_of(settings, balance, executor) if feature.state is State.GUARDED]


def asked_by(settings: object) -> str:
    """Return the flag that asks for our own loop."""
    args = Settings(settings)
    slices = None if args.bpipe_slices == 1 else args.bpipe_slices
    asked = {"schedule": args.bpipe_schedule, "vocabulary": args.bpipe_vocabulary, "slices": slices}
    flags = [f"--bpipe-{name} {value}" for name, value in asked.items() if value is not None]
    return [*flags, "--bpipe-executor" if args.bpipe_executor else "--bpipe-schedule"][0]


def reasons_of(features: Iterable[Feature], settings: object, wanted: str, strict: bool = False) -> list[str]:
    """Return why these settings cannot train with `wanted`, a flag and its value: a line per reason."""
    rows = [row for row in features if row.applies(Settings(settings))]
    lines = [f"{wanted}: {row.reason}; {row.remedy}" for row in rows if row.state is State.REFUSED]
    return lines + [
        f"--bpipe-strict: {row.name} is guarded: {row.reason}; {row.remedy}, or drop --bpipe-strict"
        for row in rows
        if strict and row.state is State.GUARDED
    ]
