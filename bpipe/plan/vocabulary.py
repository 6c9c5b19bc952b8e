"""Whether the vocabulary is a burden, and what would help.

The output layer and its loss make the last rank compute longer than the others, which wait for it in every micro-batch;
they may also make it the fullest. Remedies are fewer layers for that rank, and shards of the vocabulary's layers on all
ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bpipe.balance.config import BalanceConfig
from bpipe.plan.bounds import Bounds
from bpipe.plan.budget import within_budget
from bpipe.plan.candidates import document
from bpipe.plan.predict import Candidate, costs_of, predict
from bpipe.plan.variants import stands_still, with_shards
from bpipe.predict.layer_counts import redistribute_layers
from bpipe.predict.layout import Setup
from bpipe.predict.profile import Profile
from bpipe.schedule.layout import TRAINED_SHARDS

# Fewer layers for the last stage.
REDISTRIBUTE = "redistribute"
# Below this ratio, the last rank's extra time or a remedy's gain is within the error of predictions.
HURTS = 1.05


@dataclass(frozen=True, slots=True)
class Burden:
    """Burden of the vocabulary."""

    row: Candidate
    load: float
    """Computing of the last stage's rank as a multiple of the others' mean."""
    remedies: dict[str, Candidate]
    """Predictions by remedy: `REDISTRIBUTE`, or shards as `--bpipe-vocabulary` calls them."""

    @property
    def best(self) -> str:
        """The fastest that fits, or the fastest of all."""
        return min(self.remedies, key=lambda name: (not self.remedies[name].fits, self.remedies[name].iteration_s))

    def gain(self, name: str) -> float:
        return self.row.iteration_s / self.remedies[name].iteration_s


def burden(row: Candidate, profile: Profile | None = None, algorithms: Sequence[str] = TRAINED_SHARDS) -> Burden | None:
    """Return the vocabulary's burden; None if it is small or nothing clearly helps. `algorithms`: shards to try."""
    setup = row.setup
    if setup.is_sharded or setup.pipeline < 2:
        return None
    load = Bounds(profile).load(setup)
    if load < HURTS:
        return None
    variants = dict(_alternatives(setup, profile, algorithms))
    planned = ((name, _within(variant, profile)) for name, variant in variants.items())
    remedies = {name: predict(plan, profile, formula=row.formula) for name, plan in planned if plan is not None}
    result = Burden(row, load, remedies)
    return result if remedies and result.gain(result.best) >= HURTS else None


def _alternatives(setup: Setup, profile: Profile | None, algorithms: Sequence[str]) -> Iterator[tuple[str, Setup]]:
    """Yield every remedy that the setup can take, and the setup with it; shards of both layers if the trainer has them."""
    layers = _redistributed(setup, profile)
    if layers is not None and layers != setup.layers:
        yield REDISTRIBUTE, replace(setup, layers=layers)
    for variant in with_shards(setup, algorithms):
        if not stands_still(variant):
            yield variant.vocabulary.value, variant


def _within(setup: Setup, profile: Profile | None) -> Setup | None:
    """Return the setup, planned anew if it has a budget, as memory has changed; None if no plan keeps the budget."""
    if setup.activation_budget is None or setup.budget_bytes is None:
        return setup
    plain = replace(setup, balance=BalanceConfig(hosts=setup.hosts))
    try:
        return within_budget(plain, setup.budget_bytes, profile=profile)[0]
    except ValueError:
        return None


def _redistributed(setup: Setup, profile: Profile | None) -> tuple[int, ...] | None:
    """Return layers with fewer on the last stage. None for chunks, which alternate with other ranks', and patterns."""
    if setup.model.hybrid is not None or setup.num_chunks > 1 or not setup.layers[-1]:
        return None
    cost = costs_of(setup, profile).stages[-1]
    layer = float(cost.forward_s + cost.backward_s) / setup.layers[-1]
    output = float(cost.output_forward_s + cost.output_backward_s)
    return redistribute_layers(setup.model.num_layers, setup.num_stages, output / layer) if layer else None


def burden_text(result: Burden, row: int) -> str:
    """Return a sentence that says how much the vocabulary hurts in this row."""
    return (
        f"The vocabulary hurts in row {row}: with {result.row.setup.padded_vocabulary} tokens the last stage's rank "
        f"computes {result.load:.2f} times as long as the others, which wait for it. Remedies:"
    )


def remedy_rows(result: Burden) -> list[Candidate]:
    """Return a row for each remedy, the best first."""
    rows = []
    for name in sorted(result.remedies, key=lambda name_of: (name_of != result.best, -result.gain(name_of))):
        remedy = result.remedies[name]
        layers = f"{name} (layers {','.join(map(str, remedy.setup.layers))})"
        rows.append(replace(remedy, name=layers if name == REDISTRIBUTE else f"vocabulary {name}"))
    return rows


def burden_document(result: Burden, row: int) -> dict[str, Any]:
    """Return the burden as JSON values."""
    remedies = [
        {"remedy": name, "gain": result.gain(name), **document(remedy)} for name, remedy in result.remedies.items()
    ]
    return {"row": row, "last_load": result.load, "best": result.best, "remedies": remedies}
