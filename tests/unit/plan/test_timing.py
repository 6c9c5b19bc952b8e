"""Times of many micro-batches, continued from the first ones, compared with simulations of all."""

from __future__ import annotations

from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.plan.predict import costs_of, simulation_of, steady_timing, timing_within, whole_timing
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS


def large(schedule: str, chunks: int, pipeline: int = 4, **changes: Any) -> Setup:
    """Llama 3 8B on pipeline ranks of 8 devices, each on a node of its own, so that transfers are slow."""
    layers, batch = (32 // (pipeline * chunks),) * pipeline * chunks, changes.pop("global_batch", 170)
    return Setup(
        *(PRESETS["llama3-8b"], parse_cluster("h100-80g:4x8"), 8, pipeline, 1, batch, 4096, layers, "none"),
        schedule=schedule,
        num_chunks=chunks,
        **changes,
    )


@pytest.mark.parametrize(
    ("schedule", "chunks", "pipeline", "batch"),
    [("gpipe", 1, 4, 101), ("1f1b", 1, 8, 150), ("interleaved-1f1b", 2, 4, 128), ("1f1b", 1, 4, 101)],
)
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_the_steady_phase_continued_is_the_whole(
    schedule: str, chunks: int, pipeline: int, batch: int, balance: str
) -> None:
    layers = (40 // (pipeline * chunks),) * pipeline * chunks
    setup = Setup(
        *(PRESETS["gpt3-13b"], parse_cluster(f"a100-80g:1x{pipeline}"), 1, pipeline, 1, batch, 2048, layers),
        schedule=schedule,
        num_chunks=chunks,
        balance=named_balance(balance),
    )
    whole, steady = whole_timing(simulation_of(setup)), steady_timing(setup, costs_of(setup))
    assert steady.iteration_s == pytest.approx(whole.iteration_s, rel=1e-9)
    assert steady.bubble_of_makespan == pytest.approx(whole.bubble_of_makespan, rel=1e-6)


# Schedule, chunks and other choices.
REPEATED: list[Any] = [
    ("1f1b", 1, {}),
    ("1f1b", 1, {"balance": BalanceConfig()}),
    ("interleaved-1f1b", 4, {"global_batch": 168}),
    ("grouped-interleaved", 2, {"group_size": 4, "balance": BalanceConfig()}),
    ("1f1b-split", 1, {"slices": 4}),
    ("v-half", 2, {}),
    ("zb-v", 2, {}),
    ("combined-1f1b", 4, {"global_batch": 168, "balance": BalanceConfig()}),
    ("bitpipe", 2, {"global_batch": 168}),
]


def test_what_never_repeats_exactly_is_continued_once_it_adds_evenly() -> None:
    """A first rank that is a little faster than the slowest runs ahead of it for hundreds of micro-batches."""
    setup = large("zb-h1", 1, global_batch=1024, balance=BalanceConfig())
    timing, whole = steady_timing(setup, costs_of(setup)), whole_timing(simulation_of(setup))
    assert 8 * 4 < timing.simulated < 40 * 4
    assert timing.iteration_s == pytest.approx(whole.iteration_s, rel=1e-3)


def test_what_the_first_simulation_tells_to_be_too_long_is_that() -> None:
    """A search stops timing a setup that cannot be among the fastest."""
    num_too_long = 0
    for schedule, chunks, changes in REPEATED:
        setup = large(schedule, chunks, **changes)
        costs = costs_of(setup)
        whole = steady_timing(setup, costs)
        assert timing_within(setup, costs, whole.iteration_s) == whole
        num_too_long += timing_within(setup, costs, 0.9 * whole.iteration_s) is None
    assert num_too_long
