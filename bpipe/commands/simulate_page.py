"""Write a prediction as a page like that of `bpipe report`, without a measured side.

Every rank's bar and curve start from what it holds all the time: weights, gradients and optimizer state.
"""

from __future__ import annotations

from typing import Any

from bpipe.balance.config import name_of
from bpipe.plan.candidates import describe
from bpipe.plan.explain import calibration_lines, tightness_warning
from bpipe.plan.predict import SetupPrediction
from bpipe.predict.cluster import gib_text
from bpipe.predict.error_bars import range_words
from bpipe.predict.memory import RankMemory
from bpipe.record.report.output.page import render
from bpipe.record.report.output.view import simulated_track
from bpipe.simulate.report import Simulation


def page(prediction: SetupPrediction, simulation: Simulation) -> bytes:
    return render(page_view(prediction, simulation)).encode("utf-8", "backslashreplace")


def page_view(prediction: SetupPrediction, simulation: Simulation) -> dict[str, Any]:
    """Return what the page draws, in the form of `bpipe.record.report.output.page`."""
    ranks = range(prediction.setup.pipeline)
    fullest = max(prediction.memory, key=lambda row: row.peak_bytes - row.limit_bytes)
    return {
        "is_run": False,
        "title": f"bpipe simulate: {prediction.setup.model.name}, {describe(prediction.setup)}",
        "figures": _figures(prediction, fullest),
        "facts": _facts(prediction),
        "answers": [_fits(prediction, fullest), *filter(None, [tightness_warning(prediction)])],
        "bottleneck": fullest.rank,
        "stages": [_rank_row(prediction, simulation, rank) for rank in ranks],
        "differences": [],
        "iterations": [
            {
                "iteration": 1,
                "end_s": float(simulation.makespan_s),
                "ranks": [_lane(prediction.memory[rank], simulation) for rank in ranks],
            }
        ],
    }


def _fits(prediction: SetupPrediction, fullest: RankMemory) -> str:
    much = f"rank {fullest.rank} is fullest with {gib_text(fullest.peak_bytes)} of {gib_text(fullest.limit_bytes)} GiB"
    return f"It fits: {much}." if prediction.fits else f"It does not fit: {much}."


def _figures(prediction: SetupPrediction, fullest: RankMemory) -> list[list[str]]:
    """Return the four figures at the head of the page."""
    setup, timing = prediction.setup, prediction.timing
    longest = max(range(setup.pipeline), key=timing.exposed_s.__getitem__)
    measured = range_words(setup.error_bars, timing.iteration_s)
    moved = f"rank {longest}" if any(prediction.transfers) else "nothing is evicted"
    return [
        ["peak", f"{gib_text(fullest.peak_bytes)} GiB", f"rank {fullest.rank}, of {gib_text(fullest.limit_bytes)}"],
        ["exposed transfers", f"{timing.exposed_s[longest]:.3f} s", moved],
        ["iteration", f"{timing.iteration_s:.3f} s", measured and f"{measured} by measured runs"],
        ["bubble", f"{100 * timing.bubble_of_pipeline:.1f} %", "of the pipeline"],
    ]


def _facts(prediction: SetupPrediction) -> list[list[str]]:
    setup = prediction.setup
    sizes = f"tensor {setup.tensor}, pipeline {setup.pipeline}, data {setup.data}, micro-batch {setup.micro_batch}"
    return [
        ["cut", sizes],
        ["schedule", f"{setup.schedule}, {setup.num_microbatches} micro-batches, balance {name_of(setup.balance)}"],
        ["device", setup.cluster.device.name],
        ["MFU", f"{100 * prediction.mfu:.1f} %"],
        *(["note", line] for line in calibration_lines(setup.cluster)),
    ]


def _rank_row(prediction: SetupPrediction, simulation: Simulation, rank: int) -> dict[str, Any]:
    row, span = prediction.memory[rank], float(simulation.pipeline_s)
    parts = [
        *_under(row)[:3],
        ["context and communicators", row.overhead_bytes],
        ["activations", row.activations_bytes],
        ["hosted", row.hosted_bytes],
    ]
    # Where the update of the weights takes more than the pipeline, it is what comes on top.
    parts.append(["temporaries and fragmentation", row.peak_bytes - sum(size for _, size in parts)])
    return {
        "stage": rank,
        "bound_bytes": row.limit_bytes,
        "parts": parts,
        "bubble": 1 - float(simulation.busy_s(rank)) / span,
        "exposed_s": float(simulation.exposed_s[rank]),
        "evictions": prediction.transfers[rank],
    }


def _under(row: RankMemory) -> list[list[Any]]:
    """What a rank holds all the time, drawn under its activations, the lowest first."""
    return [
        ["weights", row.weights_bytes],
        ["gradients", row.gradients_bytes],
        ["optimizer", row.optimizer_bytes],
        ["context, temporaries, fragmentation", row.overhead_bytes + row.working_bytes + row.fragmentation_bytes],
    ]


def _lane(row: RankMemory, simulation: Simulation) -> dict[str, Any]:
    under = _under(row)
    levels = simulation.levels(row.rank)
    return {
        "rank": row.rank,
        "label": f"rank {row.rank}",
        "bound_bytes": row.limit_bytes,
        "under": under,
        "measured": None,
        "simulated": simulated_track(simulation, row.rank, levels, sum(size for _, size in under)),
    }
