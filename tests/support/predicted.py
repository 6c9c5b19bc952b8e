"""References for predictions: every setup of a space, bounds from whole costs, parameters of models, and whether a
stage's input is saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bpipe.plan import bounds
from bpipe.plan.bounds import Bounds
from bpipe.plan.search import Members
from bpipe.plan.space import Space, enumerate_branches, setups_of
from bpipe.predict import activations
from bpipe.predict.flops import layer_parameters
from bpipe.predict.layers.norms import keeps_received
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model


def enumerate_setups(space: Space, cuts: Counter[str] | None = None) -> Iterator[Setup]:
    """Yield all configurations of all branches."""
    cuts = Counter() if cuts is None else cuts
    for branch in enumerate_branches(space, cuts):
        yield from setups_of(space, branch, cuts)


def every_setup(space: Space, cuts: Counter[str] | None = None) -> Iterator[Setup]:
    """Yield the configurations of a search: those of all branches that the trainer accepts, also in shards and slices."""
    cuts = Counter() if cuts is None else cuts
    members = Members(space, Bounds(space.profile), cuts)
    for branch in enumerate_branches(space, cuts):
        yield from filter(None, map(members.taken, members.covered(branch)))


def lower_bound_s(setup: Setup) -> float:
    """Return the bound of `Bounds`, computed from the costs of the whole setup without a cache."""
    return bounds._bound(setup, bounds._work_of(setup, None)) + bounds._update_s(setup, None)


def saves_input(setup: Setup) -> bool:
    """Whether what a stage receives is itself among what it saves: torch's RMSNorm keeps a 32-bit copy
    instead, a norm that is recomputed another tensor of the same storage."""
    scope = setup.recomputed.scope(0)
    return scope.whole or (keeps_received(setup) and not activations._shares_input(setup))


def num_parameters(model: Model) -> int:
    """Return the number of all parameters."""
    layers = sum(model.num_held(kind, number) * sum(layer_parameters(model, kind)) for kind, number in model.kinds())
    embedding = model.vocabulary * model.hidden_size * (1 if model.tied_embedding else 2)
    positions = model.sequence * model.hidden_size * model.learned_positions
    return layers + model.norm_parameters + embedding + positions
