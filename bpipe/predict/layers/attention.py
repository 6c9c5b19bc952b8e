"""Attention: what it saves, its temporaries, and seconds of its core. Its matrices are in `predict.matmul`.

Latent attention is Megatron's `MLASelfAttention` with Transformer Engine's layers: down projections are normed and
projected up by one module, which keeps the norm's input and output. Attention keeps the queries and keys whose ends
were rotated; a token's one rotated key is joined to the keys of all heads.
"""

from bpipe.predict.exchanges import with_exchange
from bpipe.predict.layers.norms import GPU_DROPOUT_BYTES
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import latent_up_products
from bpipe.predict.sizes import (
    KERNEL_S,
    Rates,
    Saved,
    element_bytes,
    kept_bytes,
    num_keys,
    num_tokens,
    shard_size,
    total,
)
from bpipe.predict.slices import SUM_BYTES
from bpipe.predict.training import IMPLEMENTATIONS

FLASH_BACKWARD = 2.5
# Two products up, two norms before them and both rotations after them.
LATENT_KERNELS = 6
# Bytes read and written for every attention score: by the fused kernel, and by separate ones in 32 bit (convert, scale,
# mask, softmax, convert back). Megatron fuses only where micro-batch * heads / t is a multiple of 4 and the sequence is
# at most 4096 (`FusedScaleMaskSoftmax.is_kernel_available`): for GPT-3 96B at t=4, micro-batch 1 is not fused and 2 is,
# which is most of what Kim et al. 2023 gained, and what Huang et al. 2024 could not repeat with flash attention.
FUSED_FORWARD, FUSED_BACKWARD = 4, 6
SEPARATE_FORWARD, SEPARATE_BACKWARD = 33, 40
DROPOUT_FORWARD, DROPOUT_BACKWARD = 5, 5
PRODUCT_BYTES = 4
# Tokens of sequences between which there is a fused kernel of Transformer Engine's softmax
# (`FusedScaleMaskSoftmax.is_kernel_available` there).
LEAST_FUSED, MOST_FUSED = 16, 16384
# A probability of a softmax in 32 bits.
EXACT_BYTES = 4
# Flash attention keeps one 32-bit number per row and head.
FLASH_BYTES = 4
# The kind of mask that Megatron hands to a recomputed attention core, as a tensor.
MASK_KIND_BYTES = 4


def is_softmax_fused(setup: Setup) -> bool:
    """Whether a fused softmax takes these sizes. Transformer Engine's asks none of Megatron's flags; Megatron's own takes
    no slices, which have more keys than queries."""
    heads = setup.micro_batch * setup.model.num_attention_heads // setup.tensor
    if setup.kernels == "cpu" or setup.precision == "fp32" or heads % 4:
        return False
    if _is_transformer_engines(setup):
        begin, end = setup.span or (0, setup.sequence)
        return LEAST_FUSED < end < MOST_FUSED and end % 8 == 0 and (end - begin) % 4 == 0
    return not setup.switches.no_masked_softmax_fusion and setup.span is None and setup.sequence <= 4096


def _converts_scores(setup: Setup) -> bool:
    """Whether separate kernels convert 16-bit scores to 32 bit, kept for the softmax's backward, and its probabilities
    back: Transformer Engine's always, Megatron's own if a flag says so."""
    in_32_bits = _is_transformer_engines(setup) or setup.switches.attention_softmax_in_fp32
    return in_32_bits and setup.precision != "fp32" and not is_softmax_fused(setup)


def _is_transformer_engines(setup: Setup) -> bool:
    return setup.kernels == "gpu" and setup.transformer_impl == IMPLEMENTATIONS[0]


def core_seconds(setup: Setup, rates: Rates, window: int | None = None) -> tuple[float, float]:
    """Return the attention core of one layer, forward and backward, with what context-parallel ranks exchange for
    it, and what slices add to keys and values that are kept."""
    forward, backward = _core_alone(setup, rates, window)
    if setup.span is not None:
        forward, backward = _with_kept(setup, rates, forward, backward)
    return (forward, backward) if setup.context == 1 else with_exchange(setup, forward, backward)


def _with_kept(setup: Setup, rates: Rates, forward_s: float, backward_s: float) -> tuple[float, float]:
    """A slice's keys and values are copied forward; backward all gradients so far are added, its own copied back."""
    element, size = element_bytes(setup), setup.model.key_value_size / setup.tensor
    own, every = num_tokens(setup) * size, num_keys(setup) * setup.micro_batch * size
    copied = 2 * element * own
    added = (element + 2 * max(SUM_BYTES, element)) * every + (max(SUM_BYTES, element) + element) * own
    return forward_s + copied / rates.memory, backward_s + added / rates.memory


def _core_alone(setup: Setup, rates: Rates, window: int | None) -> tuple[float, float]:
    """With a window, flash attention computes no more than lies in it; context-parallel ranks have equal shares."""
    model, c = setup.model, setup.context
    if setup.attention == "flash":
        product_flops = 4 * setup.micro_batch * _attended(setup, window) * model.core_size / (setup.tensor * c)
        forward = product_flops / rates.flash
        return forward, FLASH_BACKWARD * forward
    queries = num_tokens(setup) * c / setup.micro_batch
    heads = setup.micro_batch * model.num_attention_heads / (setup.tensor * c)
    product_flops = 4 * setup.micro_batch * queries * num_keys(setup) * model.core_size / (setup.tensor * c)
    scores = heads * queries * num_keys(setup)
    softmax = (FUSED_FORWARD, FUSED_BACKWARD) if is_softmax_fused(setup) else (SEPARATE_FORWARD, SEPARATE_BACKWARD)
    dropout = (DROPOUT_FORWARD, DROPOUT_BACKWARD) if model.dropout else (0, 0)
    forward_bytes = (softmax[0] + dropout[0] + PRODUCT_BYTES) * scores
    backward_bytes = (softmax[1] + dropout[1] + 2 * PRODUCT_BYTES) * scores
    return (
        product_flops / rates.products + forward_bytes / rates.memory,
        2 * product_flops / rates.products + backward_bytes / rates.memory,
    )


def _attended(setup: Setup, window: int | None) -> float:
    """Pairs of a query and an earlier key in a sequence, or in a slice of it."""
    begin, end = setup.span or (0, setup.sequence)
    return _causal_pairs(end, window) - _causal_pairs(begin, window)


def _causal_pairs(tokens: int, window: int | None) -> float:
    reach = tokens if window is None else min(window, tokens)
    return reach * reach / 2 + (tokens - reach) * reach


def latent_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what latent attention saves; nothing where attention is not latent."""
    latent = setup.model.latent
    if latent is None:
        return ()
    ranks = (latent.q_lora_rank or 0) + latent.kv_lora_rank
    # Sequence parallelism divides them like all between matrices.
    size = shard_size(element_bytes(setup) * num_tokens(setup) * ranks, setup.sequence_shards)
    if setup.fp8 is None:
        return (Saved("inputs of the norms of what is projected down, and of the matrices behind", size, 2),)
    behind = kept_bytes(setup, num_tokens(setup) * ranks, setup.sequence_shards)
    return (
        Saved("inputs of the norms of what is projected down", size),
        Saved("inputs of the matrices behind them, in FP8", behind),
    )


def projected_down(setup: Setup) -> tuple[Saved, ...]:
    """Return the inputs of recomputed up projections, with the rotating part of the keys, gathered if divided."""
    latent = setup.model.latent
    assert latent is not None
    tokens = element_bytes(setup) * num_tokens(setup)
    rows = (Saved("what is projected down", shard_size(tokens * latent.down_size, setup.sequence_shards)),)
    gathered = Saved("rotating part of the keys", tokens * latent.qk_pos_emb_head_dim)
    return (*rows, gathered) if setup.sequence_shards > 1 else rows


def core_bytes(setup: Setup) -> int:
    """Return bytes that a layer's attention core saves where it is not recomputed; 0 where no layer attends."""
    return total(core_saved(setup)) if any(kind.attends for kind, _ in setup.model.kinds()) else 0


def attention_saved(setup: Setup, modules: frozenset[str]) -> tuple[Saved, ...]:
    """Return what fused kernels save around the core, where these parts are recomputed."""
    output = element_bytes(setup) * num_tokens(setup) * setup.model.value_size
    projection = Saved("input of the output projection", shard_size(output, setup.tensor))
    return (*_query_key_value(setup, modules), projection)


def _query_key_value(setup: Setup, modules: frozenset[str]) -> tuple[Saved, ...]:
    model, per_width = setup.model, element_bytes(setup) * num_tokens(setup)
    if "mla_up_proj" in modules:
        return projected_down(setup)
    normed = model.query_size + model.key_value_size // 2
    # Of slices a layer keeps keys and values apart.
    attended = model.query_size + (model.key_value_size if setup.span is None else 0)
    return (
        Saved("Q, K, V" if setup.span is None else "queries", shard_size(per_width * attended, setup.tensor)),
        *_beside_query_key_value(setup, "core_attn" in modules),
        *((Saved("Q and K before their norms", shard_size(per_width * normed, setup.tensor)),) * model.qk_norm),
        *latent_saved(setup),
    )


def _beside_query_key_value(setup: Setup, recomputed: bool) -> tuple[Saved, ...]:
    """Return what is saved besides one copy of queries, keys and values: rotated copies if the core is recomputed, as
    its values are part of the projection; otherwise, without flash attention, keys and values repeated for every head
    of their group."""
    model, per_width = setup.model, element_bytes(setup) * num_tokens(setup)
    if model.latent is not None or setup.span is not None:
        return ()
    if recomputed:
        changed = model.query_size + model.key_value_size // 2
        return (Saved("rotated Q and K", shard_size(per_width * changed, setup.tensor)),) * _is_rotary(setup)
    if setup.attention == "flash":
        return ()
    repeated = shard_size(per_width * (2 * model.query_size - model.key_value_size), setup.tensor)
    return (Saved("K and V, repeated for the heads of a group", repeated),) * (repeated > 0)


def core_saved(setup: Setup) -> tuple[Saved, ...]:
    heads = setup.model.num_attention_heads
    if setup.attention == "flash":
        rows = (Saved("log-sum-exp of attention", shard_size(FLASH_BYTES * num_tokens(setup) * heads, setup.tensor)),)
        if setup.context == 1 or setup.cp_comm_type == "p2p":
            return rows
        # What is given to the projection is a copy of it.
        output = shard_size(element_bytes(setup) * num_tokens(setup) * setup.model.value_size, setup.tensor)
        return (*rows, Saved("what attention gave, in another order", output))
    scores = num_tokens(setup) * heads * num_keys(setup)
    element = element_bytes(setup)
    softmax = Saved("attention softmax", shard_size(element * scores, setup.tensor))
    exact = Saved("attention softmax in 32 bits", shard_size(EXACT_BYTES * scores, setup.tensor))
    kept = (softmax, exact) if _converts_scores(setup) else (softmax,)
    if not setup.model.dropout:
        return kept
    mask = GPU_DROPOUT_BYTES if setup.kernels == "gpu" else element
    return (
        *kept,
        Saved("attention after dropout", softmax.nbytes),
        Saved("attention dropout mask", shard_size(mask * scores, setup.tensor)),
    )


def local_attention_saved(setup: Setup, recomputed: bool) -> tuple[Saved, ...]:
    """Return what torch's kernels save around the core: Q, K and V, joint if unchanged, and the projection's input."""
    model, t = setup.model, setup.tensor
    per_width = element_bytes(setup) * num_tokens(setup)
    query = Saved("queries", shard_size(per_width * model.query_size, t))
    joint = Saved("joint Q, K, V", shard_size(per_width * (model.query_size + model.key_value_size), t))
    grouped, rotary = model.num_query_groups != model.num_attention_heads, _is_rotary(setup)
    # With several groups on a rank their keys and values lie between the queries.
    own_query = rotary or (grouped and model.num_query_groups > t)
    # Sine and cosine, anew for Q and for K of every layer, over the whole sequence, or slice, on every rank.
    table = element_bytes(setup) * (num_tokens(setup) // setup.micro_batch) * model.kv_channels
    around = (Saved("input of the output projection", query.nbytes), *((Saved("rotary tables", table, 4),) * rotary))
    if setup.span is not None:
        return (*around, *_beside_kept(setup, recomputed, grouped, query if own_query else joint))
    if grouped and not recomputed:
        # K and V are repeated for every head of their group; the core lines up the queries of several sequences.
        lined_up = query if own_query or setup.micro_batch > 1 else joint
        return (*around, lined_up, Saved("repeated K and V", query.nbytes, 2))
    rotated = Saved("rotated keys", shard_size(per_width * model.key_value_size // 2, t))
    mask = Saved("kind of mask", MASK_KIND_BYTES)
    return (*around, *((query,) * own_query), *((rotated,) * rotary), joint, *((mask,) * recomputed))


def _is_rotary(setup: Setup) -> bool:
    return not (setup.model.learned_positions or setup.model.no_positions)


def _beside_kept(setup: Setup, recomputed: bool, grouped: bool, query: Saved) -> tuple[Saved, ...]:
    """Return what a slice saves besides the keys and values that its layer keeps; those of groups are repeated."""
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


def attention_after_input(setup: Setup) -> tuple[Saved, ...]:
    """Return what attention holds between dgrad and wgrad, without the input of its first matrix."""
    model, per_width = setup.model, element_bytes(setup) * num_tokens(setup)
    projected = model.query_size + model.key_value_size
    return (
        Saved("input of the output projection", shard_size(per_width * model.value_size, setup.tensor)),
        Saved("gradient of Q, K, V", shard_size(per_width * projected, setup.tensor)),
        Saved("gradient behind the output projection", per_width * model.hidden_size),
    )


def attention_working_bytes(setup: Setup) -> int:
    """Return the gradients of queries, keys and values."""
    projected = setup.model.query_size + setup.model.key_value_size
    return shard_size(element_bytes(setup) * num_tokens(setup) * projected, setup.tensor)


def core_working_bytes(setup: Setup) -> int:
    """Return what the core's backward makes in addition: gradients of scores, where there are scores, and of a slice
    the gradients of all keys and values so far, before they are added to what is kept."""
    model, element, num_bytes = setup.model, element_bytes(setup), 0
    if setup.attention == "unfused" and any(kind.attends for kind, _ in model.kinds()):
        scores = num_tokens(setup) * model.num_attention_heads * num_keys(setup)
        size = max(element, EXACT_BYTES) if _converts_scores(setup) else element
        num_bytes += shard_size(2 * size * scores, setup.tensor)
    if setup.span is not None:
        num_bytes += shard_size(element * num_keys(setup) * setup.micro_batch * model.key_value_size, setup.tensor)
    return num_bytes


def up_projections_s(setup: Setup) -> float:
    """Return seconds of latent attention's forward from what is projected down to queries, keys and values."""
    model = setup.model
    assert model.latent is not None
    ups = latent_up_products(setup, model.latent)
    # Norms of what was projected down, and queries, keys and values, which are read and written where their ends
    # are rotated.
    moved = 2.0 * element_bytes(setup) * num_tokens(setup)
    moved *= model.latent_ranks / setup.sequence_shards + (model.query_size + model.key_value_size) / setup.tensor
    return sum(product.forward_s for product in ups) + moved / Rates.of(setup).memory + LATENT_KERNELS * KERNEL_S


def query_norms_bytes(setup: Setup) -> float:
    """Return bytes of queries and keys that are normed; 0 where none are."""
    model = setup.model
    normed = model.query_size + model.key_value_size // 2
    return element_bytes(setup) * num_tokens(setup) * normed / setup.tensor * model.qk_norm
