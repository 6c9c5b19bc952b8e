"""Say of every family of schedules that a search looked at how it did, and why.

In: the Outcome of a search. Out: lines, or plain values.

The fastest of each is laid beside the fastest of all. Predicts nothing itself.
"""

from __future__ import annotations

from typing import Any

from bpipe.generate.families import FAMILIES
from bpipe.models.layout import Setup
from bpipe.plan.explain import describe, describe_change
from bpipe.plan.judge import Candidate, FamilyResult
from bpipe.plan.search import Outcome

# What the trainer cannot do, or has not done yet, with what a row's schedule needs (docs/supported.md).
HALVES = (
    "backwards in halves were never run with Transformer Engine's layers, which GPUs usually have: "
    "scripts/gpu_check.py --only halves"
)
AS_A_V = "stages placed as a V take checkpoints in torch_dist only"

GATED_GELU = "a gated GELU, for which Megatron has no flag: --swiglu, of the same sizes, stands in its place"
BEHIND_ATTENTION = (
    "norms behind attention and MLP, and capped logits, for which Megatron has no flags: a launch trains without them"
)
FP8 = (
    "FP8 with transfers was never run on a GPU: the trainer checks in its first iterations that all that moves comes "
    "back as it left (--bpipe-verify)"
)
SLICES = (
    "slices by Transformer Engine's attention were never run on a GPU: the trainer asks its kernel for a mask of known "
    "answer first"
)
HYBRID = (
    "hybrid models are built by a script of their own, such as Megatron's pretrain_hybrid.py, started with -m "
    "megatron.scheduling.launch; "
    "with Mamba's own kernels the trainer was never run"
)
TWO_PIPES = "two pipes were trained on CPUs alone so far"

# A bound that is hardly lower says nothing.
_CLEARLY = 0.99


def family_lines(outcome: Outcome) -> list[str]:
    """Return a line for each family; none without rows or with one family."""
    if not outcome.rows or len(outcome.families) < 2:
        return []
    width = max(len(one.schedule) for one in outcome.families)
    found = [f"     {one.schedule:{width}}  {_words(one, outcome)}" for one in _ordered(outcome)]
    return ["families, each by its fastest:", *found, *(f"     {need}" for need in trainer_needs(outcome))]


def trainer_needs(outcome: Outcome) -> list[str]:
    """Return what the rows' schedules need of the trainer beyond the usual."""
    found = {need for row in outcome.rows for need in needs_of_setup(row.prediction.setup)}
    return [
        need for need in (HALVES, AS_A_V, TWO_PIPES, GATED_GELU, BEHIND_ATTENTION, FP8, SLICES, HYBRID) if need in found
    ]


def needs_of_setup(setup: Setup) -> list[str]:
    """Return what one setup needs of the trainer beyond the usual."""
    halves = setup.splits and setup.kernels == "gpu"
    model = setup.model
    unlike = model.post_norms or model.capped_attention or model.capped_logits
    every = (
        *((HALVES, halves), (AS_A_V, _is_a_v(setup)), (TWO_PIPES, setup.num_pipes > 1)),
        *((GATED_GELU, model.gated_gelu), (BEHIND_ATTENTION, unlike)),
        (FP8, setup.fp8 is not None and setup.balance is not None),
        (SLICES, setup.slices > 1 and setup.kernels == "gpu"),
        (HYBRID, model.hybrid is not None),
    )
    return [need for need, there in every if there]


def family_values(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the families' results as JSON values."""
    return [
        {
            "schedule": one.schedule,
            "iteration_time_s": None if one.fastest is None else one.fastest.prediction.timing.iteration_s,
            "others_at_least_s": one.bound_s,
            "fitting": one.num_fitting,
            "too_large": one.num_large,
            "slower": one.num_slower,
            "why": _words(one, outcome) if outcome.rows else None,
        }
        for one in _ordered(outcome)
    ]


def _ordered(outcome: Outcome) -> list[FamilyResult]:
    """By the time of the fastest; then what was not simulated, by its bound; then what there is nothing of."""

    def key(one: FamilyResult) -> tuple[int, float]:
        if one.fastest is not None:
            return 0, one.fastest.prediction.timing.iteration_s
        return (1, one.bound_s) if one.bound_s is not None else (2, 0.0)

    return sorted(outcome.families, key=key)


def _words(one: FamilyResult, outcome: Outcome) -> str:
    best = outcome.rows[0]
    if one.fastest is not None:
        seconds, bound = one.fastest.prediction.timing.iteration_s, one.bound_s
        # Only rows are certainly the fastest there are.
        others = (
            ""
            if bound is None or bound > _CLEARLY * seconds
            else f"; others, not simulated, take {bound:.3f} s or more, by a lower bound"
        )
        return _beside(one.fastest, best) + others
    parts = []
    if one.num_large:
        least, limit = one.least_bytes, best.prediction.memory[0].limit_bytes
        asked = " that could be among the rows" if one.num_slower else ""
        parts.append(
            f"{one.num_large} configurations{asked} need at least {least / 2**30:.1f} of {limit / 2**30:.1f} GiB"
            if least is not None
            else ""
        )
    if one.bound_s is not None:
        parts.append(f"{'the others take' if parts else 'takes'} {one.bound_s:.3f} s or more, by a lower bound")
    return "; ".join(parts) or "no configuration"


def _beside(mine: Candidate, best: Candidate) -> str:
    seconds = mine.prediction.timing.iteration_s
    if mine is best:
        return f"{seconds:.3f} s, the fastest: {describe(mine.prediction.setup)}"
    slower = 100 * (seconds / best.prediction.timing.iteration_s - 1)
    return f"{seconds:.3f} s, {slower:.1f} % more: {describe_change(best.prediction, mine.prediction)}"


def _is_a_v(setup: Setup) -> bool:
    layout = FAMILIES[setup.schedule].layout(setup.pipeline, setup.num_chunks)
    return setup.pipeline > 1 and layout.placements[0][-1] == layout.placements[0][0]
