"""Recomputation of forwards in the backward, as Megatron's flags can express it.

none                                 everything that a backward needs is saved
selective                            the attention core, as `selective:core_attn`
selective:core_attn+mlp+layernorm    of every layer these parts, by Megatron's own names (`MODULES`)
full                                 every layer, as `full:uniform:1`: of each its input is saved
full:uniform:N                       N layers at once: of each N the first one's input is saved
full:block:N                         the first N layers of every stage, the others save everything
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from bpipe.predict.layer_variants import MOST_LAYERS, LayerKind
from bpipe.predict.model import Model, counted

# The short names: without a number and without parts.
RECOMPUTE = ("none", "selective", "full")
# Megatron's --recompute-modules, in the order in which they are written here.
MODULES = ("core_attn", "mlp", "layernorm", "moe_act", "moe", "shared_experts", "mla_up_proj")
METHODS = ("uniform", "block")
# In a search: the first layers of every stage, as few as are enough to fit.
BLOCK = "full:block"
FORMS = "none, selective, full, full:uniform:N, full:block:N, selective:PART+PART"


class LayerScope(NamedTuple):
    """Recomputed parts of one layer, or the `whole` layer; of layers recomputed together one `keeps_input`."""

    modules: frozenset[str] = frozenset()
    whole: bool = False
    keeps_input: bool = True


NO_RECOMPUTATION = LayerScope()
WHOLE_LAYER = LayerScope(whole=True)
_BEHIND = LayerScope(whole=True, keeps_input=False)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Parsed recomputation: `modules` of every layer, or whole layers by `method` and `num_layers`, or nothing."""

    modules: tuple[str, ...] = ()
    method: str | None = None
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in self.modules:
            if name not in MODULES:
                raise ValueError(
                    f"unknown part of a layer to recompute {name[:40]!r}: choose from {', '.join(MODULES)}"
                )
        if self.method not in (None, *METHODS):
            raise ValueError(f"unknown method of recomputation {self.method[:40]!r}: choose from {', '.join(METHODS)}")
        if self.modules and self.method:
            raise ValueError("parts of layers and whole layers cannot both be recomputed: leave one of the two out")
        if not 1 <= self.num_layers <= MOST_LAYERS:
            raise ValueError(f"{self.num_layers} layers to recompute: give 1 to {MOST_LAYERS}, or none for no layer")
        object.__setattr__(self, "modules", tuple(name for name in MODULES if name in self.modules))

    @property
    def text(self) -> str:
        """The shortest that is read as this."""
        if self.method is not None:
            return (
                "full" if (self.method, self.num_layers) == ("uniform", 1) else f"full:{self.method}:{self.num_layers}"
            )
        if not self.modules:
            return "none"
        return "selective" if self.modules == MODULES[:1] else f"selective:{'+'.join(self.modules)}"

    @property
    def together(self) -> int:
        """Number of layers recomputed at once; 0 where no layer is recomputed whole."""
        return 0 if self.method is None else self.num_layers if self.method == "uniform" else 1

    @property
    def period(self) -> int:
        """Number of layers of a stage after which scopes repeat; with `block`, on each side of `num_layers`."""
        return self.num_layers if self.method == "uniform" else 1

    def scope(self, place: int) -> LayerScope:
        """Return the scope of the layer at this place of its stage."""
        if self.method is None:
            return LayerScope(frozenset(self.modules))
        if self.method == "block":
            return WHOLE_LAYER if place < self.num_layers else NO_RECOMPUTATION
        return _BEHIND if place % self.num_layers else WHOLE_LAYER

    @property
    def further_scope(self) -> LayerScope:
        """The scope of a layer that predicts further tokens, which Megatron does not recompute with `block`."""
        return NO_RECOMPUTATION if self.method == "block" else self.scope(0)

    def checked(self, model: Model, kernels: str, in_fp8: bool) -> Recompute:
        """Return self. Raises ValueError for parts that a model does not have or Megatron does not recompute."""
        if model.further is not None and self.method == "uniform" and self.num_layers > 1:
            raise ValueError(
                f"recompute {self.text}: layers that predict further tokens are recomputed one by one only: give "
                "full or full:block:N"
            )
        if not self.modules:
            return self
        shares, grouped = model.experts is not None and model.experts.shared_size > 0, kernels != "cpu"
        needs = {
            "mla_up_proj": (model.latent is not None, f"{model.name} has no latent attention"),
            "moe": (model.experts is not None, f"{model.name} has no experts"),
            "shared_experts": (shares, f"{model.name} has no shared experts"),
            "moe_act": (
                model.experts is not None and grouped,
                "activations of experts are recomputed only in grouped products",
            ),
            "mlp": (not model.linear_bias, "Megatron hangs when an MLP with biases is recomputed"),
        }
        if in_fp8 and self.modules != MODULES[:1]:
            raise ValueError(
                f"recompute {self.text}: in FP8 only {MODULES[0]} is modelled: leave out the other parts, or FP8"
            )
        for name in self.modules:
            met, why = needs.get(name, (True, ""))
            if not met:
                raise ValueError(f"recompute {self.text}: {why}: leave {name} out{' or the biases' * (name == 'mlp')}")
        return self


NOTHING = Recompute()


@lru_cache(maxsize=4096)
def read_recompute(text: str) -> Recompute:
    """Read a text as in the head of this module; `full:block:0` is `none`. Raises ValueError for anything else."""
    if text in RECOMPUTE:
        return {"none": NOTHING, "selective": Recompute(MODULES[:1]), "full": Recompute(method="uniform")}[text]
    layers = re.fullmatch(r"full:([a-z]+):([0-9]{1,9})", text)
    if layers is not None:
        if layers[1] == "block" and int(layers[2]) == 0:
            return NOTHING
        return Recompute(method=layers[1], num_layers=int(layers[2]))
    parts = re.fullmatch(r"selective:([a-z_]+(?:\+[a-z_]+)*)", text)
    if parts is None:
        raise ValueError(f"unknown recompute {text[:60]!r}: choose from {FORMS}")
    return Recompute(tuple(parts[1].split("+")))


# Of each stage how many layers there are of each kind, and of each scope.
StageLayers = tuple[tuple[LayerKind, LayerScope, int], ...]


@lru_cache(maxsize=1024)
def stage_layers(
    model: Model, recompute: Recompute, layers: tuple[int, ...], further_stage: int | None = None
) -> tuple[StageLayers, ...]:
    """Return kinds and scopes of each stage's layers, in the model's order; one stage may predict further tokens."""
    if model.further is not None and further_stage is not None:
        kind, number = model.further
        stages = [*stage_layers(model, recompute, layers)]
        stages[further_stage] += ((kind, recompute.further_scope, number),)
        return tuple(stages)
    if model.is_uniform:
        kind = model.kind(0)
        return tuple(tuple((kind, scope, count) for scope, count in _scopes(recompute, number)) for number in layers)
    firsts = accumulate(layers, initial=0)
    return tuple(_counted(model, recompute, first, number) for first, number in zip(firsts, layers, strict=False))


@lru_cache(maxsize=4096)
def _scopes(recompute: Recompute, number: int) -> tuple[tuple[LayerScope, int], ...]:
    counts = [
        entry
        for part in _parts(recompute, number)
        for entry in counted(recompute.scope, *part, recompute.period).items()
    ]
    return tuple(counts) or ((recompute.scope(0), 0),)


@lru_cache(maxsize=4096)
def _counted(model: Model, recompute: Recompute, first: int, number: int) -> StageLayers:
    def sort_of(place: int) -> tuple[LayerKind, LayerScope]:
        return model.kind(first + place), recompute.scope(place)

    period = math.lcm(model.period, recompute.period)
    counts = (counted(sort_of, *part, period) for part in _parts(recompute, number))
    return tuple((kind, scope, count) for part in counts for (kind, scope), count in part.items())


def _parts(recompute: Recompute, number: int) -> list[tuple[int, int]]:
    """Return the ranges (first, number) of a stage's layers within which scopes repeat."""
    ends = min(recompute.num_layers, number) if recompute.method == "block" else 0
    return [part for part in ((0, ends), (ends, number - ends)) if part[1]]


def read_scope(text: str) -> str:
    """Read `BLOCK`, or any other text of this module as short as it can be. Raises ValueError for anything else."""
    return text if text == BLOCK else read_recompute(text).text
