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
    rates, kernels = Rates.of(setup), setup.cluster.kernels
    processors = setup.cluster.device.num_processors
    found = []
    for rows, columns, terms, ends_here in product_sizes(tokens, inputs, outputs):
        measured = None if kernels is None else kernels.product_s(rows, columns, terms)
        if measured is None:
            found.append(_seconds(rates, processors, rows, columns, terms, written * ends_here))
        else:
            # It was written down when it was measured.
            found.append(measured if ends_here else max(0.0, measured - rows * columns * written / rates.memory))
    return Products(*found)


def product_sizes(tokens: int, inputs: float, outputs: float) -> tuple[tuple[float, float, float, bool], ...]:
    """Rows, columns and terms of a matrix's three products, as `Products` has them; and whether the result is written down by itself.

    Gradients of weights are added to what there is.
    """
    return (tokens, outputs, inputs, True), (tokens, inputs, outputs, True), (inputs, outputs, tokens, False)


class Layer(NamedTuple):
    """The products of a layer's four matrices."""

    query_key_value: Products
    projection: Products
    first: Products
    second: Products

    def total(self) -> Products:
        return Products(*map(sum, zip(*self, strict=True)))


def layer_matrices(setup: Setup) -> tuple[tuple[float, float], ...]:
    """Features in and out of this rank's part of a layer's matrices, in the order of `Layer`.

    Of two behind the norms outputs are split over tensor-parallel ranks, of two that return inputs are.
    """
    model, t = setup.model, setup.tensor
    hidden = model.hidden_size
    return (
        (hidden, (model.query_size + model.key_value_size) / t),
        (model.query_size / t, hidden),
        (hidden, model.first_mlp_size / t),
        (model.ffn_hidden_size / t, hidden),
    )


def layer_products(setup: Setup) -> Layer:
    return Layer(*(matrix_products(setup, inputs, outputs) for inputs, outputs in layer_matrices(setup)))


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
