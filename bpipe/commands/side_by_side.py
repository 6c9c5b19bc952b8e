"""Lay two predictions of `bpipe simulate` side by side.

In: settings as words, each laid over the rest of the command line; two predictions. Out: options, lines, JSON values.
Predicts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bpipe.config.flags.flag import Command, Options
from bpipe.config.flags.parser import Parser
from bpipe.plan.explain import CLEARLY, describe, is_level
from bpipe.plan.predict import SetupPrediction
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import range_text

NAMES = ("A", "B")
# Most characters of a cell: two of them and a title stand in a line.
_MOST = 70


class Compared(NamedTuple):
    """One side. `settings`: as given. `apart`: what is said of pairs on two nodes, if anything; `refused`: the trainer's
    reasons against it."""

    settings: str
    prediction: SetupPrediction
    apart: str | None
    refused: Sequence[str]


def laid_over(options: Options, settings: str, command: Command) -> Options:
    """Return the options with settings in their place; a launch among these is in place of the other. The name of a
    file alone is that launch."""
    words = shlex.split(settings)
    if len(words) == 1 and not words[0].startswith("-"):
        words = ["--launch", *words]
    base = Options(**{**vars(options), "compare": None})
    if {"--", "--launch"} & set(words):
        base = Options(**{**vars(base), "megatron": [], "launch": None})
    groups = (
        group._replace(flags=tuple(replace(flag, required=False) for flag in group.flags)) for group in command[0]
    )
    parser = Parser(prog="bpipe simulate --compare", add_help=False)
    parser.declare(command._replace(groups=tuple(groups)))
    parser.check_flags(words)
    return parser.parse_args(words, base)


def lines_of(sides: Sequence[Compared]) -> list[str]:
    """Return a table of both, what else is said of each, and which is faster."""
    cells = [_cells(one) for one in sides]
    rows = [(title, *(cell[title] for cell in cells)) for title in cells[0]]
    said = [
        f"{name}: {text}"
        for name, one in zip(NAMES, sides, strict=True)
        for text in (*([one.apart] if one.apart else ()), *(f"the trainer refuses this: {why}" for why in one.refused))
    ]
    return [*_table([("", *NAMES), *rows]), *said, verdict_of(sides)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join cells to lines, left-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cells(one: Compared) -> dict[str, str]:
    """Return the values of one side by their titles."""
    prediction, timing = one.prediction, one.prediction.timing
    setup, limit = prediction.setup, prediction.memory[0].limit_bytes
    tight = ", tight" if prediction.is_tight else ""
    return {
        "settings": _short(one.settings or "as it stands"),
        "configuration": _short(describe(setup)),
        "iteration": f"{timing.iteration_s:.3f} s{range_text(setup, timing.iteration_s)}",
        "MFU": f"{100 * prediction.mfu:.2f} %",
        "bubble": f"{100 * timing.bubble_of_pipeline:.1f} % of the pipeline",
        "exposed transfers": f"{max(timing.exposed_s):.3f} s",
        "fullest rank": f"{gib_text(prediction.peak_bytes)} of {gib_text(limit)} GiB"
        + (tight if prediction.fits else ", does not fit"),
        "least full rank": f"{gib_text(min(rank.peak_bytes for rank in prediction.memory))} GiB",
        "evictions": str(sum(prediction.transfers)),
    }


def _short(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."


def verdict_of(sides: Sequence[Compared]) -> str:
    """Say which of the two is faster, of those that can run."""
    unable = [name for name, one in zip(NAMES, sides, strict=True) if one.refused or not one.prediction.fits]
    first, second = (float(one.prediction.timing.iteration_s) for one in sides)
    percent = 100 * (second / first - 1)
    apart = f"B takes {abs(percent):.1f} % {'longer' if percent > 0 else 'less'} than A"
    if is_level(max(first, second), min(first, second)):
        apart += f", which is level: predictions tell no less than {100 * (CLEARLY - 1):.0f} % apart"
    return f"{apart}; {' and '.join(unable)} cannot run." if unable else f"{apart}."


def values_of(sides: Sequence[Compared], documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return both documents of `simulate` by their names, and the verdict."""
    return {**dict(zip(NAMES, documents, strict=True)), "verdict": verdict_of(sides)}
