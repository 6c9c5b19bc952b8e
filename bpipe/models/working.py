"""Predict temporaries: what comes and goes while a micro-batch is computed. In: a Setup. Out: bytes of one device."""

from __future__ import annotations

from bpipe.models.context_parallel import exchange_bytes
from bpipe.models.layers.attention import core_working_bytes
from bpipe.models.layers.ends import loss_working_bytes, shard_bytes, shard_working_bytes
from bpipe.models.layers.layer import layer_working_bytes
from bpipe.models.layout import Setup
from bpipe.models.saved import again_bytes
from bpipe.models.sizes import element_bytes, num_tokens, sent_bytes
from bpipe.models.slices import slice_setups


def working_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the peak of temporaries while one micro-batch, or slice, is computed, for every rank."""
    of_slices = (_working_bytes(one) for one in slice_setups(setup))
    return tuple(map(max, zip(*of_slices, strict=True)))


def _working_bytes(setup: Setup) -> tuple[int, ...]:
    model, element, tokens = setup.model, element_bytes(setup), num_tokens(setup)
    # A layer's backward: gradients of a matrix's input and output over the whole sequence, and of the MLP's inside.
    layer = 2 * element * tokens * model.hidden_size
    layer += max(layer_working_bytes(setup, kind) for kind, _ in model.kinds())
    layer = max(layer + core_working_bytes(setup) + again_bytes(setup), exchange_bytes(setup))
    loss = loss_working_bytes(setup)
    buffers = 2 * sent_bytes(setup) if setup.pipeline > 1 else 0
    if setup.is_sharded:
        # A layer's backward may run between S and T.
        return (shard_bytes(setup) + max(layer, shard_working_bytes(setup)) + buffers,) * setup.pipeline
    last = {placement[-1] for placement in setup.placements}
    return tuple((max(layer, loss) if rank in last else layer) + buffers for rank in range(setup.pipeline))
