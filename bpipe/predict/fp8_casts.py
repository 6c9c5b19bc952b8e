"""Predict how long it takes to write values in FP8 before a layer's products.

In: a Setup, a kind of layer. Out: seconds.

Knows no products.
"""

from __future__ import annotations

from bpipe.predict.expert_parallel import routed_tokens
from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.rates import KERNEL_S, Rates
from bpipe.predict.sizes import element_bytes, num_tokens

# Matrices of a part of a layer, each of whose inputs and gradients is written in FP8 by a kernel.
CASTS = 2


def cast_seconds(setup: Setup, kind: LayerKind) -> tuple[float, float]:
    """Return seconds to write a layer's matrix inputs in 8 bit, forward, and the gradients of their outputs,
    backward."""
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
    each = float(setup.fp8.readings * element_bytes(setup) + written) / Rates.of(setup).memory
    kernels = CASTS * kind.num_parts * setup.fp8.readings * KERNEL_S
    return (entering + inner) * each + kernels, (leaving + gates * inner) * each + kernels
