#!/usr/bin/env python3
"""Lay predictions beside measurements.

In: measurements, published ones and our own (tests/data). Out: docs/validation.md.

Usage: scripts/validation/validate.py [--output docs/validation.md]

Without --output it prints. Fits nothing: every constant is that of bpipe.models, the same for all rows. Needs no torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.models.cluster import GIB
from bpipe.models.costs import predict_costs
from bpipe.models.error_bars import MANY_RUNS
from bpipe.models.flops import training_flops
from bpipe.models.layers.ends import output_seconds
from bpipe.models.model import PRESETS
from bpipe.models.saved import stage_bytes
from bpipe.plan.estimate import estimate
from validation.eight_bit import of_fp8, parts_of_fp8, row_of_fp8
from validation.error_bars import measured_bars
from validation.experts import needed_gib, of_experts
from validation.measurements import (
    STAGE_TIMES,
    StageTimes,
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
    words_on_tp_overlap,
)

# -- the document
# ----------------------------------------------------------------------------------------------------------------------


def table(titles: str, body: Iterable[Iterable[object]]) -> list[str]:
    names = titles.split("|")
    return [
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(map(str, row)) + " |" for row in body),
        "",
    ]


def replay_part() -> list[str]:
    found = replays()
    errors = [abs(one.error_percent) for one in found]
    return [
        "## Iteration times of real runs, from their pass times",
        "",
        "8 A100s, 1F1B, p = 8, m = 128 (published with Yeung et al. 2024): plain, with fewer layers on the last rank "
        "(redis), and with the "
        "vocabulary in shards. Given: every rank's forward and backward time, S and T together, and one collective. "
        "Predicted: "
        "the iteration, shards by this project's own order. Messages of 12.6 MB at 231 GB/s and 0.32 ms, which block "
        "as in Megatron's 1F1B "
        "unless there are shards, and one update of the weights.",
        *table(
            "method|vocabulary|measured s|predicted s|error %",
            (
                (
                    one.method,
                    one.vocabulary,
                    f"{one.measured_s:.4f}",
                    f"{one.predicted_s:.4f}",
                    f"{one.error_percent:+.2f}",
                )
                for one in found
            ),
        ),
        f"Mean error {sum(errors) / len(errors):.2f} %, largest {max(errors):.2f} %. Nearly all are low: what happens "
        f"once an iteration "
        "besides (data, norms of gradients, logging) is in the measurement and not in the prediction.",
        "",
    ]


def paper_part() -> list[str]:
    def line(times: StageTimes) -> tuple[object, ...]:
        stated = "-" if times.mfu_percent is None else f"{times.mfu_percent:.2f}"
        moved = stage_bytes(stage_setup(times))[1]
        return (
            times.model,
            f"{times.tensor}/{times.pipeline}/{times.micro_batch}",
            times.recompute,
            stated,
            f"{predicted_mfu(times):.2f}",
            f"{moved / 1e9:.2f}",
            f"{moved / times.forward_ms / 1e6:.2f}",
        )

    none = stage_bytes(replace(stage_setup(STAGE_TIMES[3]), recompute="none"))[1]
    return [
        "## MFU from the papers' stage times",
        "",
        "Kim et al. 2023: seconds of one stage's forward, backward and transfer. Predicted: the whole iteration, "
        "balanced, FLOPs by the "
        "papers' formula, peak 312 TFLOP/s. Only of GPT-3 96B is the measured MFU known to us; "
        "for 13B and 134B the table predicts and nothing checks it. The paper's abstract says of 96B and 134B that "
        "they gained 1.25x to "
        "2.17x over Megatron-LM (1.25x is 96B's 50.64 % over the 40.51 % of its best row without balancing); no other "
        "figure was found "
        "published.",
        *table(
            "model|t/p/b|recompute|stated MFU %|predicted MFU %|transfer GB|within a forward GB/s",
            map(line, STAGE_TIMES),
        ),
        f"The paper states 3.48 GB and 24.25 GB/s for 96B with recomputed attention; without recomputation 100.31 "
        f"GB/s, here "
        f"{none / STAGE_TIMES[3].forward_ms / 1e6:.2f}.",
        "",
    ]


def grid_part() -> list[str]:
    found = grid()
    missed = [size_of(one) for one in found if not one.agrees]
    unclaimed = [
        size_of(one)
        for one in found
        if one.balanced_gib is not None and one.balanced_gib <= one.limit_gib < one.less_gib
    ]
    body = (
        (
            f"{one.row['tensor']}/{one.row['pipeline']}/{one.row['micro_batch']}",
            one.row["recompute"],
            one.row["balanced"],
            f"{one.stated_gib:.1f}",
            f"{one.less_gib:.1f}",
            "yes" if one.agrees else "**no**",
        )
        for one in found
    )
    return [
        "## What fits: GPT-3 96B on 32 A100s",
        "",
        "Kim et al. 2023, tables 2 and 7: the least recomputation that fits, and whether it fits only balanced. GiB "
        "of the fullest rank, "
        f"of {found[0].limit_gib:.2f}; the other column is the same with less recomputation or, for balanced rows, "
        f"without balancing.",
        *table("t/p/b|recompute|balanced|needs GiB|with less GiB|agrees", body),
        f"{len(found) - len(missed)} of {len(found)} agree; missed: {', '.join(missed) or 'none'}. By every part a "
        f"formula knows, "
        "t=8 p=2 b=2 needs a little less than t=4 p=4 b=1, and of the two only the second is said to fit: no "
        "constants satisfy both.",
        "",
        f"With less recomputation and balanced, the model says that these would fit too, of which the paper says "
        f"nothing: "
        f"{', '.join(unclaimed) or 'none'}.",
        "",
        "Constants, the same for all rows, in `bpipe/models/memory.py` and `states.py` with their sources: 2 + 2 + 12/d bytes a "
        "parameter (16-bit "
        "gradients, ZeRO-1), 79.25 GiB usable, 0.5 GiB context, 688 MiB a communicator (544 between two), 15 % "
        "fragmentation of "
        "activations and working memory.",
        "",
    ]


def grid_mfu_part() -> list[str]:
    found = grid_mfu()
    errors = [abs(one.error_percent) for one in found]
    body = (
        (
            f"{one.row['tensor']}/{one.row['pipeline']}/{one.row['micro_batch']}",
            one.row["recompute"],
            one.row["balanced"],
            f"{one.measured:.2f}",
            f"{one.predicted:.2f}",
            f"{one.error_percent:+.0f}",
        )
        for one in found
    )
    return [
        "## MFU of the same rows, by formula alone",
        "",
        "What `bpipe simulate` says without being given any time: the roofline below, Megatron's 1F1B, the papers' "
        "FLOPs.",
        *table("t/p/b|recompute|balanced|measured MFU %|predicted MFU %|error %", body),
        f"Median error {statistics.median(errors):.1f} %, largest {max(errors):.0f} %; the two balanced rows are the "
        f"fastest two of both "
        "columns, in the same order. The three worst were measured at less than three quarters of the same row with "
        "half the micro-batch, "
        "more than the longer bubble explains.",
        "",
    ]


def memory_part() -> list[str]:
    body = (
        (one.method, one.vocabulary, f"{one.measured:.0f}", f"{one.predicted:.0f}", f"{one.error_percent:+.1f}")
        for one in published_peaks()
    )
    return [
        "## Memory of real runs",
        "",
        "The same 8 A100s: MiB allocated at peak by the fullest rank (overhead and fragmentation are not allocated, "
        "so not in it).",
        *table("method|vocabulary|measured MiB|predicted MiB|error %", body),
    ]


UNITS = {"tflops_per_gpu": "TFLOP/s", "iteration_s": "s", "samples_per_gpu_s": "samples/s", PEAK: "GB"}


def _mean_and_largest(errors: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.mean(errors):.1f}", f"{max(errors):.1f}") if errors else ("-", "-")


def throughput_part() -> list[str]:
    found = throughputs()
    body = (
        (
            one.source.split(" (")[0],
            f"{one.model}, {one.gpus}",
            f"{one.setup.tensor}/{one.setup.pipeline}/{one.setup.chunks}/{one.setup.micro_batch}",
            one.setup.recompute,
            UNITS[one.quantity],
            f"{one.measured:g}",
            f"{one.predicted:.4g}",
            f"{one.error_percent:+.1f}",
        )
        for one in found
    )
    calibrated = calibrated_errors_by_source()
    sources = [
        (
            source,
            str(len(errors)),
            *_mean_and_largest(errors),
            *_mean_and_largest(calibrated[source].by_first if source in calibrated else []),
            *_mean_and_largest(calibrated[source].by_any if source in calibrated else []),
        )
        for source, errors in errors_by_source().items()
    ]
    return [
        "## Published throughputs and peaks, by formula alone",
        "",
        "What `bpipe simulate` says of 61 published figures without being given any time. Where a source leaves "
        "micro-batch or "
        "chunks open, the fastest that fits. NVIDIA's runs reduce gradients in 16 bit, and overlap that, gather "
        "weights beside forwards, and gather and scatter activations beside products (`--tp-comm-overlap`, "
        "`ub_tp_comm_overlap: true` in "
        "their recipe). The error is of the figure as published: a throughput with a plus is predicted too fast, a "
        "time with a plus too "
        "slow.",
        *table("source|model, GPUs|t/p/v/b|recompute|unit|measured|predicted|error %", body),
        *table(
            "source|figures|mean error %|largest|mean, first row calibrating|largest|mean, any row|largest", sources
        ),
        f"Kendall's coefficient over all pairs of one source that were measured more than 5 % apart: "
        f"{agreement(found):.2f}.",
        "",
        "Asked for are a mean of 4 % and a largest of 10 %. Every source is within both but NVIDIA's, whose mean is "
        "NOT. "
        "Calibrated by one row (`bpipe calibrate`), 2.5 and 6 % of seconds are asked for: of Korthikanti et al. and "
        "of Qi et al. that is "
        "NOT met, either way, of Narayanan et al. not by every row: what is left differs by model, which one factor "
        "cannot mend. "
        "Korthikanti et al. measured the 1T model on 512 GPUs at 94.42 s, which is 177 TFLOP/s by Narayanan's "
        "formula; Narayanan et al. "
        "measured six such pipelines beside each other at 163: the prediction lies between.",
        "",
        "A backward hides tensor-parallel sums beside the products for weights, as Megatron does today; Narayanan et "
        "al., who ran in 2021, "
        "are taken to have waited for them. Their paper does not say, and that choice decides between the two "
        "sources' errors: nothing but "
        "the order of the years speaks for it. Models with experts, FP8 and sequences in parts stand below.",
        "",
        words_on_tp_overlap(),
        "",
        "Exchanges of all but NVIDIA's runs block, with chunks as `--no-overlap-p2p-communication` has it: their "
        "Megatron could not "
        "overlap them, or did so only when asked. Narayanan et al. and Korthikanti et al. sent a part from each "
        "tensor-parallel rank. "
        "Taken to hide, the interleaved runs of Qi et al. came out 4 to 9 % too fast. What a message takes beside its "
        "bytes is 0.3 ms in "
        "every row, from logs that are none of these figures (`bpipe/models/cluster.py`).",
        "",
    ]


def kept_back_part() -> list[str]:
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
    errors = _mean_and_largest([abs(one.error_percent) for one in found])
    by_first = _mean_and_largest(calibrated([one.predicted / one.measured for one in found], 1))
    return [
        "## Runs kept back",
        "",
        "Runs that no constant was looked at with, and that nothing was changed for since: the last benchmarks before "
        "BLOOM was trained, "
        "384 A100s, 4 ports of 100 Gbit/s a node, Megatron-DeepSpeed (BigScience 2022; "
        "`tests/data/kept_back_throughput.csv` says where). "
        "Seconds of an iteration:",
        *table("layers x hidden, heads|t/p/b|measured s|predicted s|error %", body),
        f"Mean error {errors[0]} %, largest {errors[1]} %, all predicted too fast; with the first row calibrating the "
        f"others "
        f"{by_first[0]} and {by_first[1]} %; Kendall's coefficient over pairs more than 5 % apart "
        f"{agreement(found):.2f}. That is NOT "
        "within the 4 and 10 % that are asked for: DeepSpeed's loop and optimizer, which ran there, are not "
        "Megatron's and not modelled. "
        "Of the two largest one has eight tensor-parallel ranks and a small micro-batch, as others there that were "
        "slow; for the other, "
        "with 104 heads, no formula here gives a reason.",
        "",
    ]


def error_bars_part() -> list[str]:
    body = (
        (one.kind, one.num_runs, *(f"{each:+d}" for each in (one.low, one.median, one.high))) for one in measured_bars()
    )
    return [
        "## Error bars",
        "",
        "How much longer than predicted the runs of this page took, in percent; a minus is a run that was faster. `bpipe "
        f"plan` prints these ranges behind its times. Of {MANY_RUNS} runs and more a range leaves out 5 % of them at each "
        "end, of fewer it holds all. With a calibration (`bpipe calibrate`) it is that of every two runs of one source, "
        "one predicted with the factor of the other. On other devices no run is known, and no range is given.",
        *table("runs of|runs|from|median|to", body),
    ]


def experts_part() -> list[str]:
    found = of_experts()
    body = (
        (
            one.source,
            one.model,
            f"{one.gpus} {one.setup.cluster.device.name}",
            f"{one.setup.tensor}/{one.setup.routing.expert}/{one.setup.pipeline}/{one.setup.chunks}",
            f"{one.measured:.0f}",
            f"{one.predicted:.0f}",
            f"{one.error_percent:+.1f}",
            f"{needed_gib(one):.0f} of {one.setup.limit_bytes[0] / GIB:.0f}",
        )
        for one in found
    )
    errors = _mean_and_largest([abs(one.error_percent) for one in found])
    return [
        "## Models with experts",
        "",
        "Published by NVIDIA, in bf16 with dropless experts and 4096 tokens (`tests/data/experts_throughput.csv` says "
        "where). No constant "
        "was looked at with them. Recomputation is not published and taken to be none; loads are taken to be even, as "
        "they were forced "
        "to be in Megatron Bridge. Of the first the throughput is of version 0.9, the mapping of the table beside it. "
        "TFLOP/s of a GPU:",
        *table("source|model|GPUs|t/ep/p/v|measured|predicted|error %|predicted GiB", body),
        f"Mean error {errors[0]} %, largest {errors[1]} %: three rows are few. Where more memory is predicted than a "
        f"GPU has, the run must "
        "have recomputed something that is not in the prediction, so it was slower than predicted. DeepSeek-V3's own, "
        "on H800s "
        "in FP8 by recipes of theirs, is not compared. What latent attention and grouped products keep on a GPU was "
        "compared with nothing.",
        "",
    ]


def fp8_part() -> list[str]:
    errors = {
        what: _mean_and_largest([abs(one.error_percent) for one in of_part]) for what, of_part in parts_of_fp8().items()
    }
    return [
        "## Runs in FP8, kept back",
        "",
        "Published by NVIDIA, Megatron Bridge 25.11 (`tests/data/fp8_throughput.csv` says where, and which rows are "
        "left out). No constant "
        "was looked at with them: the peak is the data sheet's, and what products reach of it another source's best. "
        "Recomputation is not "
        "published and taken to be none; weights are taken to be kept in FP8, and messages of tensor parallelism not "
        "to be overlapped: "
        "beside it stands what they would reach with `--tp-comm-overlap`. TFLOP/s of a GPU:",
        *table(
            "model|GPUs|recipe|t/c/ep/p/v|measured|predicted|error %|overlapped|predicted GiB",
            map(row_of_fp8, of_fp8()),
        ),
        *(f"{what}: mean error {mean} %, largest {largest} %." for what, (mean, largest) in errors.items()),
        "The mean of 4 % and the largest of 10 % that are asked for in 16 bit are NOT met but for the largest on "
        "H100s. On Blackwell all "
        "is predicted too fast, as its rows with experts in 16 bit are, and with experts in FP8 by so much that the "
        "order of "
        "configurations may be another; which part of it is too fast nobody measured. The three rows with c = 2 are "
        "all that context "
        "parallelism was compared with, and no published row says what it takes by itself.",
        "",
    ]


def roofline_part() -> list[str]:
    body = []
    for times in STAGE_TIMES:
        cost = predict_costs(stage_setup(times)).stages[1]
        for kind, measured, predicted in (
            ("forward", times.forward_ms, cost.forward_s),
            ("backward", times.backward_ms, cost.backward_s),
        ):
            ms = float(predicted) * 1e3
            body.append(
                (
                    times.model,
                    times.recompute,
                    kind,
                    f"{measured:.2f}",
                    f"{ms:.2f}",
                    f"{100 * (ms / measured - 1):+.0f}",
                )
            )
    for vocabulary, forward, backward in ((32000, 10.61, 21.36), (256000, 10.44, 20.95)):
        cost = predict_costs(published(vocabulary)).stages[1]
        for kind, measured, predicted in (
            ("forward", forward, cost.forward_s),
            ("backward", backward, cost.backward_s),
        ):
            ms = float(predicted) * 1e3
            body.append(
                (
                    f"32 x 3072, V={vocabulary}",
                    "none",
                    kind,
                    f"{measured:.2f}",
                    f"{ms:.2f}",
                    f"{100 * (ms / measured - 1):+.0f}",
                )
            )
    for kind, measured, predicted in zip(
        ("forward", "backward"), (26.4, 31.2), output_seconds(published(256000)), strict=True
    ):
        ms = predicted * 1e3
        body.append(
            (
                "V=256000",
                "-",
                f"output layer {kind}",
                f"{measured:.2f}",
                f"{ms:.2f}",
                f"{100 * (ms / measured - 1):+.0f}",
            )
        )
    stage_mfu = []
    for attention, recompute, stated in (("unfused", "selective", (37.8, 55.2)), ("flash", "none", (57.7, 62.4))):
        for b, measured in zip((1, 2), stated, strict=True):
            setup = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", 4, 8, b, 128, recompute, attention=attention)
            cost = predict_costs(setup).stages[1]
            flops = training_flops(setup.model, b, 2048, "papers") / 32
            predicted = 100 * flops / float(cost.forward_s + cost.backward_s) / 312e12
            stage_mfu.append((attention, b, measured, f"{predicted:.1f}"))
    return [
        "## Seconds by formula",
        "",
        "Where nothing was measured, a roofline predicts: products, in waves of tiles, at 90 % of the best that was "
        "measured of any (A100 "
        "86, H100 80 % of the peak), all else at 80 % of the memory's bandwidth, collectives at 77 % of the link's. "
        "Milliseconds of one "
        "stage and micro-batch, A100:",
        *table("model|recompute|kind|measured ms|predicted ms|error %", body),
        "None of these times had a say in the 90 %, which the published throughputs above have.",
        "",
        "MFU of one stage of GPT-3 96B alone, t=4 p=8 (measured by Huang et al. 2024):",
        *table("attention|b|measured %|predicted %", stage_mfu),
        "The jump from b=1 to b=2 without flash attention is Megatron's fused softmax, which takes only micro-batches "
        "times heads a rank "
        "in multiples of 4.",
        "",
    ]


def estimate_part() -> list[str]:
    body = []
    for attention, stages, whole in (
        ("unfused, recomputed", (37.8, 55.2), (34.0, 45.8)),
        ("flash", (57.7, 62.4), (52.0, 51.7)),
    ):
        result = estimate(128, 8, 2, 1, stages[1] / 100, stages[0] / 100)
        body.append((attention, f"{whole[1] / whole[0]:.3f}", f"{result.ratio:.3f}"))
    return [
        "## The gain from stage MFUs alone",
        "",
        "`bpipe estimate`, GPT-3 96B, t=4 p=8 B=128, b = 1 to 2 (Huang et al. 2024):",
        *table("attention|measured gain|estimated gain", body),
        "The formula knows no waiting and no other overhead: gains below 4 % are within its error, and the command "
        "says so.",
        "",
    ]


def run_part() -> list[str]:
    found = cpu_runs()
    body = []
    for run in found:
        setup = run.setup
        exact = sum(one == other for one, other in zip(run.measured, run.predicted, strict=True))
        body.append(
            (
                run.name,
                f"{setup.tensor}/{setup.pipeline}/{setup.num_microbatches}",
                f"{exact} of {len(run.measured)}",
                *(f"{run.measured[stage]} / {run.predicted[stage]}" for stage in (0, 1, -1)),
            )
        )
    stages = sum(len(run.measured) for run in found)
    exact = sum(one == other for run in found for one, other in zip(run.measured, run.predicted, strict=True))
    return [
        "## This project's own runs on CPUs",
        "",
        "Bytes of saved activations that a stage really held at most, as `--bpipe-report` measured them storage by "
        "storage, and what "
        "follows from the model's sizes alone (`--kernels cpu`) and the schedule. Trained with Megatron's own "
        "trainer: 8 layers of 128, "
        "4 heads, 256 tokens, micro-batches of 2; the LLaMA has RMSNorm, SwiGLU, grouped queries, rotary positions "
        "and no dropout. "
        "The commands are in `tests/data/cpu_runs.json`.",
        *table("run|t/p/m|stages exact|first stage, measured / predicted|second stage|last stage", body),
        f"{exact} of {stages} stages exact to the byte. With tensor parallelism these are the first rank's: the "
        f"others also hold copies of "
        "the batch they were sent, 8 bytes a token on the first stage and 4 on the last.",
        "",
    ]


PARTS = (
    replay_part,
    paper_part,
    grid_part,
    grid_mfu_part,
    memory_part,
    throughput_part,
    kept_back_part,
    experts_part,
    fp8_part,
    error_bars_part,
    roofline_part,
    estimate_part,
    run_part,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    options = parser.parse_args()
    text = "\n".join(
        [
            "# Predictions beside measurements",
            "",
            "Made by `scripts/validation/validate.py`; how the figures are computed is in `docs/model.md`.",
            "",
        ]
        + [line for part in PARTS for line in part()]
    )
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
