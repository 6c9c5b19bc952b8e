"""Lay predictions of models with experts beside published throughputs.

In: tests/data/experts_throughput.csv. Out: rows with both.

Nothing is given but what the source says of the run: no time is measured, no constant is fitted. Needs no torch, writes
nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from bpipe.plan.predict import costs_of
from bpipe.plan.timing import steady_timing
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.flops import training_flops
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layer_variants import Experts, Latent, Routing
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import Model, llama
from bpipe.predict.switches import Switches
from bpipe.schedule.families.families import default_family
from validation.measurements import rows
from validation.throughput import Throughput

SEQUENCE = 4096
# Sizes by their authors' config.json.
MODELS: dict[str, Model] = {
    "mixtral-8x7b": replace(
        llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, SEQUENCE), experts=Experts(8, 2, 14336)
    ),
    "qwen3-235b-a22b": replace(
        llama("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, SEQUENCE), qk_norm=True, experts=Experts(128, 8, 1536)
    ),
    "deepseek-v3": replace(
        llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129280, SEQUENCE),
        experts=Experts(256, 8, 2048, 2048, pattern=(0,) * 3 + (1,) * 58, sigmoid=True),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
}
NUMBERS = ("tensor", "pipeline", "micro_batch", "global_batch")


@cache
def of_experts() -> tuple[Throughput, ...]:
    """Return every row of the file."""
    return tuple(_prediction(row) for row in rows("experts_throughput.csv"))


def _prediction(row: dict[str, str]) -> Throughput:
    setup = setup_of_row(row, MODELS[row["model"]], row["dispatcher"], sequence=SEQUENCE)
    return Throughput(
        row["source"],
        setup.model.name,
        setup.cluster.num_devices,
        "tflops_per_gpu",
        setup,
        float(row["tflops_per_gpu"]),
        reached(setup),
    )


def setup_of_row(row: dict[str, str], model: Model, dispatcher: str, **others: Any) -> Setup:
    """As NVIDIA's runs are taken to be where the source does not say it: nothing recomputed, reductions and gathers
    overlapped."""
    numbers: dict[str, Any] = {name: int(row[name]) for name in NUMBERS}
    chunks = int(row["chunks"])
    layers = split_layers(model.num_layers, numbers["pipeline"] * chunks, allow_uneven=True)
    assert layers is not None
    return Setup(
        model=model,
        cluster=parse_cluster(row["cluster"]),
        layers=layers,
        recompute="none",
        schedule=default_family(chunks),
        num_chunks=chunks,
        switches=Switches(overlap_grad_reduce=True, overlap_param_gather=True),
        routing=Routing(int(row["expert"]), 1, dispatcher) if model.experts else Routing(),
        **numbers,
        **others,
    )


def reached(setup: Setup) -> float:
    """TFLOP/s of a device."""
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, vocabulary=setup.padded_vocabulary)
    return flops / steady_timing(setup, costs_of(setup)).iteration_s / setup.cluster.num_devices / 1e12


def needed_gib(one: Throughput) -> float:
    """Of the fullest device, by prediction."""
    return max(rank.peak_bytes for rank in predict_memory(one.setup)) / GIB
