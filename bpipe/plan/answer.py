"""Decide what to run: the launch as it stands, the best of stock Megatron, or the best with this project.

In: a Space, the rows found in it. Out: `Stock`, and an `Answer`, in a few lines or as JSON values.

Stock is what Megatron's own loops run with the vocabulary whole and nothing moved, with the flags that cost it nothing.
What is laid beside it has as many of them as the trainer takes. Knows no command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.launch.megatron_command import Reading
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.row_flags import chosen_flags, difference
from bpipe.plan.candidates import CLEARLY, Candidate, is_level
from bpipe.plan.document import document
from bpipe.plan.predict import predict
from bpipe.plan.refusals import guarded, refused, runs_ours, without_overlap
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.error_bars import error_bars, is_never_calibrated
from bpipe.predict.layout import Setup
from bpipe.predict.switches import Switches
from bpipe.schedule.families.families import DEFAULTS
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary

# Of rows this near to each other the one that asks less of the trainer is the better advice.
_AS_FAST = 1.01
# Names of what may be taken, in the order in which they are where they are level: what is there already before stock,
# stock before ours.
LAUNCH, STOCK, OURS = "launch", "stock", "bpipe"
_TAKE = {LAUNCH: "Keep the launch", STOCK: "Take stock", OURS: "Take bpipe"}
_WHOSE = {LAUNCH: "the launch's", STOCK: "stock's", OURS: "bpipe's"}


@dataclass(frozen=True, slots=True)
class Stock:
    """The best of stock Megatron, and the row of ours to lay beside it."""

    found: Candidate | None
    """The fastest stock row; None where none fits."""
    free: tuple[str, ...]
    """Its flags that cost nothing and were not asked for."""
    row: int | None
    """Number of the row of ours that stands beside it."""
    ours: Candidate | None
    """That row with as many of those flags as the trainer takes."""


def free_switches(space: Space) -> Switches:
    """Return all that costs nothing: what is sent, reduced, gathered and scattered beside computations."""
    reduced = replace(space.switches, overlap_grad_reduce=True, overlap_param_gather=space.distributed_optimizer)
    overlaps = replace(reduced, no_overlap_p2p_communication=False)
    return replace(overlaps, tp_comm_overlap=space.kernels == "gpu" and space.has_transformer_engine)


def stock_of(space: Space, rows: Sequence[Candidate]) -> Stock:
    """Search what Megatron alone does, and lay the first of ours beside it."""
    switches = free_switches(space)
    whole = (Vocabulary.WHOLE.value,)
    alone = replace(
        space, schedules=DEFAULTS, balances=BALANCES[:1], vocabulary_parallel=whole, switches=switches, hosts=(PAIR,)
    )
    found = next(iter(search(replace(alone, slices=(1,)), 1).rows), None)
    number, ours = _plainest(rows, space)
    said = () if found is None else found.setup.switches.flags
    free = tuple(flag for flag in said if flag not in space.switches.flags)
    return Stock(found, free, number, None if ours is None else _with(ours, switches, space))


def _plainest(rows: Sequence[Candidate], space: Space) -> tuple[int | None, Candidate | None]:
    """The row of ours to recommend, and its number: of those level with the first one that is not guarded, and of those
    as fast as that the one with fewest flags of ours."""
    ours = [(number, row) for number, row in enumerate(rows, 1) if runs_ours(row.setup)]
    if not ours:
        return None, None
    level = [one for one in ours if is_level(one[1].iteration_s, ours[0][1].iteration_s)]
    near = [one for one in level if not guarded(one[1].setup, space.others)] or level
    return min((one for one in near if one[1].iteration_s <= _AS_FAST * near[0][1].iteration_s), key=_num_flags)


def _num_flags(numbered: tuple[int, Candidate]) -> int:
    return sum(flag.startswith("--bpipe") for flag in megatron_flags(numbered[1].setup))


def _with(ours: Candidate, switches: Switches, space: Space) -> Candidate:
    flagged = replace(ours.setup, switches=switches)
    setup = without_overlap(flagged) if refused(flagged, space.others) else flagged
    return ours if setup == ours.setup else Candidate(predict(setup, space.profile, formula=space.formula))


def stock_document(stock: Stock) -> dict[str, Any]:
    """Return stock's best as JSON values."""
    found = stock.found
    return {
        "row": found and {**document(found.prediction), "megatron_flags": megatron_flags(found.setup)},
        "free_flags": list(stock.free),
        "beside_row": stock.row,
        "its_iteration_s": stock.ours and stock.ours.iteration_s,
    }


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is to run, and what to take."""

    choices: tuple[Candidate, ...]
    """In the order in which they are taken where they are level."""
    taken: Candidate | None
    """The first that no other is clearly faster than; None if nothing can run."""


def answer(choices: Iterable[Candidate]) -> Answer:
    """Return the answer that these choices give, each named `launch`, `stock` or `bpipe`."""
    ordered = tuple(sorted(choices, key=lambda row: list(_TAKE).index(row.name)))
    able = [row for row in ordered if row.can_run]
    least = min((row.iteration_s for row in able), default=0.0)
    return Answer(ordered, next((row for row in able if is_level(row.iteration_s, least)), None))


def answer_of(beside: Stock, differs_from: Reading | None = None, launch: Candidate | None = None) -> Answer:
    """Return what to run: the launch, if one was given and can be predicted, stock's best or ours.

    `differs_from`: the launch that flags are said of.
    """
    found = [
        replace(row, name=name, flags=flags_of(row.setup, differs_from))
        for name, row in ((STOCK, beside.found), (OURS, beside.ours))
        if row is not None
    ]
    return answer(found if launch is None else [launch, *found])


def flags_of(setup: Setup, launch: Reading | None) -> str:
    """Return the flags to change in the launch, or all chosen flags without a launch."""
    return shlex.join(chosen_flags(setup)) if launch is None else difference(setup, launch).text


def advice(found: Answer) -> str:
    """Return in a sentence what to take, and why."""
    taken = found.taken
    if taken is None:
        return "None of these can run."
    others = [row for row in found.choices if row is not taken and row.can_run]
    beside = ", ".join(f"{_apart(taken, row)} than {_WHOSE[row.name]}" for row in others)
    reason = f": its iteration takes {beside}" if beside else ""
    level = [row for row in others if row.iteration_s < taken.iteration_s]
    doubt = f"; predictions cannot tell apart what differs by less than {100 * (CLEARLY - 1):.0f} %" if level else ""
    tight = "; it is tight, and what that costs is not predicted" if taken.is_tight else ""
    return f"{_TAKE[taken.name]}{reason}{doubt}{tight}."


def _apart(row: Candidate, other: Candidate) -> str:
    percent = 100 * (row.iteration_s / other.iteration_s - 1)
    return f"{abs(percent):.1f} % {'more' if percent > 0 else 'less'} time"


def accuracy(row: Candidate) -> str:
    """Return in a sentence how far predictions may be off."""
    cluster, bars = row.setup.cluster, error_bars(row.setup)
    if bars is None:
        return f"Never calibrated: no measured run on {cluster.device.name} is known, so times may be far off."
    differed = f"differed from their prediction by {bars.low:+d} to {bars.high:+d} % (plus is slower)"
    never = " Never calibrated: the constants come from A100s and H100s." if is_never_calibrated(cluster) else ""
    return f"Ranges: {bars.num_runs} measured runs of {bars.kind} {differed}: docs/validation.md.{never}"


def answer_document(found: Answer) -> dict[str, Any]:
    """Return the answer as JSON values."""
    names = ("iteration_s", "range_s", "peak_bytes", "can_run", "flags")
    return {
        "take": found.taken and found.taken.name,
        "choices": {row.name: {name: getattr(row, name) for name in names} for row in found.choices},
    }
