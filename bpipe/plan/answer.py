"""What to run: the launch as it is, the best of stock Megatron, or the best with this project."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import chosen_flags, difference
from bpipe.plan.candidates import CLEARLY, Candidate, is_level
from bpipe.plan.refusals import Others, guarded, runs_ours
from bpipe.plan.space import Space
from bpipe.predict.layout import Setup

# Of rows this near to each other the one that asks less of the trainer is the better advice.
_AS_FAST = 1.01
# Names of what may be taken, in the order in which they are where they are level: what is there already before stock,
# stock before ours.
LAUNCH, STOCK, OURS = "launch", "stock", "bpipe"
_TAKE = {LAUNCH: "Keep the launch", STOCK: "Stay with stock Megatron", OURS: "Use bpipe"}
_WHOSE = {LAUNCH: "the launch's", STOCK: "stock's", OURS: "bpipe's"}


def plainest_of_ours(rows: Sequence[Candidate], others: Others) -> int | None:
    """Return the place of our row to recommend, None without one: of equally fast and unguarded rows the plainest.

    Args:
        rows: Rows by rising time.
        others: Flags of the launch that the trainer may refuse.
    """
    ours = [(place, row) for place, row in enumerate(rows) if runs_ours(row.setup)]
    if not ours:
        return None
    level = [(place, row) for place, row in ours if is_level(row.iteration_s, ours[0][1].iteration_s)]
    near = [(place, row) for place, row in level if not guarded(row.setup, others)] or level
    fastest_s = near[0][1].iteration_s
    as_fast = {place: row for place, row in near if row.iteration_s <= _AS_FAST * fastest_s}
    return min(
        as_fast, key=lambda place: sum(flag.startswith("--bpipe") for flag in megatron_flags(as_fast[place].setup))
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is to run, and what to take."""

    choices: tuple[Candidate, ...]
    """In the order in which they are taken where they are level."""
    taken: Candidate | None
    """The first that no other is clearly faster than; None if nothing can run."""
    row: int | None = None
    """Number of the row that ours is, from 1."""


def answer(choices: Iterable[Candidate], row: int | None = None) -> Answer:
    """Return the answer that these choices give, each named `launch`, `stock` or `bpipe`."""
    ordered = tuple(sorted(choices, key=lambda row: list(_TAKE).index(row.name)))
    able = [row for row in ordered if row.can_run]
    least = min((row.iteration_s for row in able), default=0.0)
    return Answer(ordered, next((row for row in able if is_level(row.iteration_s, least)), None), row)


def answer_of(
    stock: Candidate | None,
    rows: Sequence[Candidate],
    space: Space,
    differs_from: Reading | None = None,
    launch: Candidate | None = None,
) -> Answer:
    """Return what to run: the launch as it is, the best of stock Megatron, or a row of ours.

    Args:
        stock: The fastest of stock Megatron, if one fits.
        rows: The rows that were found in the space, fastest first.
        space: What was searched.
        differs_from: The launch whose changed flags are said; None says all.
        launch: The launch as it is, if one was given and can be predicted.
    """
    place = plainest_of_ours(rows, space.others)
    choices = [
        replace(row, name=name, flags=flags_of(row.setup, differs_from))
        for name, row in ((STOCK, stock), (OURS, None if place is None else rows[place]))
        if row is not None
    ]
    return answer(choices if launch is None else [launch, *choices], None if place is None else place + 1)


def flags_of(setup: Setup, launch: Reading | None) -> str:
    """Return the flags to change in the launch, or all chosen flags without a launch."""
    return shlex.join(chosen_flags(setup)) if launch is None else difference(setup, launch).text


def advice(result: Answer) -> str:
    """Return in a sentence what to take, and why."""
    taken = result.taken
    if taken is None:
        return "None of these can run."
    others = [row for row in result.choices if row is not taken and row.can_run]
    beside = ", ".join(f"{_apart(taken, row)} than {_WHOSE[row.name]}" for row in others)
    reason = f": its iteration takes {beside}" if beside else ""
    level = [row for row in others if row.iteration_s < taken.iteration_s]
    doubt = f"; predictions cannot tell apart what differs by less than {100 * (CLEARLY - 1):.0f} %" if level else ""
    tight = "; it is tight, and what that costs is not predicted" if taken.is_tight else ""
    # Only a schedule, shards or slices of ours, so nothing that a verdict on balancing speaks of.
    moved = " without balancing" if taken.name == OURS and taken.setup.balance is None else ""
    return f"{_TAKE[taken.name]}{moved}{reason}{doubt}{tight}."


def _apart(row: Candidate, other: Candidate) -> str:
    percent = 100 * (row.iteration_s / other.iteration_s - 1)
    return f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'} time"


def accuracy(row: Candidate) -> str:
    """Return in a sentence how far predictions may be off."""
    cluster, bars = row.setup.cluster, row.setup.error_bars
    if bars is None:
        return f"Never calibrated: no measured run on {cluster.device.name} is known, so times may be far off."
    differed = f"differed from their prediction by {bars.low:+d} to {bars.high:+d} % (plus is slower)"
    return f"Ranges: {bars.num_runs} measured runs of {bars.kind} {differed}: docs/validation.md."


def answer_document(result: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    names = ("iteration_s", "range_s", "peak_bytes", "can_run", "flags")
    return {
        "take": result.taken and result.taken.name,
        "row": result.row,
        "choices": {row.name: {name: getattr(row, name) for name in names} for row in result.choices},
    }
