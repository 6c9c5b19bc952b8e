"""What to run: the launch as it is, the best of stock Megatron, or the best with this project."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import chosen_flags, difference, megatron_flags
from bpipe.plan.candidates import CLEARLY, is_level
from bpipe.plan.predict import Candidate
from bpipe.plan.refusals import Others, guarded, runs_ours
from bpipe.plan.space import Space
from bpipe.predict.layout import Setup

# Among rows whose times are within this ratio, the one with the fewest of our flags is the better advice.
_AS_FAST = 1.01
# Names of the choices, in order of preference if they are level: the launch as it is, then stock Megatron, then ours.
LAUNCH, STOCK, OURS = "launch", "stock", "bpipe"
_TAKE = {LAUNCH: "Keep the launch", STOCK: "Stay with stock Megatron", OURS: "Use bpipe"}
_WHOSE = {LAUNCH: "the launch's", STOCK: "stock's", OURS: "bpipe's"}


def plainest_of_ours(rows: Sequence[Candidate], others: Others) -> int | None:
    """Return the index of our row to recommend, or None: the plainest of equally fast, unguarded rows.

    Args:
        rows: Rows by rising time.
        others: Flags of the launch that the trainer may refuse.
    """
    ours = [(index, row) for index, row in enumerate(rows) if runs_ours(row.setup)]
    if not ours:
        return None
    level_rows = [(index, row) for index, row in ours if is_level(row.iteration_s, ours[0][1].iteration_s)]
    candidates = [(index, row) for index, row in level_rows if not guarded(row.setup, others)] or level_rows
    fastest_s = candidates[0][1].iteration_s
    fastest = {index: row for index, row in candidates if row.iteration_s <= _AS_FAST * fastest_s}
    return min(
        fastest, key=lambda index: sum(flag.startswith("--bpipe") for flag in megatron_flags(fastest[index].setup))
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """The choices of what to run, and the one to take."""

    choices: tuple[Candidate, ...]
    """In order of preference if they are level."""
    taken: Candidate | None
    """The first choice that no other clearly beats; None if nothing can run."""
    row: int | None = None
    """Number of our row in the table, from 1."""


def answer(choices: Iterable[Candidate], row: int | None = None) -> Answer:
    """Return the answer for these choices, each named `launch`, `stock` or `bpipe`."""
    ordered = tuple(sorted(choices, key=lambda row: list(_TAKE).index(row.name)))
    candidates = [row for row in ordered if row.can_run]
    fastest_s = min((row.iteration_s for row in candidates), default=0.0)
    return Answer(ordered, next((row for row in candidates if is_level(row.iteration_s, fastest_s)), None), row)


def answer_of(
    stock: Candidate | None,
    rows: Sequence[Candidate],
    space: Space,
    differs_from: Reading | None = None,
    launch: Candidate | None = None,
) -> Answer:
    """Return what to run: the launch as it is, the best of stock Megatron, or a row of ours.

    Args:
        stock: The fastest configuration of stock Megatron, if one fits.
        rows: Rows of the search, fastest first.
        space: The space that was searched.
        differs_from: Launch whose changed flags are listed; None lists all flags.
        launch: The launch as it is, if one was given and can be predicted.
    """
    index = plainest_of_ours(rows, space.others)
    choices = [
        replace(row, name=name, flags=flags_of(row.setup, differs_from))
        for name, row in ((STOCK, stock), (OURS, None if index is None else rows[index]))
        if row is not None
    ]
    return answer(choices if launch is None else [launch, *choices], None if index is None else index + 1)


def flags_of(setup: Setup, launch: Reading | None) -> str:
    """Return the flags to change in the launch, or all chosen flags without a launch."""
    return shlex.join(chosen_flags(setup)) if launch is None else difference(setup, launch).text


def advice(result: Answer) -> str:
    """Return a sentence that says what to take, and why."""
    choice = result.taken
    if choice is None:
        return "None of these can run."
    others = [row for row in result.choices if row is not choice and row.can_run]
    comparisons = ", ".join(f"{_apart(choice, row)} than {_WHOSE[row.name]}" for row in others)
    reason = f": its iteration takes {comparisons}" if comparisons else ""
    faster = [row for row in others if row.iteration_s < choice.iteration_s]
    doubt = f"; predictions cannot tell apart what differs by less than {100 * (CLEARLY - 1):.0f} %" if faster else ""
    tight = "; it is tight, and what that costs is not predicted" if choice.is_tight else ""
    # Our schedule, shards or slices alone, which a verdict on balancing does not cover.
    suffix = " without balancing" if choice.name == OURS and choice.setup.balance is None else ""
    return f"{_TAKE[choice.name]}{suffix}{reason}{doubt}{tight}."


def _apart(row: Candidate, other: Candidate) -> str:
    percent = 100 * (row.iteration_s / other.iteration_s - 1)
    return f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'} time"


def accuracy(row: Candidate) -> str:
    """Return a sentence that says how far off predictions may be."""
    cluster, bars = row.setup.cluster, row.setup.error_bars
    if bars is None:
        return f"Never calibrated: no measured run on {cluster.device.name} is known, so times may be far off."
    difference = f"differed from their prediction by {bars.low:+d} to {bars.high:+d} % (plus is slower)"
    return f"Ranges: {bars.num_runs} measured runs of {bars.kind} {difference}: docs/validation.md."


def answer_document(result: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    names = ("iteration_s", "range_s", "peak_bytes", "can_run", "flags")
    return {
        "take": result.taken and result.taken.name,
        "row": result.row,
        "choices": {row.name: {name: getattr(row, name) for name in names} for row in result.choices},
    }
