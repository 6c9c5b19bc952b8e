"""List what a forward saves for its backward, storage by storage, and what of a split backward its second half needs.

In: a Setup. Out: `Saved` rows and their sums, bytes of one device.

With kernels `gpu` a layer is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", table 2), taken apart so that GQA, SwiGLU, flash attention and missing sequence parallelism come out too. With
kernels `cpu` it is what Megatron's local layers keep on a machine without a GPU, where nothing is fused: exact to the
byte, for the first tensor-parallel rank (a test lays every storage beside Megatron's own layers). Knows no schedule and
no weights.
"""

from __future__ import annotations

from bpipe.ir.layout import Vocabulary
from bpipe.models.latent import latent_saved, projected_down
from bpipe.models.layout import Setup
from bpipe.models.parts import LayerKind
from bpipe.models.recompute import NO_RECOMPUTATION, LayerScope, read_recompute
from bpipe.models.routed import experts_after_input, experts_saved
from bpipe.models.scan import scan_saved
from bpipe.models.sizes import Saved, element_bytes, kept_bytes, num_keys, num_tokens, sent_bytes, shard_size, total

# A fused dropout kernel keeps one byte for every value; torch's on a CPU a number of the values' own type.
GPU_DROPOUT_BYTES = 1
# The loss keeps the softmax in 32 bit for its backward, whatever the precision.
LOSS_BYTES = 4
# Flash attention keeps one 32-bit number a row and head.
FLASH_BYTES = 4
# Token numbers and targets are 64 bit; where the vocabulary is divided, a mask of one byte says which of them are this
# rank's.
TOKEN_BYTES = 8
MASK_BYTES = 1
# Of a shard's logits every token's maximum, sum of exponentials and label's logit are gathered from all shards, in 32
# bit; what a shard gives the output layer's input before the totals are known is 32 bit, too.
STATISTICS, STATISTICS_BYTES, EARLY_BYTES = 3, 4, 4
# torch's RMSNorm computes in 32 bit, and keeps its input and the normalized input so.
RMS_NORM_BYTES = 4
# The kind of mask that Megatron hands to a recomputed attention core, as a tensor.
MASK_KIND_BYTES = 4
# Megatron divides the loss by the number of tokens, a 32-bit tensor, and of micro-batches, which torch makes one of 64
# bit.
TOKEN_COUNT_BYTES, MICROBATCH_COUNT_BYTES = 4, 8


def layer_saved(setup: Setup, recompute: str | None = None, kind: LayerKind | None = None) -> tuple[Saved, ...]:
    """Return what one layer saves for one micro-batch, under the setup's recomputation or another.

    Default: the first layer's kind.
    """
    recomputed = setup.recomputed if recompute is None else read_recompute(recompute)
    return saved_within(setup, setup.model.kind(0) if kind is None else kind, recomputed.scope(0))


def saved_within(setup: Setup, kind: LayerKind, scope: LayerScope) -> tuple[Saved, ...]:
    """Return what a layer of this kind saves under this scope of recomputation."""
    if scope.whole:
        return (Saved("layer input", sent_bytes(setup)),) if scope.keeps_input else ()
    core = _core(setup) if kind.attends and "core_attn" not in scope.modules else ()
    if setup.kernels == "gpu":
        return (*_gpu_layer(setup, kind, scope.modules), *core)
    if kind.experts:
        mlp = experts_saved(setup, scope.modules)
    else:
        mlp = _mlp(setup) if kind.has_mlp and "mlp" not in scope.modules else ()
    parts, attention = kind.num_parts, _attention(setup, "core_attn" in scope.modules) if kind.attends else ()
    # Of a norm that is recomputed the input remains: its output is let go once what reads it is computed.
    norms = (Saved("norm input", sent_bytes(setup), parts),) if "layernorm" in scope.modules else _norm(setup, parts)
    return (*norms, *attention, *core, *_dropout(setup, parts), *mlp)


def stage_saved(setup: Setup, stage: int) -> tuple[Saved, ...]:
    """Return what a forward of one micro-batch saves on a stage."""
    layers = setup.stage_layers[stage]
    rows = [
        Saved(name, nbytes, num * number)
        for kind, scope, number in layers
        for name, nbytes, num in saved_within(setup, kind, scope)
    ]
    if stage == 0:
        rows += _embedding(setup)
    if stage == setup.num_stages - 1:
        rows += _last(setup)
    return tuple(rows)


def shard_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what each rank's shard of the output layer holds of one micro-batch from S to T; nothing where the
    vocabulary is whole.

    Exact to the byte, as a run counts it; what is on its way between shards is not included.
    """
    if not setup.is_sharded:
        return ()
    tokens = num_tokens(setup)
    rows = (
        Saved(
            "logits of the shard", shard_size(element_bytes(setup) * tokens * setup.vocabulary, setup.vocabulary_shards)
        ),
        Saved("input of the output layer", sent_bytes(setup)),
        Saved("labels", TOKEN_BYTES * tokens),
        Saved("gradients of the tokens' losses", LOSS_BYTES * tokens),
    )
    if setup.vocabulary_parallel != Vocabulary.TWO.value:
        return rows
    early = Saved("part of the input's gradient", EARLY_BYTES * tokens * setup.model.hidden_size)
    return (*rows, Saved("statistics of the shard", STATISTICS * STATISTICS_BYTES * tokens), early)


def layer_after_input(setup: Setup, kind: LayerKind | None = None) -> tuple[Saved, ...]:
    """Return what one layer holds between dgrad and wgrad: the input of every matrix and the gradient of its output.

    Inputs are among what the forward saved, unless recomputed; gradients are new. Sequence parallelism divides what
    lies between layers, yet the gradients that enter there are whole: they were gathered.
    """
    model, per_width = setup.model, element_bytes(setup) * num_tokens(setup)
    kind = model.kind(0) if kind is None else kind
    returning = Saved("gradient behind the output projection", per_width * model.hidden_size)
    rows: tuple[Saved, ...] = (Saved("inputs of the matrices behind the norms", sent_bytes(setup), kind.num_parts),)
    inside: tuple[tuple[str, int], ...] = ()
    if kind.is_mamba and model.hybrid is not None:
        inside = (
            ("input of Mamba's second matrix", model.hybrid.inner_size),
            ("gradient of its first's output", model.hybrid.projected_size),
        )
    elif kind.attends:
        inside = (
            ("input of the output projection", model.value_size),
            ("gradient of Q, K, V", model.query_size + model.key_value_size),
        )
    if inside:
        rows = (*rows, *(Saved(name, shard_size(per_width * size, setup.tensor)) for name, size in inside), returning)
    if not kind.has_mlp:
        return rows
    if kind.experts:
        return (*rows, *experts_after_input(setup))
    mlp = (
        ("input of the second MLP matrix", model.ffn_hidden_size),
        ("gradient of the activation function's input", model.first_mlp_size),
    )
    rows = (*rows, *(Saved(name, shard_size(per_width * size, setup.tensor)) for name, size in mlp))
    return (*rows, returning._replace(name="gradient behind the second MLP matrix"))


def core_bytes(setup: Setup) -> int:
    """Return bytes that a layer's attention core saves where it is not recomputed; 0 where no layer attends."""
    return total(_core(setup)) if any(kind.attends for kind, _ in setup.model.kinds()) else 0


def layer_bytes(setup: Setup, recompute: str | None = None) -> int:
    """Return bytes saved by the kind of layer that saves most."""
    return max(total(layer_saved(setup, recompute, kind)) for kind, _ in setup.model.kinds())


def stage_bytes(setup: Setup) -> tuple[int, ...]:
    """Return bytes saved of one micro-batch by every stage."""
    stages = setup.stage_layers
    each = {
        one: total(saved_within(setup, *one))
        for one in dict.fromkeys((kind, scope) for layers in stages for kind, scope, _ in layers)
    }
    saved = [sum(number * each[kind, scope] for kind, scope, number in layers) for layers in stages]
    saved[0] += total(_embedding(setup))
    saved[-1] += total(_last(setup))
    return tuple(saved)


def shard_bytes(setup: Setup) -> int:
    """Return bytes that each rank's shard holds from S to T."""
    return total(shard_saved(setup))


def after_input_bytes(setup: Setup) -> tuple[int, ...]:
    """Return, for every stage, bytes of a micro-batch held between dgrad and wgrad; 0 where no wgrad is deferred.

    The output layer's wgrad is never deferred, as the gradients of its logits would be held; the embedding holds
    nothing there.
    """
    if not setup.keeps_halves:
        return (0,) * setup.num_stages
    of_kind = {kind: total(layer_after_input(setup, kind)) for kind, _ in setup.model.kinds()}
    return tuple(sum(number * of_kind[kind] for kind, number in kinds) for kinds in setup.stage_kinds)


def kept_share(setup: Setup) -> float:
    """Return what layers hold between dgrad and wgrad as a share of what their forwards saved."""
    layers = [one for of_stage in setup.stage_layers for one in of_stage]
    kept = sum(number * total(layer_after_input(setup, kind)) for kind, _, number in layers)
    return kept / sum(number * total(saved_within(setup, kind, scope)) for kind, scope, number in layers)


def moved_bytes(setup: Setup, stage: int, minimum_bytes: int) -> int:
    """Return bytes that a transfer of one micro-batch moves.

    Storages below `minimum_bytes` stay, and so does what the pipeline's loop holds.
    """
    received = sent_bytes(setup) if stage and setup.layers[stage] and _shares_input(setup) else 0
    moved = total(tuple(row for row in stage_saved(setup, stage) if row.nbytes >= minimum_bytes))
    return moved - (received if received >= minimum_bytes else 0)


def _shares_input(setup: Setup) -> bool:
    """Return whether what a stage receives is saved as another tensor of the same storage, as Megatron does for
    recomputation."""
    alone = setup.kernels == "cpu" or setup.model.latent is not None
    return alone and "layernorm" in setup.recomputed.modules


def saves_input(setup: Setup) -> bool:
    """Return whether what a stage receives is itself among what it saves: torch's RMSNorm keeps a 32-bit copy
    instead, a norm that is recomputed another tensor of the same storage."""
    copied = setup.kernels == "cpu" and setup.model.rms_norm and setup.precision != "fp32"
    scope = setup.recomputed.scope(0)
    return scope.whole or not (copied or _shares_input(setup))


def again_bytes(setup: Setup) -> int:
    """Return the peak bytes that recomputation makes at once.

    Of layers recomputed together that is all but their input; of one layer, the parts around attention, then those
    around the MLP.
    """
    together = setup.recomputed.together
    if together:
        number = min(together, max(setup.layers))
        return number * layer_bytes(setup, "none") - layer_bytes(setup, "full")
    modules = setup.recomputed.scope(0).modules
    core = core_bytes(setup) if "core_attn" in modules else 0
    kinds = [kind for kind, _ in setup.model.kinds()]
    return max(
        core + max(_freed(setup, kind, modules & {"mla_up_proj"}) for kind in kinds),
        *(_freed(setup, kind, modules & _BEHIND_ATTENTION) for kind in kinds),
    )


# Parts of a layer that are recomputed before the backward of its attention; of norms one is.
_BEHIND_ATTENTION = frozenset(("mlp", "layernorm", "moe_act", "moe", "shared_experts"))


def _freed(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> int:
    """What a layer saves less where these parts are recomputed."""
    return (
        total(saved_within(setup, kind, NO_RECOMPUTATION)) - total(saved_within(setup, kind, LayerScope(modules)))
        if modules
        else 0
    )


def norms_alone(setup: Setup, kind: LayerKind) -> int:
    """Return how many of a layer's norms are modules of their own in Transformer Engine: those before experts and
    latent attention.

    The others are one with the matrix behind them, where the norm alone cannot be recomputed.
    """
    return int(kind.experts) + (setup.model.latent is not None)


def _gpu_layer(setup: Setup, kind: LayerKind, modules: frozenset[str]) -> tuple[Saved, ...]:
    model, hidden = setup.model, sent_bytes(setup)
    recomputes_mlp = "mlp" in modules and kind.has_mlp and not kind.experts
    norms = 2 * kind.num_parts - recomputes_mlp - norms_alone(setup, kind) * ("layernorm" in modules)
    per_width = element_bytes(setup) * num_tokens(setup)
    rows = (
        *_around_norms(setup, hidden, kind, norms),
        *((Saved("inputs of the norms behind attention and MLP", hidden, 2),) * model.post_norms),
        *_dropout(setup, kind.num_parts),
    )
    if kind.is_mamba:
        return (*rows, *scan_saved(setup))
    if kind.attends:
        rows = (
            *rows,
            *_query_key_value(setup, "mla_up_proj" in modules),
            Saved("input of the output projection", shard_size(per_width * model.value_size, setup.tensor)),
        )
    if not kind.has_mlp:
        return rows
    mlp = (
        Saved("input of the activation function", shard_size(per_width * model.first_mlp_size, setup.tensor)),
        Saved(
            "input of the second MLP matrix", kept_bytes(setup, num_tokens(setup) * model.ffn_hidden_size, setup.tensor)
        ),
    )
    return (*rows, *(experts_saved(setup, modules) if kind.experts else () if recomputes_mlp else mlp))


def _query_key_value(setup: Setup, recomputed: bool) -> tuple[Saved, ...]:
    model, per_width = setup.model, element_bytes(setup) * num_tokens(setup)
    if recomputed:
        return projected_down(setup)
    normed = model.query_size + model.key_value_size // 2
    # Of slices a layer keeps keys and values apart.
    attended = model.query_size + (model.key_value_size if setup.span is None else 0)
    return (
        Saved("Q, K, V" if setup.span is None else "queries", shard_size(per_width * attended, setup.tensor)),
        *((Saved("Q and K before their norms", shard_size(per_width * normed, setup.tensor)),) * model.qk_norm),
        *latent_saved(setup),
    )


def _around_norms(setup: Setup, hidden: int, kind: LayerKind, number: int) -> tuple[Saved, ...]:
    """In FP8 a matrix keeps a copy of its own, and so does the output projection of what attention gave and keeps."""
    if setup.fp8 is None:
        return (Saved("inputs of norms and of the matrices behind them", hidden, number),)
    model, tokens = setup.model, num_tokens(setup)
    behind = kept_bytes(setup, tokens * model.hidden_size, setup.sequence_shards)
    given = Saved("input of the output projection, in FP8", kept_bytes(setup, tokens * model.value_size, setup.tensor))
    return (
        Saved("inputs of norms", hidden, kind.num_parts),
        Saved("inputs of the matrices behind them, in FP8", behind, kind.num_parts),
        *((given,) * kind.attends),
    )


def _core(setup: Setup) -> tuple[Saved, ...]:
    heads = setup.model.num_attention_heads
    if setup.attention == "flash":
        rows = (Saved("log-sum-exp of attention", shard_size(FLASH_BYTES * num_tokens(setup) * heads, setup.tensor)),)
        if setup.context == 1 or setup.cp_comm_type == "p2p":
            return rows
        # What is given to the projection is a copy of it.
        given = shard_size(element_bytes(setup) * num_tokens(setup) * setup.model.value_size, setup.tensor)
        return (*rows, Saved("what attention gave, in another order", given))
    scores = num_tokens(setup) * heads * num_keys(setup)
    element = element_bytes(setup)
    one = Saved("attention softmax", shard_size(element * scores, setup.tensor))
    if not setup.model.dropout:
        return (one,)
    mask = GPU_DROPOUT_BYTES if setup.kernels == "gpu" else element
    return (
        one,
        Saved("attention after dropout", one.nbytes),
        Saved("attention dropout mask", shard_size(mask * scores, setup.tensor)),
    )


def _dropout(setup: Setup, num: int) -> tuple[Saved, ...]:
    if not setup.model.dropout:
        return ()
    element = GPU_DROPOUT_BYTES if setup.kernels == "gpu" else element_bytes(setup)
    return (
        Saved(
            "dropout mask",
            shard_size(element * num_tokens(setup) * setup.model.hidden_size, setup.sequence_shards),
            num,
        ),
    )


def _norm(setup: Setup, num: int) -> tuple[Saved, ...]:
    """Norms as torch computes them, and the inputs of the matrices behind them."""
    shards, tokens, hidden = setup.sequence_shards, num_tokens(setup), setup.model.hidden_size
    behind = Saved("norm output", sent_bytes(setup), num)
    if setup.model.rms_norm:
        wide = Saved("norm input and normalized input", shard_size(RMS_NORM_BYTES * tokens * hidden, shards), 2 * num)
        return (wide, Saved("norm scale", shard_size(RMS_NORM_BYTES * tokens, shards), num), behind)
    statistics = Saved("norm mean and scale", shard_size(element_bytes(setup) * tokens, shards), 2 * num)
    return (Saved("norm input", sent_bytes(setup), num), statistics, behind)


def _attention(setup: Setup, recomputed: bool) -> tuple[Saved, ...]:
    """What is saved around the core: Q, K and V, as one storage where nothing changes them, and what the projection
    reads."""
    model, t = setup.model, setup.tensor
    per_width = element_bytes(setup) * num_tokens(setup)
    query = Saved("queries", shard_size(per_width * model.query_size, t))
    joint = Saved("joint Q, K, V", shard_size(per_width * (model.query_size + model.key_value_size), t))
    grouped, rotary = (
        model.num_query_groups != model.num_attention_heads,
        not (model.learned_positions or model.no_positions),
    )
    # With several groups on a rank a group's keys and values stand between the queries.
    own_query = rotary or (grouped and model.num_query_groups > t)
    rows = [Saved("input of the output projection", query.nbytes)]
    if rotary:
        # Sine and cosine, anew for Q and for K of every layer, over the whole sequence, or slice, on every rank.
        length = num_tokens(setup) // setup.micro_batch
        rows.append(Saved("rotary tables", element_bytes(setup) * length * model.kv_channels, 4))
    if setup.span is not None:
        return (*rows, *_beside_kept(setup, recomputed, grouped, query if own_query else joint))
    if grouped and not recomputed:
        # K and V are repeated for every head of their group; the core lines up the queries of several sequences.
        return (
            *rows,
            query if own_query or setup.micro_batch > 1 else joint,
            Saved("repeated K and V", query.nbytes, 2),
        )
    if own_query:
        rows.append(query)
    if rotary:
        rows.append(Saved("rotated keys", shard_size(per_width * model.key_value_size // 2, t)))
    rows.append(joint)
    if recomputed:
        rows.append(Saved("kind of mask", MASK_KIND_BYTES))
    return tuple(rows)


def _beside_kept(setup: Setup, recomputed: bool, grouped: bool, query: Saved) -> tuple[Saved, ...]:
    """What a slice saves beside the keys and values that its layer keeps: of groups, all so far, repeated."""
    if recomputed:
        return (query, Saved("kind of mask", MASK_KIND_BYTES))
    if not grouped:
        return (query,)
    own, every = (
        tokens * setup.model.query_size for tokens in (num_tokens(setup), num_keys(setup) * setup.micro_batch)
    )
    queries, repeated = (shard_size(element_bytes(setup) * values, setup.tensor) for values in (own, every))
    lined_up = query if setup.micro_batch == 1 else Saved("queries", queries)
    return (lined_up, Saved("repeated K and V", repeated, 2))


def _mlp(setup: Setup) -> tuple[Saved, ...]:
    model = setup.model
    inner = shard_size(element_bytes(setup) * num_tokens(setup) * model.ffn_hidden_size, setup.tensor)
    if model.gated:
        # SiLU of one half, the other half plus its offset of zero, and their product.
        return (Saved("both halves of the MLP", 2 * inner), Saved("SiLU, other half, product", inner, 3))
    return (Saved("GELU input and output", inner, 2),)


def _embedding(setup: Setup) -> tuple[Saved, ...]:
    tokens = num_tokens(setup)
    if setup.kernels == "gpu":
        return (Saved("tokens", TOKEN_BYTES * tokens), *_dropout(setup, 1))
    # The tokens are the data iterator's own, unless a divided vocabulary needs them masked, or a slice is cut from them.
    divided = (Saved("tokens of this part", TOKEN_BYTES * tokens), Saved("mask of this part", MASK_BYTES * tokens))
    cut = (Saved("tokens of this slice", TOKEN_BYTES * tokens),) if setup.span is not None else ()
    positions = cut if setup.model.learned_positions else ()
    return (*_dropout(setup, 1), *(divided if setup.tensor > 1 else cut), *positions)


def _last(setup: Setup) -> tuple[Saved, ...]:
    """Of the last stage behind its layers: where the vocabulary is in shards, the loss is theirs."""
    return _output(setup) if setup.is_sharded else (*_output(setup), *_loss(setup))


def _output(setup: Setup) -> tuple[Saved, ...]:
    """Return the final norm, and what the output layer reads."""
    if setup.kernels == "cpu":
        return _norm(setup, 1)
    return (Saved("inputs of the final norm and of the output layer", sent_bytes(setup), 2),)


def _loss(setup: Setup) -> tuple[Saved, ...]:
    tokens = num_tokens(setup)
    softmax = Saved("softmax of the logits", shard_size(LOSS_BYTES * tokens * setup.vocabulary, setup.tensor))
    if setup.kernels == "gpu":
        capped = Saved("capped logits", shard_size(element_bytes(setup) * tokens * setup.vocabulary, setup.tensor))
        return (softmax, *((capped,) * setup.model.capped_logits))
    targets = (Saved("targets", TOKEN_BYTES * tokens), Saved("mask of targets", MASK_BYTES * tokens))
    return (
        softmax,
        *targets,
        Saved("number of tokens", TOKEN_COUNT_BYTES),
        Saved("number of micro-batches", MICROBATCH_COUNT_BYTES),
    )
