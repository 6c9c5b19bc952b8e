"""Hold what Megatron's own model has in every stage, as `bpipe trace` saw it.

In: a trace's facts. Out: a frozen `Traced`, and whether it is of a setup. Knows no formula.

Sizes are of one cut: model, layers of every stage, micro-batch, recomputation and kernels. Of a setup that differs in one
of them they say nothing, and formulas stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Of a setup's model, and of the setup itself.
OF_MODEL = ("hidden_size", "ffn_hidden_size", "num_attention_heads")
OF_SETUP = ("tensor", "sequence", "recompute", "attention", "precision", "sequence_parallel", "layers", "micro_batch")


@dataclass(frozen=True, slots=True)
class Traced:
    """Bytes that a micro-batch's forward saves, and parameters, by stage and both of one device. `facts`: what was
    traced, by the names of `OF_MODEL` and `OF_SETUP`."""

    facts: tuple[tuple[str, object], ...]
    saved_bytes: tuple[int, ...]
    parameters: tuple[int, ...]

    def conflict(self, setup: Any) -> str | None:
        """Return why the trace says nothing of a Setup; None: it does."""
        for name, value in self.facts:
            mine = getattr(setup.model if name in OF_MODEL else setup, name)
            if mine != value:
                return f"traced with {name} {_text(value)}, but the setup has {_text(mine)}: trace that, too"
        for name in beyond_traces(setup):
            return f"traced without {name}, but the setup has them: leave one of the two out"
        return None


def beyond_traces(setup: Any) -> list[str]:
    """Return what a Setup has of which a trace's facts say nothing."""
    has = {
        "context parallelism": setup.context > 1,
        "experts": setup.model.experts is not None,
        "slices": setup.slices > 1,
        "shards of the vocabulary": setup.is_sharded,
    }
    return [name for name in has if has[name]]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def traced_sizes(setup: Any) -> Traced | None:
    """Return a Setup's trace where it is of that setup."""
    traced: Traced | None = setup.traced
    return None if traced is None or setup.span is not None or traced.conflict(setup) is not None else traced
