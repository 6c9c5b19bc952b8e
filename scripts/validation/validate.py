#!/usr/bin/env python3
"""Lay predictions beside measurements.

In: measurements, published ones and our own (tests/data), and the templates in pages/ beside this file. Out: one page of
documentation for every template, under its name.

Usage: scripts/validation/validate.py [--output docs]

Without --output it prints the pages. Fits nothing: every constant is that of bpipe.predict, the same for all rows. Needs no torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.plan.estimate import estimate
from bpipe.predict.cluster import GIB
from bpipe.predict.costs import predict_costs
from bpipe.predict.error_bars import MANY_RUNS
from bpipe.predict.flops import training_flops
from bpipe.predict.layers.ends import output_seconds
from bpipe.predict.model import PRESETS
from bpipe.predict.saved_tensors import stage_bytes
from bpipe.simulate.cost import Number
from validation.eight_bit import of_fp8, parts_of_fp8, row_of_fp8
from validation.error_bars import measured_bars
from validation.experts import needed_gib, of_experts
from validation.measurements import (
    STAGE_TIMES,
    cpu_runs,
    grid,
    grid_mfu,
    predicted_mfu,
    published,
    published_peaks,
    replays,
    setup_of,
    size_of,
    stage_setup,
)
from validation.throughput import (
    PEAK,
    agreement,
    calibrated,
    calibrated_errors_by_source,
    errors_by_source,
    kept_back,
    throughputs,
    without_tp_overlap,
)

TEMPLATES = Path(__file__).with_name("pages")
# Target for predictions by formula: mean and largest error in percent, without signs.
MOST_MEAN, MOST_LARGEST = 4, 10
UNITS = {"tflops_per_gpu": "TFLOP/s", "iteration_s": "s", "samples_per_gpu_s": "samples/s", PEAK: "GB"}
# Stage times of 32 layers of 3072, by the vocabulary: milliseconds of a forward and a backward; and the output layer's.
STAGE_MS = {32000: (10.61, 21.36), 256000: (10.44, 20.95)}
OUTPUT_MS = (26.4, 31.2)
# Huang et al. 2024, GPT-3 96B: MFU of one stage at b = 1 and 2, and of the whole training.
STAGE_MFU = {("unfused", "selective"): (37.8, 55.2), ("flash", "none"): (57.7, 62.4)}
WHOLE_MFU = {"unfused, recomputed": ((37.8, 55.2), (34.0, 45.8)), "flash": ((57.7, 62.4), (52.0, 51.7))}

# By its name in the template, what stands there: a table, a number, words.
Values = dict[str, Any]


def table(titles: str, body: Iterable[Iterable[object]]) -> str:
    names = titles.split("|")
    rows = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in body)]
    return "\n".join(f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows)


def summary(name: str, errors: Iterable[float]) -> Values:
    """Return how many errors there are, their mean and largest without signs, and whether these meet the target."""
    sizes = [abs(error) for error in errors]
    return {
        f"{name}_number": len(sizes),
        f"{name}_mean": statistics.mean(sizes),
        f"{name}_largest": max(sizes),
        f"{name}_target": "yes" if is_on_target(sizes) else "**no**",
    }


def is_on_target(sizes: Sequence[float]) -> bool:
    return statistics.mean(sizes) <= MOST_MEAN and max(sizes) <= MOST_LARGEST


def of_replays() -> Values:
    found = replays()
    body = (
        (one.method, one.vocabulary, f"{one.measured_s:.4f}", f"{one.predicted_s:.4f}", f"{one.error_percent:+.2f}")
        for one in found
    )
    return {
        "replay_table": table("method|vocabulary|measured s|predicted s|error %", body),
        **summary("replay", (one.error_percent for one in found)),
    }


def of_papers() -> Values:
    body = (
        (
            times.model,
            f"{times.tensor}/{times.pipeline}/{times.micro_batch}",
            times.recompute,
            "-" if times.mfu_percent is None else f"{times.mfu_percent:.2f}",
            f"{predicted_mfu(times):.2f}",
            f"{stage_bytes(stage_setup(times))[1] / 1e9:.2f}",
            f"{stage_bytes(stage_setup(times))[1] / times.forward_ms / 1e6:.2f}",
        )
        for times in STAGE_TIMES
    )
    titles = "model|t/p/b|recompute|stated MFU %|predicted MFU %|transfer GB|within a forward GB/s"
    plain = stage_bytes(replace(stage_setup(STAGE_TIMES[3]), recompute="none"))[1]
    stated = [(times.mfu_percent, predicted_mfu(times)) for times in STAGE_TIMES if times.mfu_percent is not None]
    return {
        "paper_table": table(titles, body),
        "unrecomputed_gb_per_s": plain / STAGE_TIMES[3].forward_ms / 1e6,
        **summary("paper", (100 * (predicted / measured - 1) for measured, predicted in stated)),
    }


def of_grid() -> Values:
    found = grid()
    body = (
        (
            *_grid_row(one.row),
            f"{one.stated_gib:.1f}",
            f"{one.less_gib:.1f}",
            "yes" if one.agrees else "**no**",
        )
        for one in found
    )
    fit_balanced = [one for one in found if one.balanced_gib is not None and one.balanced_gib <= one.limit_gib]
    return {
        "grid_table": table("t/p/b|recompute|balanced|needs GiB|with less GiB|agrees", body),
        "grid_limit_gib": found[0].limit_gib,
        "grid_rows": len(found),
        "grid_agreed": sum(one.agrees for one in found),
        "grid_missed": ", ".join(size_of(one) for one in found if not one.agrees) or "none",
        "grid_unclaimed": ", ".join(size_of(one) for one in fit_balanced if one.limit_gib < one.less_gib) or "none",
    }


def _grid_row(row: Mapping[str, str]) -> tuple[str, str, str]:
    return f"{row['tensor']}/{row['pipeline']}/{row['micro_batch']}", row["recompute"], row["balanced"]


def of_grid_mfu() -> Values:
    found = grid_mfu()
    errors = [abs(one.error_percent) for one in found]
    body = (
        (*_grid_row(one.row), f"{one.measured:.2f}", f"{one.predicted:.2f}", f"{one.error_percent:+.0f}")
        for one in found
    )
    return {
        "grid_mfu_table": table("t/p/b|recompute|balanced|measured MFU %|predicted MFU %|error %", body),
        "grid_mfu_median": statistics.median(errors),
        **summary("grid_mfu", errors),
    }


def of_memory() -> Values:
    found = published_peaks()
    body = (
        (one.method, one.vocabulary, f"{one.measured:.0f}", f"{one.predicted:.0f}", f"{one.error_percent:+.1f}")
        for one in found
    )
    return {
        "memory_table": table("method|vocabulary|measured MiB|predicted MiB|error %", body),
        **summary("memory", (one.error_percent for one in found)),
    }


def _mean_and_largest(errors: Iterable[float]) -> tuple[str, str]:
    sizes = [abs(error) for error in errors]
    return (f"{statistics.mean(sizes):.1f}", f"{max(sizes):.1f}") if sizes else ("-", "-")


def of_throughputs() -> Values:
    found = throughputs()
    body = (
        (
            one.source.split(" (")[0],
            f"{one.model}, {one.gpus}",
            f"{one.setup.tensor}/{one.setup.pipeline}/{one.setup.num_chunks}/{one.setup.micro_batch}",
            one.setup.recompute,
            UNITS[one.quantity],
            f"{one.measured:g}",
            f"{one.predicted:.4g}",
            f"{one.error_percent:+.1f}",
        )
        for one in found
    )
    calibrations = calibrated_errors_by_source()
    sources = (
        (
            source,
            len(errors),
            *_mean_and_largest(errors),
            *_mean_and_largest(calibrations[source].by_first if source in calibrations else ()),
            *_mean_and_largest(calibrations[source].by_any if source in calibrations else ()),
        )
        for source, errors in errors_by_source().items()
    )
    overlapped = [one.error_percent for one in found if one.setup.switches.tp_comm_overlap]
    missed = [source for source, errors in errors_by_source().items() if not is_on_target(errors)]
    return {
        "figures": len(found),
        **summary("peaks", (one.error_percent for one in found if one.quantity == PEAK)),
        **summary("throughput", (one.error_percent for one in found if one.quantity != PEAK)),
        "throughput_target": f"**not** {', '.join(missed)}" if missed else "yes",
        "throughput_table": table("source|model, GPUs|t/p/v/b|recompute|unit|measured|predicted|error %", body),
        "sources_table": table(
            "source|figures|mean error %|largest|mean, first row calibrating|largest|mean, any row|largest", sources
        ),
        "throughput_order": agreement(found),
        "overlapped_runs": len(overlapped),
        "overlapped_least": min(overlapped),
        "overlapped_most": max(overlapped),
        "without_least": min(without_tp_overlap()),
        "without_most": max(without_tp_overlap()),
    }


def of_kept_back() -> Values:
    found = kept_back()
    body = (
        (
            one.model,
            f"{one.setup.tensor}/{one.setup.pipeline}/{one.setup.micro_batch}",
            f"{one.measured:.2f}",
            f"{one.predicted:.2f}",
            f"{one.error_percent:+.1f}",
        )
        for one in found
    )
    return {
        "kept_back_table": table("layers x hidden, heads|t/p/b|measured s|predicted s|error %", body),
        **summary("kept_back", (one.error_percent for one in found)),
        **summary("kept_back_by_first", calibrated([one.predicted / one.measured for one in found], 1)),
        "kept_back_order": agreement(found),
    }


def of_error_bars() -> Values:
    body = (
        (one.kind, one.num_runs, *(f"{each:+d}" for each in (one.low, one.median, one.high))) for one in measured_bars()
    )
    return {"error_bars_table": table("runs of|runs|from|median|to", body), "many_runs": MANY_RUNS}


def of_models_with_experts() -> Values:
    found = of_experts()
    body = (
        (
            one.source,
            one.model,
            f"{one.gpus} {one.setup.cluster.device.name}",
            f"{one.setup.tensor}/{one.setup.routing.expert}/{one.setup.pipeline}/{one.setup.num_chunks}",
            f"{one.measured:.0f}",
            f"{one.predicted:.0f}",
            f"{one.error_percent:+.1f}",
            f"{needed_gib(one):.0f} of {one.setup.limit_bytes[0] / GIB:.0f}",
        )
        for one in found
    )
    return {
        "experts_table": table("source|model|GPUs|t/ep/p/v|measured|predicted|error %|predicted GiB", body),
        **summary("experts", (one.error_percent for one in found)),
    }


def of_runs_in_fp8() -> Values:
    titles = "model|GPUs|recipe|t/c/ep/p/v|measured|predicted|error %|predicted GiB"
    errors = (
        (what, len(found), *_mean_and_largest(one.error_percent for one in found))
        for what, found in parts_of_fp8().items()
    )
    return {
        "fp8_table": table(titles, map(row_of_fp8, of_fp8())),
        "fp8_errors_table": table("runs of|runs|mean error %|largest %", errors),
        **summary("fp8", (one.error_percent for one in of_fp8())),
    }


def of_rooflines() -> Values:
    body: list[tuple[str, ...]] = []
    errors: list[float] = []

    def add(model: str, recompute: str, what: str, measured_ms: Iterable[float], predicted: Iterable[Number]) -> None:
        for kind, measured, seconds in zip(("forward", "backward"), measured_ms, predicted, strict=True):
            ms = float(seconds) * 1e3
            errors.append(100 * (ms / measured - 1))
            body.append((model, recompute, f"{what}{kind}", f"{measured:.2f}", f"{ms:.2f}", f"{errors[-1]:+.0f}"))

    for times in STAGE_TIMES:
        cost = predict_costs(stage_setup(times)).stages[1]
        add(times.model, times.recompute, "", (times.forward_ms, times.backward_ms), (cost.forward_s, cost.backward_s))
    for vocabulary, measured in STAGE_MS.items():
        cost = predict_costs(published(vocabulary)).stages[1]
        add(f"32 x 3072, V={vocabulary}", "none", "", measured, (cost.forward_s, cost.backward_s))
    add("V=256000", "-", "output layer ", OUTPUT_MS, output_seconds(published(256000)))
    return {
        "roofline_table": table("model|recompute|kind|measured ms|predicted ms|error %", body),
        **summary("roofline", errors),
    }


def of_stages() -> Values:
    body, errors = [], []
    for (attention, recompute), stated in STAGE_MFU.items():
        for b, measured in zip((1, 2), stated, strict=True):
            setup = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", 4, 8, b, 128, recompute, attention=attention)
            cost = predict_costs(setup).stages[1]
            flops = training_flops(setup.model, b, 2048, "papers") / 32
            predicted = 100 * flops / float(cost.forward_s + cost.backward_s) / 312e12
            body.append((attention, b, measured, f"{predicted:.1f}"))
            errors.append(100 * (predicted / measured - 1))
    return {
        "stage_mfu_table": table("attention|b|measured %|predicted %", body),
        **summary("stage_mfu", errors),
    }


def of_estimates() -> Values:
    gains = [
        (attention, whole[1] / whole[0], estimate(128, 8, 2, 1, two / 100, one / 100).ratio)
        for attention, ((one, two), whole) in WHOLE_MFU.items()
    ]
    body = ((attention, f"{measured:.3f}", f"{estimated:.3f}") for attention, measured, estimated in gains)
    return {
        "estimate_table": table("attention|measured gain|estimated gain", body),
        **summary("estimate", (100 * (estimated / measured - 1) for _, measured, estimated in gains)),
    }


def of_own_runs() -> Values:
    body, exact, stages = [], 0, 0
    for run in cpu_runs():
        setup, pairs = run.setup, list(zip(run.measured, run.predicted, strict=True))
        equal = sum(measured == predicted for measured, predicted in pairs)
        exact, stages = exact + equal, stages + len(pairs)
        cells = (f"{measured} / {predicted}" for measured, predicted in (*pairs[:2], pairs[-1]))
        sizes = f"{setup.tensor}/{setup.pipeline}/{setup.num_microbatches}"
        body.append((run.name, sizes, f"{equal} of {len(pairs)}", *cells))
    titles = "run|t/p/m|stages exact|first stage, measured / predicted|second stage|last stage"
    return {"run_table": table(titles, body), "stages_exact": exact, "stages": stages}


PARTS = (
    *(of_replays, of_papers, of_grid, of_grid_mfu, of_memory, of_throughputs, of_kept_back, of_models_with_experts),
    *(of_runs_in_fp8, of_error_bars, of_rooflines, of_stages, of_estimates, of_own_runs),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write the pages (default: print them)")
    options = parser.parse_args()
    values = {name: value for part in PARTS for name, value in part().items()}
    for template in sorted(TEMPLATES.glob("*.md")):
        text = template.read_text().format_map(values)
        if options.output is None:
            print(text)
        else:
            (options.output / template.name).write_text(text)


if __name__ == "__main__":
    main()
