"""Seconds of products of matrices, and of the collectives that they do not hide.

A device computes a product in tiles of its result, one per multiprocessor, in waves of as many tiles as there are
multiprocessors; the last wave takes as long as a full one. A tile takes the time of its sum and of writing it. So
products of some shapes reach a much smaller share of the peak [1], and wide models train at more FLOP/s than narrow
ones.
  [1] NVIDIA, Matrix Multiplication Background User's Guide, 2.3 and 3

Collectives of tensor parallelism partly hide behind products. Megatron and Transformer Engine overlap without being asked
[2], and with `--tp-comm-overlap` [3]:
  [2] In a backward, the gradient of the input of a matrix after a norm is scattered (without sequence parallelism: summed)
      during the product for that matrix's weights; with sequence parallelism that input is gathered again during the product
      before. Everything else is waited for.
  [3] What is gathered before a product or scattered after it is cut into one part per rank, and each part passes during the
      product of the part before: one part's product hides nothing.
Hiding is not free: meanwhile a product loses `HIDDEN_SHARE` of its speed to the collective. Products are taken to be as
fast in parts as whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import NamedTuple

from bpipe.predict.exchanges import routed_tokens
from bpipe.predict.layer_variants import Latent, LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.recompute import LayerScope
from bpipe.predict.sizes import LINK_LATENCY_S, Rates, element_bytes, num_tokens

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


# Collectives take multiprocessors and bandwidth of memory from concurrent products. Lee et al. 2025 (Characterizing
# Compute-Communication Overlap, arXiv 2507.03114) trained models of five sizes on A100s, H100s, MI210s and MI250s: on
# average computations were 18.9 % slower while they were overlapped, and a run without overlap 10.2 % longer. So what
# was hidden took 1.189 * 1.102 - 1 = 31 % of the computations' own time, and cost 0.189 / 0.310 of that. The published
# runs of docs/validation.md agree: of 0.4 to 0.75 their mean error is least from 0.5 to 0.65.
HIDDEN_SHARE = 0.60


class Exposed(NamedTuple):
    """Exposed tensor-parallel seconds of one layer and micro-batch."""

    forward_s: float
    backward_s: float
    """With the forward of what is recomputed."""
    input_half_s: float
    """Of the dgrad of a split backward."""


def gather_s(setup: Setup, low: bool = False) -> float:
    """Return seconds of a gather or scatter; an all-reduce takes twice that. `low`: in FP8 if that is on."""
    if setup.tensor == 1:
        return 0.0
    gathered = element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size
    if low and setup.fp8 is not None:
        gathered = ceil(gathered * setup.fp8.value_bytes / element_bytes(setup))
    return gathered * (setup.tensor - 1) / setup.tensor / Rates.of(setup).link + LINK_LATENCY_S


def exposed(setup: Setup, kind: LayerKind | None = None, scope: LayerScope | None = None) -> Exposed:
    """Return exposed seconds of a layer (default: the first), without those of routed experts."""
    if setup.tensor == 1:
        return Exposed(0.0, 0.0, 0.0)
    kind = setup.model.kind(0) if kind is None else kind
    scope = setup.recomputed.scope(0) if scope is None else scope
    hop, gather, layer = gather_s(setup), gather_s(setup, low=True), layer_products(setup, kind)
    behind_norms, returning = list(layer.entering), list(layer.returning)
    if kind.experts and setup.model.experts and not setup.model.experts.shared_size:
        del behind_norms[-1], returning[-1]
    if setup.sequence_parallel:
        waits = _of_gathers(setup, behind_norms, returning, hop, gather)
    else:
        # Of each part a sum each way.
        sums_s = 2 * kind.num_parts * hop
        waits = Exposed(sums_s, sum(_beside(2 * hop, product.weight_s) for product in behind_norms), sums_s)
    again = _again_s(setup, kind, scope, hop, gather, layer, waits.forward_s)
    return Exposed(waits.forward_s, waits.backward_s + again, waits.input_half_s + again)


def _of_gathers(
    setup: Setup, behind_norms: Sequence[Products], returning: Sequence[Products], hop: float, gather: float
) -> Exposed:
    """Exposed seconds with sequence parallelism, without recomputation."""
    # [3] of all products, and in a backward of those whose gradients are gathered first.
    entering = [(gather, product.forward_s) for product in behind_norms]
    leaving = [(hop, product.forward_s) for product in returning]
    gathered = _passing(setup, [(gather, product.input_s) for product in returning])
    # [2] during the product for the weights, and during the one for the input.
    beside = [pair for product in behind_norms for pair in ((hop, product.weight_s), (gather, product.input_s))]
    backward = gathered + sum(_beside(seconds, product_s) for seconds, product_s in beside)
    return Exposed(_passing(setup, [*entering, *leaving]), backward, gathered + len(behind_norms) * hop)


def _again_s(
    setup: Setup, kind: LayerKind, scope: LayerScope, hop: float, gather: float, layer: Layer, forward: float
) -> float:
    """Exposed seconds of recomputed parts' forwards: gathers before products, scatters after them."""
    if scope.whole:
        return forward
    shares = kind.experts and setup.model.experts is not None and setup.model.experts.shared_size
    mlp = kind.has_mlp and scope.modules & ({"moe", "shared_experts"} if kind.experts else {"mlp"})
    products = [layer.entering[-1], layer.returning[-1]] if mlp and (shares or not kind.experts) else []
    if not setup.sequence_parallel:
        # One sum after the second product, which takes as long as a gather and a scatter.
        return hop * len(products)
    pairs = list(zip((gather, hop), (product.forward_s for product in products), strict=False))
    pairs += [(gather, layer.entering[0].forward_s)] if "mla_up_proj" in scope.modules else []
    return _passing(setup, pairs)


def _passing(setup: Setup, pairs: Sequence[tuple[float, float]]) -> float:
    """Exposed seconds of collectives before or after products: [3] for all of them, if switched on."""
    if not setup.switches.tp_comm_overlap:
        return sum(seconds for seconds, _ in pairs)
    # All parts but one pass during a part's product.
    return sum(_beside(seconds, product_s * (setup.tensor - 1) / setup.tensor) for seconds, product_s in pairs)


def _beside(collective_s: float, product_s: float) -> float:
    """What a collective adds to a concurrent product: a share of its time, or by what it outlasts the product."""
    return max(HIDDEN_SHARE * collective_s, collective_s - product_s)
