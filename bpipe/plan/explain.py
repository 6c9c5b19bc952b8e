"""Say in words what balancing buys. In: the Outcome of a search. Out: sentences. Predicts nothing itself."""

from __future__ import annotations

from bpipe.models.layout import Setup
from bpipe.plan.predict import Prediction
from bpipe.plan.search import Closest, Found, Outcome

# Half of the published runs of one model are further from their prediction than this, in either direction (docs/validation.md).
CLEARLY = 1.05


def describe(setup: Setup) -> str:
    """One configuration in a few words."""
    chunks = f" v={setup.chunks}" if setup.chunks > 1 else ""
    balance = " balanced" if setup.balance != "none" else ""
    grid = f"t={setup.tensor} p={setup.pipeline} d={setup.data} b={setup.micro_batch}"
    return f"{grid} recompute {setup.recompute} {setup.schedule}{chunks}{balance}"


def only_balanced(found: Found) -> str | None:
    """Why this row exists only because of balancing; None for a row that needs none."""
    if found.needs_bytes is None:
        return None
    limit = found.prediction.memory[0].limit_bytes
    return f"fits only balanced: without, its fullest rank needs {_gib(found.needs_bytes)} of {_gib(limit)} GiB"


def what_balancing_buys(outcome: Outcome) -> str:
    """The gain, or the sentence why it does not help."""
    if not outcome.num_configurations:
        return "There is no configuration under these constraints."
    if not outcome.num_fitting and outcome.closest is not None:
        return f"Nothing fits, balanced or not: {_closest(outcome.closest)}."
    if outcome.balanced is None:
        return (
            "Balancing does not help: no configuration fits only because of it. What does not fit as it is does not fit with equal "
            "shares either, or has fewer than 4 pipeline ranks, where there is nothing to share."
        )
    count = f"{outcome.num_only_balanced} of {outcome.num_fitting} configurations that fit do so only balanced"
    balanced = outcome.balanced.prediction
    if outcome.plain is None:
        return f"Balancing is what makes it fit at all: {count}, the best is {describe(balanced.setup)}."
    plain = outcome.plain.prediction
    gain = plain.timing.iteration_s / balanced.timing.iteration_s
    ours = f"{balanced.timing.iteration_s:.2f} s ({describe(balanced.setup)})"
    compared = f"{ours} against {plain.timing.iteration_s:.2f} s ({describe(plain.setup)}): {_reason(plain, balanced)}."
    if gain >= CLEARLY:
        return f"Balancing gains {gain:.2f}x: {count}, the best of them takes {compared}"
    if gain > 1:
        return (
            f"Balancing does not clearly help, {gain:.3f}x is less than predictions are worth: {count}, the best of them takes {compared}"
        )
    return f"Balancing does not help here: {count}, but the best of them takes {compared}"


def _closest(closest: Closest) -> str:
    setup, limit = closest.setup, closest.setup.cluster.device.memory_bytes
    needs = f"{_gib(closest.needs_bytes)} of {_gib(limit)} GiB"
    if closest.is_state:
        grid = f"t={setup.tensor} p={setup.pipeline} d={setup.data}"
        return f"weights, gradients and optimizer state alone need at least {needs} of a device ({grid}): take more devices"
    return f"the least is {describe(setup)}, which needs {needs}"


def _reason(plain: Prediction, balanced: Prediction) -> str:
    """What it does to a stage's speed, to the bubble, and to waiting."""
    bubbles = [100 * one.timing.bubble_of_makespan for one in (plain, balanced)]
    parts = [
        f"while it computes, a device is {_while_busy(balanced) / _while_busy(plain):.2f} times as useful",
        f"the bubble is {bubbles[1]:.1f} instead of {bubbles[0]:.1f} % of the iteration",
    ]
    exposed = max(balanced.timing.exposed_s)
    if exposed > 0.01 * balanced.timing.iteration_s:
        parts.append(f"and transfers are not hidden for {exposed:.2f} s")
    return ", ".join(parts)


def _while_busy(prediction: Prediction) -> float:
    """Model FLOPs per second of computing: the MFU without the bubble."""
    return prediction.mfu / (1 - prediction.timing.bubble_of_makespan)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
