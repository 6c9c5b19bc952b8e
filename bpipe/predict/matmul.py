"""Seconds of products of matrices.

A device computes a product in tiles of its result, one per multiprocessor, in waves of as many tiles as there are
multiprocessors; the last wave takes as long as a full one. A tile takes the time of its sum and of writing it. So
products of some shapes reach a much smaller share of the peak [1], and wide models train at more FLOP/s than narrow
ones.
  [1] NVIDIA, Matrix Multiplication Background User's Guide, 2.3 and 3
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from bpipe.predict.exchanges import routed_tokens
from bpipe.predict.layer_variants import Latent, LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.sizes import Rates, element_bytes, num_tokens

# Rows and columns, and what it reaches of the largest's rate: the smaller reads more for every result it computes.
# cuBLAS has smaller ones still, for products that do not fill a device.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.9))


class Products(NamedTuple):
    """Seconds of one matrix's products: with its input, and backward the gradients of its input and of its weights."""

    forward_s: float
    input_s: float
    weight_s: float


def matrix_products(
    setup: Setup, inputs: float, outputs: float, tokens: float | None = None, number: int = 1, in_layer: bool = False
) -> Products:
    """Return the products of a micro-batch's (or of `tokens`) with a rank's matrix, `number` of them at the same time.

    Reads and writes of weight gradients are not included. `in_layer`: whether the matrix may be in FP8.
    """
    tokens, written = num_tokens(setup) if tokens is None else tokens, element_bytes(setup)
    rates = Rates.of(setup)
    if in_layer and setup.fp8 is not None:
        rates = replace(rates, products=rates.low)
    processors = setup.cluster.device.num_processors
    # Gradients of weights are added to what there is.
    return Products(
        _seconds(rates, processors, tokens, outputs, inputs, written, number),
        _seconds(rates, processors, tokens, inputs, outputs, written, number),
        _seconds(rates, processors, inputs, outputs, tokens, 0, number),
    )


class Layer(NamedTuple):
    """The products of a layer's matrices: for each part one after a norm, and one that returns."""

    entering: tuple[Products, ...]
    returning: tuple[Products, ...]

    def total(self) -> Products:
        return _added(*(products for part in zip(self.entering, self.returning, strict=True) for products in part))


def _layer_matrices(setup: Setup, kind: LayerKind) -> tuple[tuple[float, float], ...]:
    """Return features in and out of this rank's share of each part's two matrices; an MLP's stand for experts."""
    model, t = setup.model, setup.tensor
    hidden = model.hidden_size
    if kind.is_mamba and model.hybrid is not None:
        return (hidden, model.hybrid.projected_size / t), (model.hybrid.inner_size / t, hidden)
    attention = (hidden, (model.query_size + model.key_value_size) / t), (model.value_size / t, hidden)
    mlp = (hidden, model.first_mlp_size / t), (model.ffn_hidden_size / t, hidden)
    return (*(attention if kind.attends else ()), *(mlp if kind.has_mlp else ()))


def layer_products(setup: Setup, kind: LayerKind | None = None) -> Layer:
    """Return a layer's products; those of a device's experts and shared experts are in place of the MLP's."""
    kind = setup.model.kind(0) if kind is None else kind
    products = [_of_layer(setup, inputs, outputs) for inputs, outputs in _layer_matrices(setup, kind)]
    if kind.experts:
        products[-2:] = _experts(setup)
    if setup.model.latent is not None:
        # Down projections are whole on every tensor-parallel rank, for its share of the sequence.
        latent, tokens = setup.model.latent, num_tokens(setup) / setup.sequence_shards
        down = _of_layer(setup, setup.model.hidden_size, latent.down_size, tokens)
        products[0] = _added(down, *latent_up_products(setup, latent))
    return Layer(tuple(products[::2]), tuple(products[1::2]))


def projection_products(setup: Setup) -> Products:
    """Return the products of the projection of hidden states joined to a further token's embedding."""
    hidden = setup.model.hidden_size
    return _of_layer(setup, 2 * hidden, hidden / setup.tensor)


def latent_up_products(setup: Setup, latent: Latent) -> tuple[Products, Products]:
    """Return the products of the up projections: to queries, and to keys and values."""
    model, t = setup.model, setup.tensor
    keys_and_values = model.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    return (
        _of_layer(setup, latent.q_lora_rank or model.hidden_size, model.query_size / t),
        _of_layer(setup, latent.kv_lora_rank, keys_and_values / t),
    )


def _experts(setup: Setup) -> tuple[Products, Products]:
    """The tiles of all experts of a device share its waves."""
    model, experts = setup.model, setup.model.experts
    assert experts is not None
    number = experts.num_experts // setup.routing.expert
    tokens, size = routed_tokens(setup) / number, experts.ffn_hidden_size / setup.expert_tensor
    gates = 2 if model.gated else 1
    first = _of_layer(setup, model.hidden_size, gates * size, tokens, number)
    second = _of_layer(setup, size, model.hidden_size, tokens, number)
    if not experts.shared_size:
        return first, second
    beside = shared_products(setup)
    return _added(first, beside[0]), _added(second, beside[1])


def shared_products(setup: Setup) -> tuple[Products, Products]:
    """Return the products of the shared experts, which must exist."""
    model, experts = setup.model, setup.model.experts
    assert experts is not None
    size = experts.shared_size / setup.tensor
    return _of_layer(setup, model.hidden_size, (2 if model.gated else 1) * size), _of_layer(
        setup, size, model.hidden_size
    )


def _of_layer(setup: Setup, inputs: float, outputs: float, tokens: float | None = None, number: int = 1) -> Products:
    return matrix_products(setup, inputs, outputs, tokens, number, in_layer=True)


def _added(*several: Products) -> Products:
    return Products(*map(sum, zip(*several, strict=True)))


@cache
def _seconds(
    rates: Rates, processors: int | None, rows: float, columns: float, inner: float, written_bytes: int, number: int
) -> float:
    """Seconds of `number` products, each result a sum of `inner` products and of `written_bytes`."""
    written = written_bytes / rates.memory
    if processors is None:
        return number * rows * columns * (2 * inner / rates.products + written)
    return min(
        -(-(number * -(-rows // high) * -(-columns // wide)) // processors)
        * processors
        * high
        * wide
        * (2 * inner / (share * rates.products) + written)
        for high, wide, share in TILES
    )
