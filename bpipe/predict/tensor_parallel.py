"""Seconds that tensor-parallel collectives add to a layer beyond what products hide.

Megatron and Transformer Engine overlap without being asked [1], and with `--tp-comm-overlap` [2]:
  [1] In a backward, the gradient of the input of a matrix after a norm is scattered (without sequence parallelism: summed)
      during the product for that matrix's weights; with sequence parallelism that input is gathered again during the product
      before. Everything else is waited for.
  [2] What is gathered before a product or scattered after it is cut into one part per rank, and each part passes during the
      product of the part before: one part's product hides nothing.
Hiding is not free: meanwhile a product loses `HIDDEN_SHARE` of its speed to the collective. Products are taken to be as
fast in parts as whole.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from bpipe.predict.layer_variants import LayerKind
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import Layer, Products, layer_products
from bpipe.predict.recompute import LayerScope
from bpipe.predict.sizes import LINK_LATENCY_S, Rates, element_bytes, num_tokens

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
    # [2] of all products, and in a backward of those whose gradients are gathered first.
    entering = [(gather, product.forward_s) for product in behind_norms]
    leaving = [(hop, product.forward_s) for product in returning]
    gathered = _passing(setup, [(gather, product.input_s) for product in returning])
    # [1] during the product for the weights, and during the one for the input.
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
    """Exposed seconds of collectives before or after products: [2] for all of them, if switched on."""
    if not setup.switches.tp_comm_overlap:
        return sum(seconds for seconds, _ in pairs)
    # All parts but one pass during a part's product.
    return sum(_beside(seconds, product_s * (setup.tensor - 1) / setup.tensor) for seconds, product_s in pairs)


def _beside(collective_s: float, product_s: float) -> float:
    """What a collective adds to a concurrent product: a share of its time, or by what it outlasts the product."""
    return max(HIDDEN_SHARE * collective_s, collective_s - product_s)
