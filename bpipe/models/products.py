"""Predict how long a product of matrices takes. In: a Setup and sizes. Out: seconds. Knows no layer.

A device computes a product in tiles of its result, one a multiprocessor, in waves of as many as there are multiprocessors; the last wave
takes as long as a full one. A tile's time is that of its sum, and of writing it down, while nothing else is computed there. This is why
products of one shape reach much less of the peak than those of another [1], and why wide models train at more FLOP/s than narrow ones.
  [1] NVIDIA, Matrix Multiplication Background User's Guide, 2.3 and 3
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from bpipe.models.layout import Setup
from bpipe.models.rates import Rates
from bpipe.models.saved import element_bytes, num_tokens

# Rows and columns, and what it reaches of the largest's rate: the smaller reads more for every result it computes. cuBLAS has smaller
# ones still, for products that do not fill a device.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))


class Products(NamedTuple):
    """Seconds of one matrix's products: with its input, and backward the gradients of its input and of its weights."""

    forward_s: float
    input_s: float
    weight_s: float


def matrix_products(setup: Setup, inputs: float, outputs: float) -> Products:
    """All tokens of a micro-batch through a matrix of this rank, so many features in and out.

    What adding up the gradients of its weights reads and writes is not in it.
    """
    tokens, written = num_tokens(setup), element_bytes(setup)
    rates = Rates.of(setup)
    processors = setup.cluster.device.num_processors
    return Products(
        _seconds(rates, processors, tokens, outputs, inputs, written),
        _seconds(rates, processors, tokens, inputs, outputs, written),
        _seconds(rates, processors, inputs, outputs, tokens, 0),
    )


class Layer(NamedTuple):
    """The products of a layer's four matrices."""

    query_key_value: Products
    projection: Products
    first: Products
    second: Products

    def total(self) -> Products:
        return Products(*map(sum, zip(*self, strict=True)))


def layer_products(setup: Setup) -> Layer:
    """Of two matrices behind the norms, whose outputs are split over tensor-parallel ranks, and two that return, whose inputs are."""
    model, t = setup.model, setup.tensor
    hidden = model.hidden_size
    return Layer(
        matrix_products(setup, hidden, (model.query_size + model.key_value_size) / t),
        matrix_products(setup, model.query_size / t, hidden),
        matrix_products(setup, hidden, model.first_mlp_size / t),
        matrix_products(setup, model.ffn_hidden_size / t, hidden),
    )


@cache
def _seconds(rates: Rates, processors: int | None, rows: float, columns: float, inner: float, written_bytes: int) -> float:
    """A product with a result of rows and columns, each a sum of `inner` products; `written_bytes` for each."""
    written = written_bytes / rates.memory
    if processors is None:
        return rows * columns * (2 * inner / rates.products + written)
    return min(
        -(-(-(-rows // high) * -(-columns // wide)) // processors)
        * processors
        * high
        * wide
        * (2 * inner / (share * rates.products) + written)
        for high, wide, share in TILES
    )
