"""Lay predictions of trainings in FP8 beside published throughputs. In: tests/data/fp8_throughput.csv. Out: rows with both.

Nothing is given but what the source says of the run: no time is measured, no constant is fitted. Needs no torch, writes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from bpipe.generate.families import default
from bpipe.models.cluster import GIB, parse_cluster
from bpipe.models.flops import training_flops
from bpipe.models.fp8 import Fp8
from bpipe.models.layout import Setup, split_layers
from bpipe.models.model import PRESETS
from bpipe.models.parts import Routing
from bpipe.models.switches import Switches
from bpipe.plan.predict import costs_of, steady_timing
from validation.experts import MODELS, needed_gib
from validation.measurements import rows
from validation.throughput import Throughput

NUMBERS = ("tensor", "context", "expert", "pipeline", "chunks", "micro_batch", "global_batch", "sequence")


@cache
def of_fp8() -> tuple[Throughput, ...]:
    """Every row of the file."""
    return tuple(_prediction(row) for row in rows("fp8_throughput.csv"))


def _prediction(row: dict[str, str]) -> Throughput:
    tensor, context, expert, pipeline, chunks, micro_batch, batch, sequence = (int(row[name]) for name in NUMBERS)
    model = {**PRESETS, **MODELS}[row["model"]]
    layers = split_layers(model.num_layers, pipeline * chunks, allow_uneven=True)
    assert layers is not None
    setup = Setup(
        model=model,
        cluster=parse_cluster(row["cluster"]),
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        micro_batch=micro_batch,
        global_batch=batch,
        sequence=sequence,
        layers=layers,
        recompute="none",
        schedule=default(chunks),
        chunks=chunks,
        fp8=Fp8("hybrid", row["recipe"], param_gather=True),
        switches=Switches(overlap_grad_reduce=True, overlap_param_gather=True),
        routing=Routing(expert, 1, "flex") if model.experts else Routing(),
    )
    return Throughput(row["source"], model.name, setup.cluster.num_devices, "tflops", setup, float(row["tflops_per_gpu"]), _reached(setup))


def _reached(setup: Setup) -> float:
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, vocabulary=setup.vocabulary)
    return flops / steady_timing(setup, costs_of(setup)).iteration_s / setup.cluster.num_devices / 1e12


def row_of_fp8(one: Throughput) -> tuple[str, ...]:
    """As the document shows it; what tensor-parallel messages that are overlapped, too, would make of the prediction stands beside it."""
    setup = one.setup
    assert setup.fp8 is not None
    overlapped = replace(setup, switches=replace(setup.switches, tp_comm_overlap=True))
    return (
        one.model,
        f"{one.gpus} {setup.cluster.device.name}",
        setup.fp8.recipe,
        f"{setup.tensor}/{setup.context}/{setup.routing.expert}/{setup.pipeline}/{setup.chunks}",
        f"{one.measured:.0f}",
        f"{one.predicted:.0f}",
        f"{one.error_percent:+.1f}",
        f"{_reached(overlapped):.0f}" if setup.tensor > 1 else "-",
        f"{needed_gib(one):.0f} of {setup.limit_bytes[0] / GIB:.0f}",
    )


def parts_of_fp8() -> dict[str, list[Throughput]]:
    """By what they have in common."""
    found = of_fp8()
    dense = [one for one in found if not one.setup.model.experts]
    return {
        "Dense models on H100s": [one for one in dense if not one.setup.cluster.device.fp8_blocks],
        "Dense models on Blackwell": [one for one in dense if one.setup.cluster.device.fp8_blocks],
        "Models with experts": [one for one in found if one.setup.model.experts],
    }
