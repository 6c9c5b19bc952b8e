"""Say which kernels a rank of a model computes.

In: setups of its micro-batch sizes. Out: `KernelShapes`, for whoever measures them.

Of a layer and of the output layer, with all their products, the attention core and what is gathered over
tensor-parallel ranks. Knows no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bpipe.models.layout import Setup
from bpipe.models.parts import LayerKind
from bpipe.models.products import layer_matrices, product_sizes
from bpipe.models.sizes import num_tokens
from bpipe.models.tensor_parallel import gathered_bytes


class KernelShapes(NamedTuple):
    """Sizes as `KernelTimes` has them, each once, in order."""

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[str, int, int, int], ...]
    gathers: tuple[tuple[int, int], ...]


def kernel_shapes(setups: Sequence[Setup]) -> KernelShapes:
    """Return the kernel shapes of one rank of each setup."""
    products: dict[tuple[int, int, int], None] = {}
    for setup in setups:
        kinds = dict.fromkeys(kind.symbol for kind, _ in setup.model.kinds())
        matrices = (one for symbol in kinds for one in layer_matrices(setup, LayerKind(symbol=symbol)))
        for inputs, outputs in (*matrices, (setup.model.hidden_size, setup.padded_vocabulary / setup.tensor)):
            for rows, columns, terms, _ in product_sizes(num_tokens(setup), inputs, outputs):
                products[int(rows), int(columns), int(terms)] = None
    model = setups[0].model
    cores = (setup for setup in setups if setup.context == 1 or setup.cp_comm_type == "a2a")
    attention = {
        (
            one.attention,
            one.micro_batch * model.num_attention_heads // (one.tensor * one.context),
            one.sequence,
            model.kv_channels,
        ): None
        for one in cores
    }
    gathers = {(setup.tensor, gathered_bytes(setup)): None for setup in setups if setup.tensor > 1}
    return KernelShapes(tuple(sorted(products)), tuple(sorted(attention)), tuple(sorted(gathers)))
