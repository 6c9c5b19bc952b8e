"""Exposed seconds of tensor-parallel collectives, compared with a clock that steps through a layer's products and
collectives."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as every

import pytest

from bpipe.predict.cluster import Cluster, parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import HIDDEN_SHARE, exposed, gather_s, layer_products, matrix_products
from bpipe.predict.model import PRESETS
from bpipe.predict.sizes import Rates
from bpipe.predict.training import Switches

LLAMA = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 8, 1, 32, 8192, (10,) * 8, recompute="none")
OVERLAP = replace(LLAMA, switches=Switches(tp_comm_overlap=True))


def with_link(setup: Setup, bytes_per_s: float) -> Setup:
    """Return the setup with a link of this speed: slow ones are exposed, fast ones are hidden by products."""
    cluster = setup.cluster
    return replace(
        setup,
        cluster=Cluster(
            replace(cluster.device, inside_bytes_per_s=bytes_per_s), cluster.num_nodes, cluster.devices_per_node
        ),
    )


def together(collective_s: float, product_s: float) -> float:
    """Both start at once, and while the collective runs, the product does only a share of its work."""
    slowed = 1 - HIDDEN_SHARE
    if product_s <= slowed * collective_s:
        return collective_s
    return collective_s + product_s - slowed * collective_s


def ring(collective_s: float, product_s: float, parts: int) -> float:
    """Seconds of a ring: each part arrives during the product of the part before; the first one is already there."""
    clock = 0.0
    for part in range(parts):
        clock += together(collective_s / (parts - 1) if part < parts - 1 else 0.0, product_s / parts)
    return clock


def clocked(setup: Setup) -> tuple[float, float]:
    """A layer's exposed seconds, forward and backward, on two streams: until all ends, less the products alone."""
    gather, parts, cut = gather_s(setup), setup.tensor, setup.switches.tp_comm_overlap
    layer = layer_products(setup)
    forward = backward = 0.0
    for matrix in (*layer.entering, *layer.returning):
        seconds = matrix.forward_s
        forward += (ring(gather, seconds, parts) if cut else gather + seconds) if setup.sequence_parallel else seconds
    if not setup.sequence_parallel:
        # An all-reduce after the projection and after the MLP.
        forward += 2 * 2 * gather
    for matrix in reversed(layer.returning):
        # The gradient is gathered, then goes through both products.
        seconds = matrix.input_s
        backward += (ring(gather, seconds, parts) if cut else gather + seconds) if setup.sequence_parallel else seconds
        backward += matrix.weight_s
    for matrix in reversed(layer.entering):
        if setup.sequence_parallel:
            # The input is gathered during the first product, its gradient is scattered during the second.
            backward += together(gather, matrix.input_s) + together(gather, matrix.weight_s)
        else:
            backward += matrix.input_s + together(2 * gather, matrix.weight_s)
    alone = layer.total()
    return forward - alone.forward_s, backward - alone.input_s - alone.weight_s


@pytest.mark.parametrize(
    ("overlap", "sequence_parallel", "speed", "tensor"),
    [
        case
        for case in every((False, True), (False, True), (1e9, 3e10, 1e11, 4.5e11, 1e13), (2, 4, 8))
        if not (case[0] and not case[1])
    ],
)
def test_exposed_seconds_equal_a_clock_of_two_streams(
    overlap: bool, sequence_parallel: bool, speed: float, tensor: int
) -> None:
    setup = with_link(replace(OVERLAP if overlap else LLAMA, sequence_parallel=sequence_parallel, tensor=tensor), speed)
    assert exposed(setup)[:2] == pytest.approx(clocked(setup))


def test_nothing_is_rounded_up_where_multiprocessors_are_unknown() -> None:
    device = replace(LLAMA.cluster.device, num_processors=None)
    setup = replace(LLAMA, cluster=replace(LLAMA.cluster, device=device))
    rates = Rates.of(setup)
    assert matrix_products(setup, 1000, 3000).forward_s == pytest.approx(
        8192 * 3000 * (2 * 1000 / rates.products + 2 / rates.memory)
    )
