"""A layer from its parts, with its recomputation: what it saves, and its seconds."""

from collections.abc import Callable, Sequence

from bpipe.predict.exchanges import routed_tokens
from bpipe.predict.flops import layer_parameters
from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layers import attention, ends, mamba, mlp, norms
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import exposed, gather_s, layer_products, projection_products
from bpipe.predict.recompute import LayerScope, read_recompute
from bpipe.predict.sizes import (
    KERNEL_S,
    Rates,
    Saved,
    element_bytes,
    kept_bytes,
    num_tokens,
    sent_bytes,
    shard_size,
    total,
)
from bpipe.predict.states import parameter_bytes

# In a layer of two parts; of a hybrid model's layers, which are one, half as many.
FORWARD_KERNELS, BACKWARD_KERNELS = 20, 35
# Of these the products for weights, in a layer of four matrices.
WEIGHT_KERNELS = 4
# Lookup, three norms, join and projection of a further token.
JOINING_KERNELS = 6


def layer_seconds(setup: Setup, kind: LayerKind | None = None, scope: LayerScope | None = None) -> tuple[float, float]:
    """Return seconds of a layer (default: the first) and micro-batch, forward and backward with its recomputation."""
    kind = setup.model.kind(0) if kind is None else kind
    scope = setup.recomputed.scope(0) if scope is None else scope
    forward, backward = _between_matrices(setup, kind)
    casts, casts_back = cast_seconds(setup, kind)
    way = mlp.experts_way_s(setup) if kind.experts else 0.0
    core_forward, core_backward = mamba.scan_seconds(setup) if kind.is_mamba else (0.0, 0.0)
    if kind.attends:
        core_forward, core_backward = attention.core_seconds(setup, Rates.of(setup), kind.window)
    waits = exposed(setup, kind, scope)
    joining, joining_back = _joining_s(setup) if kind.further else (0.0, 0.0)
    forward += joining + casts + way + core_forward
    backward += joining_back + casts_back + way + core_backward + waits.backward_s
    if scope.whole:
        backward += forward
    elif scope.modules:
        backward += core_forward if "core_attn" in scope.modules and kind.attends else 0.0
        backward += _parts_again_s(setup, kind, scope.modules)
    return forward + waits.forward_s, backward


def _joining_s(setup: Setup) -> tuple[float, float]:
    """Seconds that a further token adds to a layer: the lookup of its embedding, a norm of it and one of the hidden
    states, the projection of both, and the norm behind the layer; with what tensor parallelism waits for."""
    rates, product, hop = Rates.of(setup), projection_products(setup), gather_s(setup)
    between = element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size / setup.sequence_shards
    lookup, added = ends.embedding_seconds(setup)
    # The projection's output is gathered; with sequence parallelism its input, too, and again for its weights, and of
    # both the gradients are scattered or gathered. A join reads and writes both.
    waits, waits_back = (3, 5) if setup.sequence_parallel else (1, 4)
    passes, passes_back = 3 * 2 + 4, 3 * 3 + 4
    return (
        lookup + product.forward_s + passes * between / rates.memory + waits * hop + JOINING_KERNELS * KERNEL_S,
        added
        + product.input_s
        + product.weight_s
        + passes_back * between / rates.memory
        + waits_back * hop
        + 2 * JOINING_KERNELS * KERNEL_S,
    )


def _between_matrices(setup: Setup, kind: LayerKind) -> tuple[float, float]:
    """Seconds of a layer's products, norms, sums and activation functions, forward and backward."""
    rates, model, products = Rates.of(setup), setup.model, layer_products(setup, kind).total()
    per_width = element_bytes(setup) * num_tokens(setup)
    between = per_width * model.hidden_size / setup.sequence_shards
    inside = mlp.experts_touched_bytes(setup) if kind.experts else mlp.mlp_touched_bytes(setup) if kind.has_mlp else 0.0
    # Norms of queries and keys read and write; backward they read what went in and out, and write.
    normed = attention.query_norms_bytes(setup) if kind.attends else 0.0
    normed += per_width * model.latent_ranks / setup.sequence_shards
    kernels, kernels_back = FORWARD_KERNELS * kind.num_parts / 2, BACKWARD_KERNELS * kind.num_parts / 2
    if kind.is_mamba:
        kernels, kernels_back = mamba.FORWARD_KERNELS, mamba.BACKWARD_KERNELS
    # In each part a norm reads and writes; a residual sum reads twice and writes, with dropout a mask too.
    moved = 5.25 * kind.num_parts * between + inside + 2 * normed
    moved_back = 7 * kind.num_parts * between + 1.5 * inside + 3 * normed + _accumulated(setup, kind)
    return (
        products.forward_s + moved / rates.memory + kernels * KERNEL_S,
        products.input_s + products.weight_s + kernels_back * KERNEL_S + moved_back / rates.memory,
    )


def _parts_again_s(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> float:
    """Seconds of recomputed parts besides the attention core; what they wait for on links is in `exposed`."""
    is_gpu, seconds = setup.kernels == "gpu", 0.0
    if "layernorm" in modules:
        seconds += norms.norm_seconds(setup) * (norms.norms_alone(setup, kind) if is_gpu else kind.num_parts)
    if kind.experts:
        seconds += mlp.experts_again(setup, kind, modules)
    elif "mlp" in modules and kind.has_mlp:
        # Transformer Engine's has the norm in it.
        seconds += mlp.mlp_forward_s(setup, kind) + (norms.norm_seconds(setup) if is_gpu else 0.0)
    if setup.model.latent is not None and "mla_up_proj" in modules:
        seconds += attention.up_projections_s(setup)
    return seconds


def _accumulated(setup: Setup, kind: LayerKind) -> float:
    """Bytes to read and write every weight's gradient once."""
    parameters = layer_parameters(setup.model, kind)
    return (
        2
        * parameter_bytes(setup)[1]
        * (parameters.matrices / setup.tensor + parameters.experts / (setup.routing.expert * setup.expert_tensor))
    )


def every_seconds(
    setup: Setup, kind: LayerKind | None = None, scope: LayerScope | None = None
) -> tuple[float, float, float, float]:
    """Return seconds of a layer: forward, backward, and dgrad and wgrad; attention's core has no weights.

    Tensor parallelism makes the halves longer than the whole: no wgrad hides what is scattered or summed, and with
    sequence parallelism inputs of matrices after norms are gathered again before it.
    """
    rates = Rates.of(setup)
    kind = setup.model.kind(0) if kind is None else kind
    forward, backward = layer_seconds(setup, kind, scope)
    if not setup.keeps_halves:
        return forward, backward, backward, 0.0
    weight = (
        layer_products(setup, kind).total().weight_s
        + _accumulated(setup, kind) / rates.memory
        + WEIGHT_KERNELS * kind.num_parts / 2 * KERNEL_S
    )
    if kind.further:
        weight += projection_products(setup).weight_s
    gathers = kind.num_parts * gather_s(setup) if setup.sequence_shards > 1 else 0.0
    waits = exposed(setup, kind, scope)
    return forward, backward, backward - waits.backward_s + waits.input_half_s - weight, weight + gathers


def layer_saved(setup: Setup, recompute: str | None = None, kind: LayerKind | None = None) -> tuple[Saved, ...]:
    """Return what a layer (default: the first) saves, under the setup's recomputation or another."""
    recomputed = setup.recomputed if recompute is None else read_recompute(recompute)
    return saved_within(setup, setup.model.kind(0) if kind is None else kind, recomputed.scope(0))


def saved_within(setup: Setup, kind: LayerKind, scope: LayerScope) -> tuple[Saved, ...]:
    """Return what a layer of this kind saves under this scope of recomputation."""
    further = _further_saved(setup, scope) if kind.further else ()
    if scope.whole:
        return (*further, *((Saved("layer input", sent_bytes(setup)),) if scope.keeps_input else ()))
    core = attention.core_saved(setup) if kind.attends and "core_attn" not in scope.modules else ()
    return (*further, *(_fused_saved if setup.kernels == "gpu" else _local_saved)(setup, kind, scope.modules, core))


def _further_saved(setup: Setup, scope: LayerScope) -> tuple[Saved, ...]:
    """Return what joining hidden states to a further token's embedding saves, and the norm behind the layer."""
    embedding = ends.embedding_saved(setup, shifted=True)
    if scope.whole:
        return (Saved("embedding of a further token", sent_bytes(setup)), *embedding)
    rows: tuple[Saved, ...] = ()
    if setup.sequence_shards > 1 and (norms.keeps_received(setup) or "layernorm" in scope.modules):
        # The layer's first norm keeps a part of what the projection gathered, and with it the whole.
        rows = (Saved("gathered output of the projection", setup.sequence_shards * sent_bytes(setup)),)
        rows += (Saved("the part of it that is the layer's input", sent_bytes(setup), -1),)
    both = 2 * num_tokens(setup) * setup.model.hidden_size
    joined = Saved("input of the projection of both", kept_bytes(setup, both, setup.sequence_shards))
    return (*rows, *norms.norms_before_copies(setup, 3), joined, *embedding)


def _fused_saved(setup: Setup, kind: LayerKind, modules: frozenset[str], core: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """As Transformer Engine's layers keep it."""
    again = "mlp" in modules and kind.has_mlp and not kind.experts
    number = 2 * kind.num_parts - again - norms.norms_alone(setup, kind) * ("layernorm" in modules)
    around = (*norms.norms_saved(setup, kind, number), *norms.dropout_saved(setup, kind.num_parts))
    if kind.is_mamba:
        return (*around, *mamba.scan_saved(setup), *core)
    attending = attention.attention_saved(setup, modules) if kind.attends else ()
    return (*around, *attending, *_mlp_saved(setup, kind, modules, mlp.mlp_saved), *core)


def _local_saved(setup: Setup, kind: LayerKind, modules: frozenset[str], core: tuple[Saved, ...]) -> tuple[Saved, ...]:
    """As torch's own kernels keep it. A recomputed norm keeps its input; its output is freed once it is read."""
    parts = kind.num_parts
    inputs = (Saved("norm input", sent_bytes(setup), parts),)
    around = inputs if "layernorm" in modules else norms.local_norms_saved(setup, parts)
    attending = attention.local_attention_saved(setup, "core_attn" in modules) if kind.attends else ()
    behind = _mlp_saved(setup, kind, modules, mlp.local_mlp_saved)
    return (*around, *attending, *core, *norms.dropout_saved(setup, parts), *behind)


def _mlp_saved(
    setup: Setup, kind: LayerKind, modules: frozenset[str], dense: Callable[[Setup], tuple[Saved, ...]]
) -> tuple[Saved, ...]:
    if kind.experts:
        return mlp.experts_saved(setup, modules)
    return dense(setup) if kind.has_mlp and "mlp" not in modules else ()


def layer_after_input(setup: Setup, kind: LayerKind | None = None) -> tuple[Saved, ...]:
    """Return what a layer holds between dgrad and wgrad: the input of every matrix and the gradient of its output.

    The gradients that enter matrices between layers were gathered, so they are whole under sequence parallelism, too.
    """
    kind = setup.model.kind(0) if kind is None else kind
    rows: tuple[Saved, ...] = (Saved("inputs of the matrices behind the norms", sent_bytes(setup), kind.num_parts),)
    if kind.is_mamba:
        rows += mamba.scan_after_input(setup)
    elif kind.attends:
        rows += attention.attention_after_input(setup)
    if kind.has_mlp:
        rows += mlp.experts_after_input(setup) if kind.experts else mlp.mlp_after_input(setup)
    if kind.further:
        gradient = shard_size(element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size, setup.tensor)
        rows += (Saved("input of the projection of both", sent_bytes(setup), 2), Saved("gradient behind it", gradient))
    return rows


def layer_working_bytes(setup: Setup, kind: LayerKind) -> int:
    """Return the largest temporaries of a backward: of a scan, MLP or experts, or of attention after the MLP."""
    if kind.is_mamba:
        return mamba.scan_working_bytes(setup)
    attending = attention.attention_working_bytes(setup) + attention.core_working_bytes(setup) if kind.attends else 0
    if not kind.has_mlp:
        return attending
    freed = total(_mlp_saved(setup, kind, setup.recomputed.scope(0).modules, mlp.mlp_saved))
    return max(mlp.experts_working_bytes(setup) if kind.experts else mlp.mlp_working_bytes(setup), attending - freed)


def layer_bytes(setup: Setup, recompute: str | None = None, kinds: Sequence[LayerKind] = ()) -> int:
    """Return bytes saved by the kind of layer that saves most, of all or of these."""
    kinds = kinds or [kind for kind, _ in setup.model.kinds()]
    return max(total(layer_saved(setup, recompute, kind)) for kind in kinds)


# Matrices of a part of a layer, each of whose inputs and gradients is written in FP8 by a kernel.
CASTS = 2


def cast_seconds(setup: Setup, kind: LayerKind) -> tuple[float, float]:
    """Return seconds to write inputs of matrices in 8 bit, forward, and gradients of their outputs, backward."""
    if setup.fp8 is None:
        return 0.0, 0.0
    model, tokens, experts = setup.model, num_tokens(setup), setup.model.experts
    entering = leaving = kind.num_parts * tokens * model.hidden_size / setup.sequence_shards
    if kind.attends:
        entering += tokens * model.value_size / setup.tensor + tokens * model.latent_ranks / setup.sequence_shards
        leaving += tokens * (model.query_size + model.key_value_size) / setup.tensor
    elif kind.is_mamba and model.hybrid is not None:
        entering += tokens * model.hybrid.inner_size / setup.tensor
        leaving += tokens * model.hybrid.projected_size / setup.tensor
    if kind.further:
        entering += 2 * tokens * model.hidden_size / setup.sequence_shards
        leaving += tokens * model.hidden_size / setup.tensor
    inner, gates = 0.0, 2 if model.gated else 1
    if kind.has_mlp:
        inner = (
            tokens
            * (model.ffn_hidden_size if experts is None or not kind.experts else experts.shared_size)
            / setup.tensor
        )
    if kind.experts and experts is not None:
        routed = routed_tokens(setup) * model.hidden_size
        entering, leaving = entering + routed, leaving + routed
        inner += routed_tokens(setup) * experts.ffn_hidden_size / setup.expert_tensor
    written = setup.fp8.copies(setup.cluster.device.fp8_blocks) * setup.fp8.value_bytes
    value_s = float(setup.fp8.readings * element_bytes(setup) + written) / Rates.of(setup).memory
    kernels = CASTS * kind.num_parts * setup.fp8.readings * KERNEL_S
    return (entering + inner) * value_s + kernels, (leaving + gates * inner) * value_s + kernels
