"""What a forward saves for its backward, storage by storage, and what a split backward's second half needs.

With kernels `gpu` a layer is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", table 2), extended by GQA, SwiGLU, flash attention and missing sequence parallelism. With kernels `cpu` it is
what Megatron's local layers keep without a GPU, where nothing is fused: exact to the byte on the first tensor-parallel
rank.
"""

from collections.abc import Sequence

from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layers.attention import core_bytes
from bpipe.predict.layers.ends import embedding_saved, final_norm_saved, last_saved
from bpipe.predict.layers.layer import layer_after_input, layer_bytes, saved_within
from bpipe.predict.layers.norms import keeps_received
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import NO_RECOMPUTATION, LayerScope
from bpipe.predict.sizes import Saved, sent_bytes, total
from bpipe.predict.training import traced_sizes

# Parts of a layer that are recomputed before the backward of its attention; of norms one is.
_BEHIND_ATTENTION = frozenset(("mlp", "layernorm", "moe_act", "moe", "shared_experts"))


def stage_saved(setup: Setup, stage: int) -> tuple[Saved, ...]:
    """Return what a forward of one micro-batch saves on a stage."""
    layers = setup.stage_layers[stage]
    rows = [
        Saved(name, nbytes, num * number)
        for kind, scope, number in layers
        for name, nbytes, num in saved_within(setup, kind, scope)
    ]
    if stage == 0:
        rows += embedding_saved(setup)
    if stage == setup.norm_stage:
        rows += final_norm_saved(setup)
    if stage == setup.num_stages - 1:
        rows += last_saved(setup)
    return tuple(rows)


def stage_bytes(setup: Setup) -> tuple[int, ...]:
    """Return bytes saved of one micro-batch by every stage, as traced or by formula."""
    traced = traced_sizes(setup)
    if traced is not None:
        return traced.saved_bytes
    saved = layers_bytes(setup)
    saved[0] += total(embedding_saved(setup))
    saved[setup.norm_stage] += total(final_norm_saved(setup))
    saved[-1] += total(last_saved(setup))
    return tuple(saved)


def layers_bytes(setup: Setup) -> list[int]:
    """Return bytes that the layers of every stage save of one micro-batch, without embedding and output layer."""
    stages = setup.stage_layers
    sizes = {
        sort: total(saved_within(setup, *sort))
        for sort in dict.fromkeys((kind, scope) for layers in stages for kind, scope, _ in layers)
    }
    return [sum(number * sizes[kind, scope] for kind, scope, number in layers) for layers in stages]


def after_input_bytes(setup: Setup) -> tuple[int, ...]:
    """Return, by stage, bytes held between dgrad and wgrad; 0 if no wgrad is deferred."""
    if not setup.keeps_halves:
        return (0,) * setup.num_stages
    of_kind = {kind: total(layer_after_input(setup, kind)) for kind, _ in setup.model.kinds()}
    return tuple(sum(number * of_kind[kind] for kind, _, number in layers) for layers in setup.stage_layers)


def moved_bytes(setup: Setup, stage: int, minimum_bytes: int) -> int:
    """Return bytes that a transfer moves: storages of at least `minimum_bytes` that the loop does not hold."""
    received = sent_bytes(setup) if stage and setup.layers[stage] and _shares_input(setup) else 0
    moved = total(tuple(row for row in stage_saved(setup, stage) if row.nbytes >= minimum_bytes))
    return moved - (received if received >= minimum_bytes else 0)


def _shares_input(setup: Setup) -> bool:
    """Whether a stage's input is saved as another tensor of the same storage, as Megatron does for recomputation."""
    alone = setup.kernels == "cpu" or setup.model.latent is not None
    return alone and "layernorm" in setup.recomputed.modules


def saves_input(setup: Setup) -> bool:
    """Whether what a stage receives is itself among what it saves: torch's RMSNorm keeps a 32-bit copy
    instead, a norm that is recomputed another tensor of the same storage."""
    scope = setup.recomputed.scope(0)
    return scope.whole or (keeps_received(setup) and not _shares_input(setup))


def again_bytes(setup: Setup, kinds: Sequence[LayerKind]) -> int:
    """Return the peak bytes of recomputation for these kinds of layers."""
    together = setup.recomputed.together
    if together:
        # Megatron recomputes no layer for a further token if it recomputes some of the others.
        kinds = [kind for kind in kinds if not kind.further or setup.recomputed.further_scope.whole]
        number = min(together, max(setup.layers))
        return number * layer_bytes(setup, "none", kinds) - layer_bytes(setup, "full", kinds)
    modules = setup.recomputed.scope(0).modules
    core = core_bytes(setup) if "core_attn" in modules else 0
    return max(
        core + max(_freed(setup, kind, modules & {"mla_up_proj"}) for kind in kinds),
        *(_freed(setup, kind, modules & _BEHIND_ATTENTION) for kind in kinds),
    )


def _freed(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> int:
    return (
        total(saved_within(setup, kind, NO_RECOMPUTATION)) - total(saved_within(setup, kind, LayerScope(modules)))
        if modules
        else 0
    )
