"""The scan of a Mamba layer: what it saves, its temporaries and seconds. Its matrices are in `predict.matmul`.

As Megatron's `MambaMixer` trains [1] with the kernels of mamba_ssm [2] (`MambaSplitConv1dScanCombinedFn` and what it
calls). The forward keeps the outputs of the first matrix and of the scan before its gate; the backward recomputes the
convolution, the states of all chunks and the products of reads and writes. From the source alone: nothing was compared
with a run.
  [1] megatron/core/ssm/mamba_mixer.py, `_ssm_training`
  [2] github.com/state-spaces/mamba, mamba_ssm/ops/triton/ssd_combined.py, ssd_chunk_state.py, ssd_chunk_scan.py, ssd_bmm.py,
      ssd_state_passing.py, layernorm_gated.py
"""

from bpipe.predict.layer_variants import Hybrid
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import Rates, Saved, element_bytes, kept_bytes, num_tokens, shard_size

# Tokens of a chunk, within which all pairs are multiplied: `MambaMixer` has no flag for it.
CHUNK = 128
# States of a chunk are written in 32 bit and passed on in the values' own type, products of reads and writes are 32 bit
# [2].
WIDE_BYTES = 4
# How often the kernels of [2], one after the other, read or write a tensor as wide as what goes through the states, and
# one as wide as what is written to them. Forward: the convolution reads and writes all three of its inputs; states read
# 1 and 1, products of reads and writes 0 and 2, the scan reads 2 and 1 and writes 2, the norm 2.
FORWARD_INNER, FORWARD_KEYS = 9, 8
# Backward: convolution, states and products again (3 and 7); of the gate 6 and 0; of states 1 and 1; of the scan's
# input 3 and 1; of writes and of reads 1 and 2 each; of their products 2 and 6; of decays 2 and 0; of the convolution 3
# and 6; of the norm 3 and 0.
BACKWARD_INNER, BACKWARD_KEYS = 25, 25
# Of states, bytes a value: written wide, read, passed on, read. Backward again, and their gradients the same way.
STATE_BYTES, STATE_BYTES_BACK = 12, 24
FORWARD_KERNELS, BACKWARD_KERNELS = 12, 24
# Backward what is made anew, and two products for each of a forward's.
BACKWARD_PRODUCTS = 3


def _hybrid(setup: Setup) -> Hybrid:
    assert setup.model.hybrid is not None
    return setup.model.hybrid


def scan_saved(setup: Setup) -> tuple[Saved, ...]:
    """Return what a Mamba layer saves between its two matrices, the second one's input included."""
    hybrid, tokens, t = _hybrid(setup), num_tokens(setup), setup.tensor
    per_width = element_bytes(setup) * tokens
    return (
        Saved("output of Mamba's first matrix", shard_size(per_width * hybrid.projected_size, t)),
        Saved("what the scan gave, before and behind its gate", shard_size(per_width * hybrid.inner_size, t), 2),
        Saved("scales of the norm behind the scan", shard_size(WIDE_BYTES * tokens * hybrid.num_groups, t)),
        Saved("input of Mamba's second matrix", kept_bytes(setup, tokens * hybrid.inner_size, t)),
    )


def scan_working_bytes(setup: Setup) -> int:
    """Return temporaries of a Mamba layer's backward: recomputed values, gradients, and states of all chunks."""
    hybrid, tokens = _hybrid(setup), num_tokens(setup)
    values = hybrid.projected_size + 2 * hybrid.convolved_size + 2 * hybrid.inner_size
    wide = STATE_BYTES * hybrid.inner_size * hybrid.state_dim // CHUNK + WIDE_BYTES * hybrid.num_groups * CHUNK
    return shard_size(tokens * (element_bytes(setup) * values + wide), setup.tensor)


def scan_seconds(setup: Setup) -> tuple[float, float]:
    """Return seconds of a scan, forward and backward; its products are as fast as flash attention's."""
    hybrid, rates = _hybrid(setup), Rates.of(setup)
    tokens, element = num_tokens(setup) / setup.tensor, element_bytes(setup)
    inner, keys, states = hybrid.inner_size, hybrid.key_size, hybrid.inner_size * hybrid.state_dim
    # Reads with writes of a chunk, these with what goes through the states, that into states and out of them.
    flops = 2 * tokens * (keys * CHUNK + inner * CHUNK + 2 * states)
    pairs = 2 * WIDE_BYTES * hybrid.num_groups * CHUNK
    forward = element * (FORWARD_INNER * inner + FORWARD_KEYS * keys) + STATE_BYTES * states / CHUNK + pairs
    backward = element * (BACKWARD_INNER * inner + BACKWARD_KEYS * keys) + STATE_BYTES_BACK * states / CHUNK + 2 * pairs
    return (
        flops / rates.flash + tokens * forward / rates.memory,
        BACKWARD_PRODUCTS * flops / rates.flash + tokens * backward / rates.memory,
    )


def scan_after_input(setup: Setup) -> tuple[Saved, ...]:
    """Return what a Mamba layer holds between dgrad and wgrad, without the input of its first matrix."""
    hybrid, per_width = _hybrid(setup), element_bytes(setup) * num_tokens(setup)
    return (
        Saved("input of Mamba's second matrix", shard_size(per_width * hybrid.inner_size, setup.tensor)),
        Saved("gradient of its first's output", shard_size(per_width * hybrid.projected_size, setup.tensor)),
        Saved("gradient behind the output projection", per_width * setup.model.hidden_size),
    )
