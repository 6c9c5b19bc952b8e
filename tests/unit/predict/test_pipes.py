"""Two pipes in the models: two copies of weights and gradients a pipeline, one optimizer state, where ranks lie,
what they reduce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.plan.bounds import lower_bound_s
from bpipe.plan.predict import costs_of, simulation_of
from bpipe.plan.timing import steady_timing, whole_timing
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS
from bpipe.predict.nodes import rank_nodes, replicas_share_nodes
from bpipe.predict.replicas import update_seconds
from bpipe.predict.states import rank_parameters, stage_parameters
from bpipe.predict.switches import Switches
from bpipe.predict.temporaries import working_bytes
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.hosts import halved_pairs
from bpipe.schedule.memory import moves_anything

MODEL = replace(PRESETS["gpt3-13b"], num_layers=32)
TWO_PIPES = [("chimera", 1), ("mixpipe", 1), ("bitpipe", 2), ("bitpipe", 4)]


def setup(schedule: str = "chimera", chunks: int = 1, cluster: str = "a100-80g:1x8", **changes: Any) -> Setup:
    pipeline = changes.pop("pipeline", 8)
    layers = split_layers(MODEL.num_layers, pipeline * chunks)
    assert layers is not None
    sizes = {
        "tensor": 1,
        "pipeline": pipeline,
        "micro_batch": 1,
        "global_batch": 16,
        "sequence": 2048,
        "layers": layers,
    }
    return Setup(MODEL, parse_cluster(cluster), **{**sizes, "schedule": schedule, "num_chunks": chunks, **changes})


def test_a_rank_has_the_stages_of_both_pipes_and_a_half_of_the_optimizer_state_of_each() -> None:
    one, two = setup("1f1b"), setup("chimera")
    assert stage_parameters(two) == stage_parameters(one) == rank_parameters(one)
    mirrored = tuple(
        mine + other for mine, other in zip(rank_parameters(one), reversed(rank_parameters(one)), strict=True)
    )
    assert rank_parameters(two) == mirrored
    alone, beside = predict_memory(one), predict_memory(two)
    for rank, (before, after) in enumerate(zip(alone, beside, strict=True)):
        other = alone[7 - rank]
        assert after.weights_bytes == before.weights_bytes + other.weights_bytes
        assert after.gradients_bytes == before.gradients_bytes + other.gradients_bytes
        assert after.optimizer_bytes == (before.optimizer_bytes + other.optimizer_bytes) / 2, "sharded over the pair"
    whole = predict_memory(setup("chimera", distributed_optimizer=False))
    assert [rank.optimizer_bytes for rank in whole] == [2 * rank.optimizer_bytes for rank in beside]
    # Both ends have an embedding, an output layer and its loss.
    assert [size == working_bytes(two)[0] for size in working_bytes(two)] == [True, *[False] * 6, True]


def test_data_parallelism_counts_pipelines_and_each_has_two_replicas() -> None:
    two = setup(cluster="a100-80g:2x8", global_batch=32)
    assert (two.data, two.replicas, two.num_microbatches) == (2, 4, 16)
    assert setup("1f1b", cluster="a100-80g:2x8", global_batch=32).replicas == 2


def test_mirror_images_lie_beside_each_other() -> None:
    """To Megatron it is a pipeline of four, whose last rank has the embedding and the loss; replicas are inside of
    it."""
    assert rank_nodes(setup(cluster="a100-80g:4x2")) == (3, 2, 1, 0, 0, 1, 2, 3)
    assert replicas_share_nodes(setup(cluster="a100-80g:4x2"))
    assert rank_nodes(setup("1f1b", cluster="a100-80g:4x2")) == (0, 0, 1, 1, 2, 2, 3, 3)
    # With twice as many pipelines a node has one stage's four replicas, or, where it is smaller, only the pair's two.
    assert replicas_share_nodes(setup(cluster="a100-80g:4x4", global_batch=32))
    assert not replicas_share_nodes(setup(cluster="a100-80g:8x2", global_batch=32))
    assert rank_nodes(setup(cluster="a100-80g:8x2", global_batch=32)) == (6, 4, 2, 0, 0, 2, 4, 6)
    # Devices of a tensor-parallel group stay together.
    assert rank_nodes(setup(cluster="a100-80g:2x8", tensor=2)) == (1, 1, 0, 0, 0, 0, 1, 1)


def test_what_two_pipes_cannot_take_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"chimera has 2 pipes, which need equal shares of the 15 micro-batches: use a global batch that is",
    ):
        setup(global_batch=15)
    with pytest.raises(ValueError, match=r"two pipes need an even number of ranks, not 1"):
        setup(pipeline=1)


def test_pairs_reduce_what_one_pipeline_alone_would_not() -> None:
    """32-bit gradients are scattered, half of them to each, and 16-bit weights gathered: lazily together, eagerly
    with the update."""
    assert all(reduction == 0 for reduction, _ in update_seconds(setup("1f1b")))
    lazy, eager = update_seconds(setup()), update_seconds(setup(switches=Switches(overlap_grad_reduce=True)))
    assert all(one > 0 for one, _ in lazy)
    for (reduced, updated), (scattered, gathered) in zip(lazy, eager, strict=True):
        assert scattered == pytest.approx(2 / 3 * reduced)
        assert scattered + gathered == pytest.approx(reduced + updated)
    for name, v in TWO_PIPES[1:]:
        times = [
            simulation_of(setup(name, v, switches=Switches(overlap_grad_reduce=overlap))) for overlap in (False, True)
        ]
        assert times[1].exposed_reduction_s < times[0].exposed_reduction_s
        assert times[1].makespan_s < times[0].makespan_s
        assert times[1].pipeline_s == times[0].pipeline_s


def test_hosts_are_in_the_same_half_wherever_anything_moves() -> None:
    """What costs take for granted is what the balancing pass does."""
    moved = 0
    for name in (name for name, family in FAMILIES.items() if family.num_pipes > 1):
        v = FAMILIES[name].min_chunks
        for p in (4, 8, 12, 16):
            for rounds in (1, 2):
                schedule = build(ScheduleConfig(name, p, rounds * p, num_chunks=v, balance=BalanceConfig()))
                if moves_anything(schedule):
                    moved += 1
                    assert schedule.partners == halved_pairs(p), (name, p, rounds)
    assert moved > 4
    assert predict_costs(setup("mixpipe", cluster="a100-80g:4x2", balance=EVENLY)).one_sided == frozenset()
    assert predict_costs(setup("mixpipe", balance=EVENLY)).one_sided == frozenset(range(8))


@pytest.mark.parametrize(("name", "v"), TWO_PIPES)
@pytest.mark.parametrize("balance", ["none", "bpipe"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_steady_phase_of_two_pipes_is_continued(name: str, v: int, balance: str, overlap: bool) -> None:
    mine = setup(
        name,
        v,
        global_batch=160,
        pipeline=4,
        cluster="a100-80g:1x4",
        balance=named_balance(balance),
        switches=Switches(overlap_grad_reduce=overlap),
    )
    whole, steady = whole_timing(simulation_of(mine)), steady_timing(mine, costs_of(mine))
    assert steady.simulated < 160
    assert steady.iteration_s == pytest.approx(whole.iteration_s, rel=1e-6)
    assert steady.bubble_of_makespan == pytest.approx(whole.bubble_of_makespan, rel=1e-5)
    assert lower_bound_s(mine) <= whole.iteration_s
