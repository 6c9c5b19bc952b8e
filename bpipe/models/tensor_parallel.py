"""Predict what tensor-parallel collectives add to a layer: what of them no product hides. In: a Setup. Out: `Exposed` seconds.

What Megatron and Transformer Engine do without being asked [1], and with `--tp-comm-overlap` [2]:
  [1] in a backward, the gradient of what enters a matrix behind a norm is scattered (without sequence parallelism: summed) while the
      product for that matrix's weights runs; with sequence parallelism that matrix's input is gathered again beside the product before.
      Everything else is waited for
  [2] what is gathered before a product or scattered behind it is cut into as many parts as there are ranks, and goes round part by part
      beside the product of the part before: one part's product hides nothing
Products are taken to be as fast beside a collective as alone, and in parts as whole. Knows no schedule.
"""

from __future__ import annotations

from typing import NamedTuple

from bpipe.models.layout import Setup
from bpipe.models.parts import LayerKind
from bpipe.models.products import layer_products
from bpipe.models.rates import LINK_LATENCY_S, Rates
from bpipe.models.sizes import element_bytes, num_tokens


class Exposed(NamedTuple):
    """Of one layer and micro-batch, in seconds: of a forward, of a whole backward, and of the first half of a split one.

    A backward that recomputes its layer has a forward's in it, too.
    """

    forward_s: float
    backward_s: float
    input_half_s: float


def gather_s(setup: Setup) -> float:
    """To gather over the tensor-parallel ranks what each has a part of, or scatter the sum; a sum that all keep takes twice as long."""
    if setup.tensor == 1:
        return 0.0
    gathered = gathered_bytes(setup)
    measured = None if setup.cluster.kernels is None else setup.cluster.kernels.gather_s(setup.tensor, gathered)
    return gathered * (setup.tensor - 1) / setup.tensor / Rates.of(setup).link + LINK_LATENCY_S if measured is None else measured


def gathered_bytes(setup: Setup) -> int:
    """What each has in the end."""
    return element_bytes(setup) * num_tokens(setup) * setup.model.hidden_size


def exposed(setup: Setup, kind: LayerKind | None = None) -> Exposed:
    """What is waited for. Experts without shared ones gather nothing over tensor-parallel ranks but what `expert_parallel` counts."""
    if setup.tensor == 1:
        return Exposed(0.0, 0.0, 0.0)
    kind = setup.model.kind(0) if kind is None else kind
    one, layer = gather_s(setup), layer_products(setup, kind)
    behind_norms, returning = [layer.query_key_value, layer.first], [layer.projection, layer.second]
    if kind.experts and setup.model.experts and not setup.model.experts.shared_size:
        del behind_norms[1], returning[1]
    if not setup.sequence_parallel:
        # Two sums each way.
        backward, half = sum(max(0.0, 2 * one - product.weight_s) for product in behind_norms), 4 * one
        forward = 4 * one
    else:
        cut = setup.switches.tp_comm_overlap
        # [2] of all products, and in a backward of those whose gradients are gathered first.
        forward, gathered = (
            sum(_beside_parts(one, product_s, setup.tensor) if cut else one for product_s in products_s)
            for products_s in ([product.forward_s for product in (*behind_norms, *returning)], [product.input_s for product in returning])
        )
        # [1] beside the product for the weights, and beside the one for the input.
        beside = [product_s for product in behind_norms for product_s in (product.weight_s, product.input_s)]
        backward = gathered + sum(max(0.0, one - product_s) for product_s in beside)
        half = gathered + len(behind_norms) * one
    again = forward if setup.recompute == "full" else 0.0
    return Exposed(forward, backward + again, half + again)


def _beside_parts(collective_s: float, product_s: float, parts: int) -> float:
    """What a collective in a ring adds to a product that is cut into as many parts: each but one part's passes beside a part's product."""
    return max(0.0, collective_s - product_s * (parts - 1) / parts)
