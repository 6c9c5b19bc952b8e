#!/usr/bin/env python3
"""Lay predictions beside measurements. In: published measurements (tests/data) and reports of runs. Out: docs/validation.md.

Usage: scripts/validate.py [--runs DIR ...] [--output docs/validation.md]

DIR is the folder of `--bpipe-report` of a run of this project. Everything else is in the repository. Without --output it prints.
Fits nothing: every constant is that of bpipe.models, the same for all rows. Needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bpipe.models.cluster import parse_cluster  # noqa: E402
from bpipe.models.compute import links, output_seconds, predict_costs, update_seconds  # noqa: E402
from bpipe.models.flops import mfu, training_flops  # noqa: E402
from bpipe.models.layout import Setup, split_layers  # noqa: E402
from bpipe.models.memory import predict_memory  # noqa: E402
from bpipe.models.model import PRESETS, Model, gpt  # noqa: E402
from bpipe.models.saved import sent_bytes, stage_bytes  # noqa: E402
from bpipe.plan.estimate import estimate  # noqa: E402
from bpipe.program import ProgramConfig, build  # noqa: E402
from bpipe.simulate.cost import Costs, StageCost  # noqa: E402
from bpipe.simulate.engine import simulate  # noqa: E402

DATA = ROOT / "tests" / "data"
SCOPES = ("none", "selective", "full")
PAPER_SCOPES = {"none": "none", "attention": "selective", "layer": "full"}


@dataclass(frozen=True)
class StageTimes:
    """What Kim et al. 2023 measured of one stage and micro-batch, milliseconds. `mfu_percent` where they state it."""

    model: str
    cluster: str
    tensor: int
    pipeline: int
    micro_batch: int
    global_batch: int
    recompute: str
    transfer_ms: float
    forward_ms: float
    backward_ms: float
    mfu_percent: float | None = None


STAGE_TIMES = (
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "none", 22.48, 36.32, 74.12),
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "selective", 7.63, 36.32, 83.57),
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "full", 0.58, 36.32, 110.33),
    StageTimes("gpt3-96b", "a100-80g:4x8", 4, 8, 2, 128, "selective", 15.63, 143.37, 287.90, 50.64),
    StageTimes("gpt3-134b", "a100-80g:6x8", 4, 12, 2, 192, "selective", 12.06, 126.87, 256.30),
)


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def setup_of(model: Model, cluster: str, t: int, p: int, b: int, batch: int, recompute: str, **changes: str) -> Setup:
    layers = split_layers(model.num_layers, p)
    assert layers is not None
    choices = {"attention": "unfused", "precision": "fp16", **changes}
    return Setup(model, parse_cluster(cluster), t, p, b, batch, 2048, layers, recompute, **choices)  # type: ignore[arg-type]


# -- replaying published pass times ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    method: str
    vocabulary: int
    measured_s: float
    predicted_s: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)


def published(vocabulary: int) -> Setup:
    """The model of the published runs: 8 A100s of one node, pure pipeline parallelism."""
    model = replace(gpt("published", 32, 3072, 24, vocabulary), tied_embedding=False)
    return setup_of(model, "a100-80g:1x8", 1, 8, 1, 128, "none", attention="flash")


def replays() -> list[Replay]:
    """Plain 1F1B with the pass times as given; links and the update from the device table."""
    found = []
    for row in rows("vocabulary_parallelism_a100.csv"):
        if row["method"] not in ("baseline", "redis"):
            continue
        setup = published(int(row["vocabulary"]))
        # Where layers were redistributed the last ranks have fewer; the update is bounded by the first, which kept its share.
        update = update_seconds(setup)[0][1]
        times = zip(row["forward_us"].split(), row["backward_us"].split(), strict=True)
        stages = tuple(
            StageCost(int(forward) / 1e6, int(backward) / 1e6, sent_bytes=sent_bytes(setup), optimizer_s=update)
            for forward, backward in times
        )
        report = simulate(build(ProgramConfig("1f1b", 8, int(row["micro_batches"]))), Costs(stages, links(setup), blocking=True))
        found.append(Replay(row["method"], int(row["vocabulary"]), float(row["iteration_ms"]) / 1e3, float(report.makespan_s)))
    return found


# -- the papers' stage times and grid --------------------------------------------------------------------------------------------------


def predicted_mfu(times: StageTimes) -> float:
    """Percent, from the stage times alone, balanced, with the papers' FLOPs: the stage times contain the output layer's share."""
    model = PRESETS[times.model]
    microbatches = times.global_batch // times.micro_batch
    schedule = build(ProgramConfig("1f1b", times.pipeline, microbatches, balance="bpipe"))
    cost = StageCost(times.forward_ms / 1e3, times.backward_ms / 1e3, transfer_s=times.transfer_ms / 1e3)
    report = simulate(schedule, Costs((cost,) * times.pipeline))
    devices = parse_cluster(times.cluster).num_devices
    return 100 * mfu(training_flops(model, times.global_batch, 2048, "papers"), float(report.makespan_s), devices, 312e12)


def stage_setup(times: StageTimes) -> Setup:
    return setup_of(
        PRESETS[times.model], times.cluster, times.tensor, times.pipeline, times.micro_batch, times.global_batch, times.recompute
    )


@dataclass(frozen=True)
class GridRow:
    """GiB the fullest rank needs: in the stated way; with less recomputation or, where that is balanced, without; the former balanced.

    `balanced_gib` is None for rows that are balanced.
    """

    row: dict[str, str]
    stated_gib: float
    less_gib: float
    balanced_gib: float | None
    limit_gib: float

    @property
    def agrees(self) -> bool:
        return self.stated_gib <= self.limit_gib < self.less_gib


def grid() -> list[GridRow]:
    """Every row of the paper's table."""
    found = []
    for row in rows("bpipe_gpt3_96b.csv"):
        scope = PAPER_SCOPES[row["recompute"]]
        balanced = row["balanced"] == "yes"
        size = (int(row["tensor"]), int(row["pipeline"]), int(row["micro_batch"]))
        stated = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", *size, 128, scope, balance="bpipe" if balanced else "none")
        less = replace(stated, balance="none") if balanced else replace(stated, recompute=SCOPES[SCOPES.index(scope) - 1])
        shared = None if balanced else _fullest_gib(replace(less, balance="bpipe"))
        limit = stated.cluster.device.memory_bytes / 2**30
        found.append(GridRow(row, _fullest_gib(stated), _fullest_gib(less), shared, limit))
    return found


def _fullest_gib(setup: Setup) -> float:
    return max(rank.peak_bytes for rank in predict_memory(setup)) / 2**30


def _size(one: GridRow) -> str:
    return f"t={one.row['tensor']} p={one.row['pipeline']} b={one.row['micro_batch']}"


# -- this project's own runs -----------------------------------------------------------------------------------------------------------


def runs(folders: Iterable[Path]) -> list[dict[str, object]]:
    """The rows of reports; exact where what was measured is what the schedule says for micro-batches of the measured size."""
    found = []
    for folder in folders:
        files = sorted(folder.glob("rank_*.json"))
        if not files:
            raise SystemExit(f"validate: {folder} has no rank_*.json: give the folder of --bpipe-report of a finished run")
        found += [{"run": folder.name, **json.loads(file.read_text())} for file in files]
    return found


# -- the document ----------------------------------------------------------------------------------------------------------------------


def table(titles: str, body: Iterable[Iterable[object]]) -> list[str]:
    names = titles.split("|")
    return ["", "| " + " | ".join(names) + " |", "|" + "---|" * len(names), *("| " + " | ".join(map(str, row)) + " |" for row in body), ""]


def replay_part() -> list[str]:
    found = replays()
    errors = [abs(one.error_percent) for one in found]
    return [
        "## Iteration times of real runs, from their pass times",
        "",
        "8 A100s, plain 1F1B, p = 8, m = 128 (published with Yeung et al. 2024). Given: every rank's forward and backward time. Predicted: "
        "the iteration. Messages of 12.6 MB at 231 GB/s and 20 us, blocking as in Megatron's 1F1B, and one update of the weights.",
        *table(
            "method|vocabulary|measured s|predicted s|error %",
            ((one.method, one.vocabulary, f"{one.measured_s:.4f}", f"{one.predicted_s:.4f}", f"{one.error_percent:+.2f}") for one in found),
        ),
        f"Mean error {sum(errors) / len(errors):.2f} %, largest {max(errors):.2f} %. All are low: what happens once an iteration besides "
        "(data, norms of gradients, logging) is in the measurement and not in the prediction.",
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
        "Kim et al. 2023: seconds of one stage's forward, backward and transfer. Predicted: the whole iteration, balanced, FLOPs by the "
        "papers' formula, peak 312 TFLOP/s. An MFU is stated for GPT-3 96B; for the others this table only predicts.",
        *table("model|t/p/b|recompute|stated MFU %|predicted MFU %|transfer GB|within a forward GB/s", map(line, STAGE_TIMES)),
        f"The paper states 3.48 GB and 24.25 GB/s for 96B with recomputed attention; without recomputation 100.31 GB/s, here "
        f"{none / STAGE_TIMES[3].forward_ms / 1e6:.2f}.",
        "",
    ]


def grid_part() -> list[str]:
    found = grid()
    missed = [_size(one) for one in found if not one.agrees]
    unclaimed = [_size(one) for one in found if one.balanced_gib is not None and one.balanced_gib <= one.limit_gib < one.less_gib]
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
        "Kim et al. 2023, tables 2 and 7: the least recomputation that fits, and whether it fits only balanced. GiB of the fullest rank, "
        f"of {found[0].limit_gib:.2f}; the other column is the same with less recomputation or, for balanced rows, without balancing.",
        *table("t/p/b|recompute|balanced|needs GiB|with less GiB|agrees", body),
        f"{len(found) - len(missed)} of {len(found)} agree; missed: {', '.join(missed) or 'none'}. By every part a formula knows, "
        "t=8 p=2 b=2 needs a little less than t=4 p=4 b=1, and of the two only the second is said to fit: no constants satisfy both.",
        "",
        f"With less recomputation and balanced, the model says that these would fit too, of which the paper says nothing: "
        f"{', '.join(unclaimed) or 'none'}.",
        "",
        "Constants, the same for all rows, in `bpipe/models/memory.py` with their sources: 2 + 2 + 12/d bytes a parameter (16-bit "
        "gradients, ZeRO-1), 79.25 GiB usable, 0.5 GiB context, 688 MiB a communicator (544 between two), 15 % fragmentation of "
        "activations and working memory.",
        "",
    ]


def memory_part() -> list[str]:
    body = []
    for row in rows("vocabulary_parallelism_a100.csv"):
        if row["method"] != "baseline":
            continue
        memory = predict_memory(published(int(row["vocabulary"])))
        predicted = max(rank.state_bytes + rank.activations_bytes + rank.working_bytes for rank in memory) / 2**20
        measured = float(row["memory_max_mb"])
        body.append((row["vocabulary"], f"{measured:.0f}", f"{predicted:.0f}", f"{100 * (predicted / measured - 1):+.1f}"))
    return [
        "## Memory of real runs",
        "",
        "The same 8 A100s: MiB allocated at peak by the fullest rank (overhead and fragmentation are not allocated, so not in it).",
        *table("vocabulary|measured MiB|predicted MiB|error %", body),
    ]


def roofline_part() -> list[str]:
    body = []
    for times in STAGE_TIMES:
        cost = predict_costs(stage_setup(times)).stages[1]
        for kind, measured, predicted in (("forward", times.forward_ms, cost.forward_s), ("backward", times.backward_ms, cost.backward_s)):
            ms = float(predicted) * 1e3
            body.append((times.model, times.recompute, kind, f"{measured:.2f}", f"{ms:.2f}", f"{100 * (ms / measured - 1):+.0f}"))
    for vocabulary, forward, backward in ((32000, 10.61, 21.36), (256000, 10.44, 20.95)):
        cost = predict_costs(published(vocabulary)).stages[1]
        for kind, measured, predicted in (("forward", forward, cost.forward_s), ("backward", backward, cost.backward_s)):
            ms = float(predicted) * 1e3
            body.append((f"32 x 3072, V={vocabulary}", "none", kind, f"{measured:.2f}", f"{ms:.2f}", f"{100 * (ms / measured - 1):+.0f}"))
    for kind, measured, predicted in zip(("forward", "backward"), (26.4, 31.2), output_seconds(published(256000)), strict=True):
        ms = predicted * 1e3
        body.append(("V=256000", "-", f"output layer {kind}", f"{measured:.2f}", f"{ms:.2f}", f"{100 * (ms / measured - 1):+.0f}"))
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
        "Where nothing was measured, a roofline predicts: products at 70 % of the peak, all else at 80 % of the memory's bandwidth, "
        "collectives at 77 % of the link's. Milliseconds of one stage and micro-batch, A100:",
        *table("model|recompute|kind|measured ms|predicted ms|error %", body),
        "MFU of one stage of GPT-3 96B alone, t=4 p=8 (measured by Huang et al. 2024):",
        *table("attention|b|measured %|predicted %", stage_mfu),
        "The jump from b=1 to b=2 without flash attention is Megatron's fused softmax, which takes only micro-batches times heads a rank "
        "in multiples of 4.",
        "",
    ]


def estimate_part() -> list[str]:
    body = []
    for attention, stages, whole in (("unfused, recomputed", (37.8, 55.2), (34.0, 45.8)), ("flash", (57.7, 62.4), (52.0, 51.7))):
        result = estimate(128, 8, 2, 1, stages[1] / 100, stages[0] / 100)
        body.append((attention, f"{whole[1] / whole[0]:.3f}", f"{result.ratio:.3f}"))
    return [
        "## The gain from stage MFUs alone",
        "",
        "`bpipe estimate`, GPT-3 96B, t=4 p=8 B=128, b = 1 to 2 (Huang et al. 2024):",
        *table("attention|measured gain|estimated gain", body),
        "The formula knows no waiting and no other overhead: gains below 4 % are within its error, and the command says so.",
        "",
    ]


def run_part(folders: list[Path]) -> list[str]:
    found = runs(folders)
    if not found:
        return []
    keys = ("run", "rank", "stage", "peak_microbatches", "predicted_microbatches", "peak_bytes", "predicted_bytes")
    exact = sum(row["peak_bytes"] == row["predicted_bytes"] for row in found)
    return [
        "## This project's own runs on CPUs",
        "",
        "Bytes of saved activations a rank really held at most, and what the schedule says for micro-batches of the measured size.",
        *table("run|rank|stage|micro-batches|predicted|bytes|predicted bytes", ([row[key] for key in keys] for row in found)),
        f"{exact} of {len(found)} exact to the byte.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="DIR", help="folders of --bpipe-report")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    options = parser.parse_args()
    parts = (replay_part(), paper_part(), grid_part(), memory_part(), roofline_part(), estimate_part(), run_part(options.runs))
    text = "\n".join(
        [
            "# Predictions beside measurements",
            "",
            "Made by `scripts/validate.py`; how the figures are computed is in `docs/planning.md`.",
            "",
        ]
        + [line for part in parts for line in part]
    )
    if options.output is None:
        print(text, end="")
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
