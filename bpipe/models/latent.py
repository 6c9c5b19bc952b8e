"""List what latent attention saves besides queries, keys and values. In: a Setup. Out: `Saved` rows.

As Megatron's `MLASelfAttention` computes it with Transformer Engine's layers: what is projected down is normed, and
projected up by the same module, which keeps the norm's input and output. Queries and keys are made anew where their
ends are rotated, and it is those that attention keeps; one rotated key of a token is joined to the keys of all heads.
Knows no other part of a layer.
"""

from __future__ import annotations

from bpipe.models.layout import Setup
from bpipe.models.sizes import Saved, element_bytes, kept_bytes, num_tokens, shard_size


def latent_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what latent attention saves; nothing where attention is not latent."""
    latent = setup.model.latent
    if latent is None:
        return ()
    ranks = (latent.q_lora_rank or 0) + latent.kv_lora_rank
    # Sequence parallelism divides them like all between matrices.
    each = shard_size(element_bytes(setup) * num_tokens(setup) * ranks, setup.sequence_shards)
    if setup.fp8 is None:
        return (Saved("inputs of the norms of what is projected down, and of the matrices behind", each, 2),)
    behind = kept_bytes(setup, num_tokens(setup) * ranks, setup.sequence_shards)
    return (
        Saved("inputs of the norms of what is projected down", each),
        Saved("inputs of the matrices behind them, in FP8", behind),
    )


def projected_down(setup: Setup) -> tuple[Saved, ...]:
    """Return the inputs of the up projections, kept where those and their norms are recomputed.

    The rotating part of the keys is read from the same storage, gathered whole where that is divided.
    """
    latent = setup.model.latent
    assert latent is not None
    tokens = element_bytes(setup) * num_tokens(setup)
    rows = (Saved("what is projected down", shard_size(tokens * latent.down_size, setup.sequence_shards)),)
    gathered = Saved("rotating part of the keys", tokens * latent.qk_pos_emb_head_dim)
    return (*rows, gathered) if setup.sequence_shards > 1 else rows
