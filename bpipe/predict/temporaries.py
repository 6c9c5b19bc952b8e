"""Predict temporaries: what comes and goes while a micro-batch is computed. In: a Setup. Out: bytes of one device."""

from __future__ import annotations

from bpipe.predict.context_parallel import exchange_bytes
from bpipe.predict.layers.ends import last_saved, loss_working_bytes, shard_bytes, shard_working_bytes
from bpipe.predict.layers.layer import layer_working_bytes
from bpipe.predict.layout import Setup
from bpipe.predict.saved_tensors import again_bytes
from bpipe.predict.sizes import element_bytes, num_tokens, sent_bytes, total
from bpipe.predict.slices import slice_setups


def working_bytes(setup: Setup) -> tuple[int, ...]:
    """Return the peak of temporaries while one micro-batch, or slice, is computed, for every rank."""
    of_slices = (_working_bytes(one) for one in slice_setups(setup))
    return tuple(map(max, zip(*of_slices, strict=True)))


def _working_bytes(setup: Setup) -> tuple[int, ...]:
    # A layer's backward: gradients of a matrix's input and output over the whole sequence, and what a part makes.
    around = 2 * element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size
    inside = max(layer_working_bytes(setup, kind) for kind, _ in setup.model.kinds())
    layer = max(around + inside + again_bytes(setup), exchange_bytes(setup))
    loss = loss_working_bytes(setup)
    buffers = 2 * sent_bytes(setup) if setup.pipeline > 1 else 0
    if setup.is_sharded:
        # A layer's backward may run between S and T.
        return (shard_bytes(setup) + max(layer, shard_working_bytes(setup)) + buffers,) * setup.pipeline
    # By then the loss has freed what it saved.
    behind_loss = max(loss, layer - total(last_saved(setup)))
    last = {placement[-1] for placement in setup.placements}
    return tuple((behind_loss if rank in last else layer) + buffers for rank in range(setup.pipeline))
