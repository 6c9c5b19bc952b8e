"""Norms and dropout around a layer's matrices: what they save, and seconds."""

from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import KERNEL_S, Rates, Saved, element_bytes, kept_bytes, num_tokens, sent_bytes, shard_size

# A fused dropout kernel keeps one byte for every value; torch's on a CPU a number of the values' own type.
GPU_DROPOUT_BYTES = 1
# torch's RMSNorm computes in 32 bit, and keeps its input and the normalized input so.
RMS_NORM_BYTES = 4


def norms_saved(setup: Setup, kind: LayerKind, number: int) -> tuple[Saved, ...]:
    """Return the inputs of norms and of the matrices after them as Transformer Engine keeps them, in FP8 as copies."""
    if setup.fp8 is None:
        return (Saved("inputs of norms and of the matrices behind them", sent_bytes(setup), number),)
    model, tokens = setup.model, num_tokens(setup)
    behind = kept_bytes(setup, tokens * model.hidden_size, setup.sequence_shards)
    output = Saved("input of the output projection, in FP8", kept_bytes(setup, tokens * model.value_size, setup.tensor))
    return (
        Saved("inputs of norms", sent_bytes(setup), kind.num_parts),
        Saved("inputs of the matrices behind them, in FP8", behind, kind.num_parts),
        *((output,) * kind.attends),
    )


def local_norms_saved(setup: Setup, num: int) -> tuple[Saved, ...]:
    """Return what `num` norms save as torch computes them, and the inputs of the matrices after them."""
    shards, tokens, hidden = setup.sequence_shards, num_tokens(setup), setup.model.hidden_size
    behind = Saved("norm output", sent_bytes(setup), num)
    if setup.model.rms_norm:
        wide = Saved("norm input and normalized input", shard_size(RMS_NORM_BYTES * tokens * hidden, shards), 2 * num)
        return (wide, Saved("norm scale", shard_size(RMS_NORM_BYTES * tokens, shards), num), behind)
    statistics = Saved("norm mean and scale", shard_size(element_bytes(setup) * tokens, shards), 2 * num)
    return (Saved("norm input", sent_bytes(setup), num), statistics, behind)


def keeps_received(setup: Setup) -> bool:
    """Whether a norm keeps its input itself: torch's RMSNorm keeps a 32-bit copy instead."""
    return not (setup.kernels == "cpu" and setup.model.rms_norm and setup.precision != "fp32")


def norms_before_copies(setup: Setup, num: int) -> tuple[Saved, ...]:
    """Return what `num` norms save whose outputs are copied or sent, so that nothing keeps them."""
    if setup.kernels == "cpu":
        return local_norms_saved(setup, num)[:-1]
    return (Saved("inputs of norms whose outputs are copied", sent_bytes(setup), num),)


def dropout_saved(setup: Setup, num: int) -> tuple[Saved, ...]:
    """Return the masks of `num` dropouts between a layer's matrices; nothing without dropout."""
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


def norms_alone(setup: Setup, kind: LayerKind) -> int:
    """Return how many norms are modules of their own in Transformer Engine, so that they can be recomputed."""
    return int(kind.experts) + (setup.model.latent is not None)


def norm_seconds(setup: Setup) -> float:
    """Return seconds of one norm's forward: it reads and writes what is between matrices."""
    between = element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size / setup.sequence_shards
    return 2 * between / Rates.of(setup).memory + KERNEL_S
