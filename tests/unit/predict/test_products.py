"""Seconds of products of matrices: whole waves of tiles, beside an obvious count of them, and what follows for
shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from bpipe.predict.cluster import DEVICES, parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.matmul import TILES, layer_products, matrix_products
from bpipe.predict.model import PRESETS
from bpipe.predict.parameters import layer_parameters
from bpipe.predict.rates import Rates

SETUP = Setup(PRESETS["gpt3-96b"], parse_cluster("a100-80g:4x8"), 4, 8, 2, 128, 2048, (10,) * 8)


def counted(setup: Setup, rows: int, columns: int, inner: int, written_bytes: int) -> float:
    """Hand out tile after tile, as many at a time as there are multiprocessors."""
    device, rates = setup.cluster.device, Rates.of(setup)
    assert device.num_processors is not None
    best = float("inf")
    for high, wide, share in TILES:
        tiles = sum(1 for _ in range(0, rows, high) for _ in range(0, columns, wide))
        waves = next(number for number in count() if number * device.num_processors >= tiles)
        flops_s = share * rates.products / device.num_processors
        bytes_s = rates.memory / device.num_processors
        best = min(best, waves * (2 * high * wide * inner / flops_s + high * wide * written_bytes / bytes_s))
    return best


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("inputs", "outputs"), [(9984, 7488), (2496, 9984), (128, 128), (12800, 25600), (1, 1)])
def test_as_counted_tile_by_tile(device: str, inputs: int, outputs: int) -> None:
    setup = replace(SETUP, cluster=parse_cluster(f"{device}:4x8"))
    tokens = 2 * 2048
    expected = (
        counted(setup, tokens, outputs, inputs, 2),
        counted(setup, tokens, inputs, outputs, 2),
        # What adding up reads and writes is the layer's.
        counted(setup, inputs, outputs, tokens, 0),
    )
    assert matrix_products(setup, inputs, outputs) == pytest.approx(expected)


def test_a_wave_is_paid_for_whole() -> None:
    """4096 tokens by 128 features are 16 tiles of 256 rows: 108 multiprocessors compute 6 times as many at once, and
    not one more."""
    within, beyond = (matrix_products(SETUP, 4096, columns).forward_s for columns in (6 * 128, 6 * 128 + 1))
    assert beyond > 1.05 * within
    assert matrix_products(SETUP, 4096, 5 * 128).forward_s == pytest.approx(within)


def test_wide_models_reach_more_of_the_peak_than_narrow_ones_do() -> None:
    """Of the four models of Korthikanti et al. 2022, 8 tensor-parallel ranks: what narrow ones lose stays the wider
    ones' gain."""
    reached = []
    for hidden, heads, micro_batch in ((6144, 64, 4), (12288, 96, 1), (20480, 128, 1), (25600, 160, 1)):
        model = replace(
            PRESETS["gpt3-175b"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=heads,
            ffn_hidden_size=4 * hidden,
        )
        setup = replace(
            SETUP,
            model=model,
            tensor=8,
            micro_batch=micro_batch,
            layers=(12,) * 8,
            cluster=parse_cluster("a100-80g:8x8"),
        )
        flops = 2 * micro_batch * 2048 * layer_parameters(model).matrices / 8
        reached.append(3 * flops / sum(layer_products(setup).total()) / setup.cluster.device.peak_flops_per_s)
    assert 0.6 < max(reached[:2]) < min(reached[2:]) < 0.77


def test_nothing_is_rounded_up_where_multiprocessors_are_unknown() -> None:
    device = replace(SETUP.cluster.device, num_processors=None)
    setup = replace(SETUP, cluster=replace(SETUP.cluster, device=device))
    rates = Rates.of(setup)
    assert matrix_products(setup, 1000, 3000).forward_s == pytest.approx(
        4096 * 3000 * (2 * 1000 / rates.products + 2 / rates.memory)
    )
