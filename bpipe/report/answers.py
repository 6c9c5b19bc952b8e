"""Answer what a reader came for. In: a `Comparison`. Out: sentences: which stage is the bottleneck, what balancing cost and bought."""

from __future__ import annotations

from bpipe.report.compare import Comparison, StageRow
from bpipe.report.units import bytes_text, percent_text, seconds_text

# A share of the pipeline time that is only what asking costs.
NOTHING = 0.0005


def answers(comparison: Comparison) -> tuple[str, ...]:
    return (_bottleneck(comparison), _balancing(comparison))


def bottleneck(comparison: Comparison) -> StageRow | None:
    """The stage nearest to its device's limit; where no limit is known, the one that holds most."""
    known = [row for row in comparison.stages if row.held_bytes is not None]
    if known and all(row.limit_bytes for row in known):
        return min(known, key=lambda row: (row.limit_bytes or 0) - (row.held_bytes or 0))
    return max(known, key=lambda row: row.held_bytes or 0, default=None)


def _bottleneck(comparison: Comparison) -> str:
    row = bottleneck(comparison)
    if row is None or row.all_measured_bytes is None or row.held_bytes is None:
        return "Which stage is the memory bottleneck cannot be said: no rank recorded what it held."
    rank = "" if row.rank is None else f" (rank {row.rank})"
    text = f"Stage {row.stage}{rank} is the memory bottleneck: {bytes_text(row.all_measured_bytes)} of activations"
    if row.bound_bytes is not None:
        text += f" ({_beside_bound(row.all_measured_bytes - row.bound_bytes, row.bound_bytes)})"
    if row.weights_bytes is None:
        text += ", weights not recorded"
    else:
        text += f" and {bytes_text(row.weights_bytes)} of weights, gradients and optimizer state"
    if row.limit_bytes:
        free = row.limit_bytes - row.held_bytes
        text += (
            f": {bytes_text(row.held_bytes)} of {bytes_text(row.limit_bytes)}, {bytes_text(abs(free))} {'free' if free >= 0 else 'over'}"
        )
    return f"{text}."


def _beside_bound(over: int, bound_bytes: int) -> str:
    if not over:
        return "exactly its bound"
    return f"{bytes_text(abs(over))} {'above' if over > 0 else 'below'} its bound of {bytes_text(bound_bytes)}"


def _balancing(comparison: Comparison) -> str:
    if comparison.measured.program.balance == "none":
        return _would_buy(comparison)
    exposed = [row for row in comparison.stages if row.exposed_s is not None]
    worst = max(exposed, key=lambda row: row.exposed_s or 0.0, default=None)
    if worst is None or worst.exposed_s is None:
        cost = "What balancing cost was not recorded"
    else:
        share = worst.exposed_s / comparison.totals.pipeline_s if comparison.totals.pipeline_s else 0.0
        cost = (
            f"Balancing cost {percent_text(share)} of an iteration's pipeline time: stage {worst.stage} stood still for transfers for "
            f"{seconds_text(worst.exposed_s)} of {seconds_text(comparison.totals.pipeline_s)}"
            if share >= NOTHING
            else "Balancing cost no time: no stage stood still for transfers"
        )
    before = [row.unbalanced_bytes for row in comparison.stages]
    after = [row.all_measured_bytes for row in comparison.stages]
    known_before, known_after = [size for size in before if size is not None], [size for size in after if size is not None]
    if not known_before or not known_after:
        return f"{cost}."
    most, least = max(known_before), max(known_after)
    change = f"{percent_text(abs(1 - least / most))} {'less' if least <= most else 'more'}"
    return f"{cost}; the fullest stage holds {bytes_text(least)} of activations instead of {bytes_text(most)}, {change}."


def _would_buy(comparison: Comparison) -> str:
    after = comparison.prediction.balanced_bytes
    before = [row.all_measured_bytes for row in comparison.stages if row.all_measured_bytes is not None]
    if after is None or not before:
        return "Balancing was off."
    if not after:
        return f"Balancing was off, and with {comparison.measured.program.num_stages} stages there is nothing to balance."
    return (
        f"Balancing was off: with --bpipe the fullest stage would hold about {bytes_text(max(after))} of activations instead of "
        f"{bytes_text(max(before))}."
    )
