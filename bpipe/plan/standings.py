"""How every family of schedules did in a search, compared with the fastest of all."""

from typing import Any

from bpipe.plan.candidates import describe
from bpipe.plan.explain import describe_change
from bpipe.plan.judge import FamilyResult
from bpipe.plan.predict import Candidate
from bpipe.plan.search import Outcome
from bpipe.predict.layout import Setup

# What a row's schedule needs that the trainer cannot do or has never done (docs/supported.md).
HALVES = (
    "split backward passes (dgrad and wgrad apart) have never run with Transformer Engine's layers, which runs on GPUs "
    "usually have: check with scripts/gpu_check.py --only halves"
)
AS_A_V = "stages placed as a V need checkpoints in the torch_dist format"

FP8 = (
    "FP8 with transfers has never run on a GPU: in its first iterations the trainer checks that everything that moves "
    "comes back unchanged (--bpipe-verify)"
)
SLICES = (
    "slices with Transformer Engine's attention have run on one GPU only: the trainer first checks its kernel on a mask "
    "whose result is known"
)
HYBRID = (
    "hybrid models need a training script of their own, such as Megatron's pretrain_hybrid.py, started with -m "
    "megatron.scheduling.launch; this has never run with Mamba's own kernels"
)
TWO_PIPES = "bidirectional pipelines have run on CPUs only"

# A bound above this share of the fastest time tells nothing.
_CLEARLY = 0.99


def family_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """Return each family with its result in words; empty without rows or with one family."""
    if not outcome.rows or len(outcome.families) < 2:
        return []
    return [(family.schedule, _words(family, outcome)) for family in _ordered(outcome)]


def trainer_needs(outcome: Outcome) -> list[str]:
    """Return what the rows' schedules need of the trainer beyond the usual."""
    needs = {need for row in outcome.rows for need in needs_of_setup(row.setup)}
    order = (HALVES, AS_A_V, TWO_PIPES, FP8, SLICES, HYBRID)
    return [need for need in order if need in needs]


def needs_of_setup(setup: Setup) -> list[str]:
    """Return what one setup needs of the trainer beyond the usual."""
    model, placement = setup.model, setup.placements[0]
    needs = {
        HALVES: setup.splits and setup.kernels == "gpu",
        AS_A_V: setup.pipeline > 1 and placement[0] == placement[-1],
        TWO_PIPES: setup.num_pipes > 1,
        FP8: setup.fp8 is not None and setup.balance is not None,
        SLICES: setup.slices > 1 and setup.kernels == "gpu",
        HYBRID: model.hybrid is not None,
    }
    return [need for need, applies in needs.items() if applies]


def family_values(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the families' results as JSON values."""
    return [
        {
            "schedule": family.schedule,
            "iteration_time_s": None if family.fastest is None else family.fastest.iteration_s,
            "others_at_least_s": family.bound_s,
            "fitting": family.num_fitting,
            "too_large": family.num_large,
            "why": _words(family, outcome) if outcome.rows else None,
        }
        for family in _ordered(outcome)
    ]


def _ordered(outcome: Outcome) -> list[FamilyResult]:
    """Sort by the fastest's time, then by the bounds of families that were not simulated, then the rest."""

    def key(family: FamilyResult) -> tuple[int, float]:
        if family.fastest is not None:
            return 0, family.fastest.iteration_s
        return (1, family.bound_s) if family.bound_s is not None else (2, 0.0)

    return sorted(outcome.families, key=key)


def _words(family: FamilyResult, outcome: Outcome) -> str:
    best = outcome.rows[0]
    if family.fastest is not None:
        seconds, bound = family.fastest.iteration_s, family.bound_s
        # Only the rows are certain to be the fastest.
        others = (
            ""
            if bound is None or bound > _CLEARLY * seconds
            else f"; the others were not simulated and take at least {bound:.3f} s"
        )
        return _beside(family.fastest, best) + others
    parts = []
    if family.num_large:
        least, limit = family.least_bytes, best.limit_bytes
        condition = " that could be among the rows" if family.bound_s is not None else ""
        parts.append(
            f"{family.num_large} configurations{condition} need at least {least / 2**30:.1f} of {limit / 2**30:.1f} GiB"
            if least is not None
            else ""
        )
    if family.bound_s is not None:
        parts.append(f"{'the others take' if parts else 'takes'} at least {family.bound_s:.3f} s, by a lower bound")
    return "; ".join(parts) or "no configuration"


def _beside(row: Candidate, best: Candidate) -> str:
    seconds = row.iteration_s
    if row is best:
        return f"{seconds:.3f} s, the fastest: {describe(row.setup)}"
    slower = 100 * (seconds / best.iteration_s - 1)
    return f"{seconds:.3f} s, {slower:.1f} % more: {describe_change(best, row)}"
