"""The fewest layers to recompute: found by bisection, and in a search the same as by trying all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpipe.plan.search import search
from bpipe.plan.space import Space, fewest_layers, with_block
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import gpt
from bpipe.predict.recompute import BLOCK
from bpipe.schedule.families.families import SEARCHED

SMALL = Space(
    gpt("small", 16, 8192, 64, sequence=4096), parse_cluster("a100-80g:8"), 32, 4096, recompute=("none", "full", BLOCK), max_chunks=4,
    max_micro_batch=2, schedules=("1f1b",),
)  # fmt: skip


@given(st.integers(0, 40), st.integers(1, 60))
def test_the_fewest_that_are_enough(most: int, enough: int) -> None:
    counts: list[int] = []

    def is_enough(count: int) -> bool:
        counts.append(count)
        return count >= enough

    assert fewest_layers(most, is_enough) == (enough if enough <= most else None)
    assert len(counts) <= 1 + most.bit_length()


@pytest.mark.parametrize("schedules", [("1f1b",), ("interleaved-1f1b", "grouped-interleaved"), ("zb-h1", "chimera")])
@pytest.mark.parametrize("balances", [("none",), ("none", "bpipe")])
def test_a_search_finds_what_trying_every_number_finds(schedules: tuple[str, ...], balances: tuple[str, ...]) -> None:
    assert set(schedules) < set(SEARCHED)
    space = replace(SMALL, schedules=schedules, balances=balances)
    full_space = replace(space, recompute=("none", "full", *(f"full:block:{number}" for number in range(1, 17))))
    chosen, tried = search(space, num_rows=3), search(full_space, num_rows=3)
    assert chosen.rows[0].iteration_s == tried.rows[0].iteration_s
    assert all(row.fits for row in chosen.rows)
    assert chosen.num_fitting <= tried.num_fitting, "of each configuration one"


def test_one_layer_fewer_would_not_fit() -> None:
    rows = search(SMALL, num_rows=30).rows
    blocks = [row.setup for row in rows if row.setup.recomputed.method == "block"]
    assert blocks
    for setup in blocks:
        number = setup.recomputed.num_layers
        assert number < max(setup.layers)
        fewer = with_block(setup, number - 1) if number > 1 else replace(setup, recompute="none")
        assert not all(rank.fits for rank in predict_memory(fewer))
