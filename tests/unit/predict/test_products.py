"""Seconds of products of matrices: whole waves of tiles, beside an obvious count of them, and what follows for
shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import matrix_products
from bpipe.predict.model import PRESETS
from bpipe.predict.sizes import Rates

SETUP = Setup(PRESETS["gpt3-96b"], parse_cluster("a100-80g:4x8"), 4, 8, 2, 128, 2048, (10,) * 8)


def test_nothing_is_rounded_up_where_multiprocessors_are_unknown() -> None:
    device = replace(SETUP.cluster.device, num_processors=None)
    setup = replace(SETUP, cluster=replace(SETUP.cluster, device=device))
    rates = Rates.of(setup)
    assert matrix_products(setup, 1000, 3000).forward_s == pytest.approx(
        4096 * 3000 * (2 * 1000 / rates.products + 2 / rates.memory)
    )
