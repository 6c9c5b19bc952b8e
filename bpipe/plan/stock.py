"""Find the best that Megatron alone does, and say whether ours is worth it. In: a Space, the rows found. Out: `Stock`.

Stock is what Megatron's own loops run with the vocabulary whole and nothing moved, with the flags that cost it nothing.
What is laid beside it has as many of them as the trainer takes. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.build import BALANCES
from bpipe.generate.families import DEFAULTS
from bpipe.ir.hosts import PAIR
from bpipe.ir.layout import Vocabulary
from bpipe.models.layout import Setup
from bpipe.models.switches import Switches
from bpipe.plan.document import document
from bpipe.plan.explain import CLEARLY, describe
from bpipe.plan.judge import Candidate
from bpipe.plan.megatron_flags import megatron_flags
from bpipe.plan.predict import costs_of, steady_timing
from bpipe.plan.refused import refused, runs_ours, without_overlap
from bpipe.plan.search import search
from bpipe.plan.space import Space

# Said of a prediction that counts on it.
OVERLAPPED = "published runs with --tp-comm-overlap took 7 to 9 % longer than predicted (docs/validation.md)"


@dataclass(frozen=True, slots=True)
class Stock:
    """Stock's best. `found`: the fastest stock row, None where none fits.

    `free`: its flags that cost nothing and were not asked for.

    `row`: number of the first row that is not stock, or None; it takes `ours_s` with as many of those flags.
    """

    found: Candidate | None
    free: tuple[str, ...]
    row: int | None
    ours_s: float | None

    @property
    def gain(self) -> float | None:
        """How many times as fast ours is."""
        return (
            None
            if self.found is None or self.ours_s is None
            else self.found.prediction.timing.iteration_s / self.ours_s
        )

    @property
    def is_enough(self) -> bool:
        """Whether to take it: ours is not clearly faster."""
        return self.found is not None and (self.gain is None or self.gain < CLEARLY)


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
    number, ours = next(
        ((number, row) for number, row in enumerate(rows, 1) if runs_ours(row.prediction.setup)), (None, None)
    )
    seconds = None
    if ours is not None:
        setup = _with(ours.prediction.setup, switches, space)
        seconds = steady_timing(setup, costs_of(setup, space.profile)).iteration_s
    said = () if found is None else found.prediction.setup.switches.flags
    return Stock(found, tuple(flag for flag in said if flag not in space.switches.flags), number, seconds)


def _with(setup: Setup, switches: Switches, space: Space) -> Setup:
    flagged = replace(setup, switches=switches)
    return without_overlap(flagged) if refused(flagged, space.others) else flagged


def stock_text(stock: Stock) -> list[str]:
    """Describe what stock takes, and which to take."""
    if stock.found is None:
        return ["Stock: nothing that Megatron's own loops run fits without balancing."]
    seconds = stock.found.prediction.timing.iteration_s
    free = f", with {' '.join(stock.free)} at no cost" if stock.free else ""
    lines = [
        f"Stock, the fastest that Megatron's own loops run{free}: {seconds:.3f} s: "
        f"{describe(stock.found.prediction.setup)}"
    ]
    if stock.found.prediction.setup.switches.tp_comm_overlap and stock.found.prediction.setup.tensor > 1:
        lines.append(OVERLAPPED)
    if stock.ours_s is None:
        return [*lines, "Take stock: no row is anything else."]
    less = 100 * (1 - stock.ours_s / seconds)
    apart = f"{abs(less):.1f} % {'less' if less > 0 else 'more'}"
    beside = f"row {stock.row} takes {stock.ours_s:.3f} s with what it can have of these flags, {apart}"
    if not stock.is_enough:
        return [*lines, f"R{beside[1:]} than stock."]
    doubt = f": that is less than predictions are worth ({100 * (CLEARLY - 1):.0f} %)" if less > 0 else ""
    return [*lines, f"Take stock: {beside}{doubt}."]


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
        "its_iteration_s": stock.ours_s,
        "take": stock.is_enough,
    }
