"""Find the best that Megatron alone does, and the best of ours beside it. In: a Space, the rows found. Out: `Stock`.

Stock is what Megatron's own loops run with the vocabulary whole and nothing moved, with the flags that cost it nothing.
What is laid beside it has as many of them as the trainer takes. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BALANCES
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.document import document
from bpipe.plan.explain import is_level
from bpipe.plan.judge import Candidate
from bpipe.plan.predict import SetupPrediction, predict
from bpipe.plan.refusals import guarded, refused, runs_ours, without_overlap
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.switches import Switches
from bpipe.schedule.families.families import DEFAULTS
from bpipe.schedule.hosts import PAIR
from bpipe.schedule.layout import Vocabulary

# Of rows this near to each other the one that asks less of the trainer is the better advice.
_AS_FAST = 1.01


@dataclass(frozen=True, slots=True)
class Stock:
    """Stock's best. `found`: the fastest stock row, None where none fits.

    `free`: its flags that cost nothing and were not asked for.

    `row`: number of the row of ours that stands beside it, or None; `ours` is that row with as many of those flags as
    the trainer takes.
    """

    found: Candidate | None
    free: tuple[str, ...]
    row: int | None
    ours: SetupPrediction | None


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
    alone = replace(alone, slices=(1,))
    found = next(iter(search(alone, 1).rows), None)
    number, ours = _plainest(rows, space)
    made = None if ours is None else _with(ours.prediction, switches, space)
    said = () if found is None else found.prediction.setup.switches.flags
    return Stock(found, tuple(flag for flag in said if flag not in space.switches.flags), number, made)


def _plainest(rows: Sequence[Candidate], space: Space) -> tuple[int | None, Candidate | None]:
    """The row of ours to recommend, and its number: of those level with the first one that is not guarded, and of those
    as fast as that the one with fewest flags of ours."""
    ours = [(number, row) for number, row in enumerate(rows, 1) if runs_ours(row.prediction.setup)]
    if not ours:
        return None, None
    level = [one for one in ours if is_level(_seconds(one), _seconds(ours[0]))]
    near = [one for one in level if not guarded(one[1].prediction.setup, space.others)] or level
    return min((one for one in near if _seconds(one) <= _AS_FAST * _seconds(near[0])), key=_num_flags)


def _seconds(row: tuple[int, Candidate]) -> float:
    return float(row[1].prediction.timing.iteration_s)


def _num_flags(row: tuple[int, Candidate]) -> int:
    return sum(flag.startswith("--bpipe") for flag in megatron_flags(row[1].prediction.setup))


def _with(ours: SetupPrediction, switches: Switches, space: Space) -> SetupPrediction:
    flagged = replace(ours.setup, switches=switches)
    setup = without_overlap(flagged) if refused(flagged, space.others) else flagged
    return ours if setup == ours.setup else predict(setup, space.profile, formula=space.formula)


def stock_document(stock: Stock) -> dict[str, Any]:
    """Return stock's best as JSON values."""
    found = stock.found
    row = (
        None
        if found is None
        else {**document(found.prediction), "megatron_flags": megatron_flags(found.prediction.setup)}
    )
    return {
        "row": row,
        "free_flags": list(stock.free),
        "beside_row": stock.row,
        "its_iteration_s": None if stock.ours is None else stock.ours.timing.iteration_s,
    }
