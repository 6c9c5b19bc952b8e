"""Lay predictions of trainings in FP8 beside published throughputs.

In: tests/data/fp8_throughput.csv. Out: rows with both.

Nothing is given but what the source says of the run: no time is measured, no constant is fitted. Dense models ran as the
same repository has them in `scripts/performance/configs/llama`: tensor-parallel messages in Transformer Engine's
user buffers, beside the products, and gradients in 16 bit. Needs no torch, writes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from bpipe.predict.cluster import GIB
from bpipe.predict.fp8 import Fp8
from bpipe.predict.model import PRESETS
from validation.experts import MODELS, needed_gib, reached, setup_of_row
from validation.measurements import rows
from validation.throughput import Throughput


@cache
def of_fp8() -> tuple[Throughput, ...]:
    """Return every row of the file."""
    return tuple(_prediction(row) for row in rows("fp8_throughput.csv"))


def _prediction(row: dict[str, str]) -> Throughput:
    fp8, sizes = (
        Fp8("hybrid", row["recipe"], param_gather=True),
        {name: int(row[name]) for name in ("context", "sequence")},
    )
    setup = setup_of_row(row, {**PRESETS, **MODELS}[row["model"]], "flex", fp8=fp8, **sizes)
    if not setup.model.experts:
        switches = replace(setup.switches, tp_comm_overlap=setup.tensor > 1, grad_reduce_in_bf16=True)
        setup = replace(setup, switches=switches)
    return Throughput(
        row["source"],
        setup.model.name,
        setup.cluster.num_devices,
        "tflops",
        setup,
        float(row["tflops_per_gpu"]),
        reached(setup),
    )


def row_of_fp8(one: Throughput) -> tuple[str, ...]:
    """Return the row as the document shows it."""
    setup = one.setup
    assert setup.fp8 is not None
    return (
        one.model,
        f"{one.gpus} {setup.cluster.device.name}",
        setup.fp8.recipe,
        f"{setup.tensor}/{setup.context}/{setup.routing.expert}/{setup.pipeline}/{setup.num_chunks}",
        f"{one.measured:.0f}",
        f"{one.predicted:.0f}",
        f"{one.error_percent:+.1f}",
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
