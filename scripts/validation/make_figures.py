#!/usr/bin/env python3
"""Make the figures of the documentation.

In: the repository, and the folder of a quickstart's two runs. Out: docs/figures, svg and png.

Usage: scripts/validation/make_figures.py [--runs runs/quickstart] [--output docs/figures]

    schedule   1F1B of 4 stages and 8 micro-batches, without balancing and with it (Kim et al. 2023, figure 4)
    families   1F1B, V-Half, balanced grouped interleaving and 1F1B in slices of 4 ranks, simulated, to one scale
    every      every family of schedules at 4 ranks and 8 micro-batches, on the unit grid
    memory     measured peaks of both runs' stages beside the predicted ones (figure 8); needs --runs, with plain/ and balanced/ in it
    gpu_memory the same of four ranks on one H200, from the records in tests/data/h200
    overhead   predicted from the stage times that the paper measured: how much longer an iteration is, by batch size (figure 9)
    ranking    `bpipe plan`'s ten fastest configurations of GPT-3 96B on 32 A100s (figure 7)

Draws nothing by hand and knows no numbers of its own: stage times are those of scripts/validation/measurements.py.
Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.balance.config import BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.draw.picture import Picture, lay_out, stack
from bpipe.draw.plots import Overhead, Ranked, StagePeaks, memory_chart, overhead_chart, ranking_chart, to_svg, write
from bpipe.draw.png import render_png
from bpipe.draw.svg import render_svg
from bpipe.draw.timeline import lay_out_simulation
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.model import PRESETS
from bpipe.record.compare.read import read_stages
from bpipe.record.report.report import report_of
from bpipe.schedule.families.families import FAMILIES
from bpipe.schedule.families.family import ALIKE
from bpipe.schedule.families.timing import iteration_time
from bpipe.schedule.memory import peak_counts, plain
from bpipe.simulate.cost import Link, Links, StageCost, uniform
from bpipe.simulate.engine import simulate
from validation.measurements import STAGE_TIMES, StageTimes

ROOT = Path(__file__).resolve().parents[2]
# Pixels of a picture that a page shows beside its text in the size in which it was drawn.
PAGE = 650
BATCH_SIZES = (16, 32, 64, 128, 256)
SCOPES = {"none": "nothing recomputed", "selective": "attention recomputed", "full": "layers recomputed"}


def draw_schedule(stem: Path) -> list[Path]:
    """Draw two halves, in the project's own picture of a schedule."""
    subtitles = {"none": "without balancing", "bpipe": "with balancing"}
    halves = stack(
        [
            lay_out(build(ScheduleConfig("1f1b", 4, 8, balance=named_balance(balance))), text)
            for balance, text in subtitles.items()
        ]
    )
    return write_picture(halves, stem)


def draw_families(stem: Path) -> list[Path]:
    """To one scale: on a rank a forward, and either half of a backward, take a second, and a micro-batch saves a
    GiB."""
    configs = {
        "1F1B": ScheduleConfig("1f1b", 4, 8),
        "V-Half": ScheduleConfig("v-half", 4, 8, num_chunks=2),
        "Grouped interleaving, balanced": ScheduleConfig(
            "grouped-interleaved", 4, 8, num_chunks=2, balance=BalanceConfig()
        ),
        "1F1B in 4 slices": ScheduleConfig("1f1b", 4, 8, slices=4),
    }
    simulations = {}
    for name, config in configs.items():
        parts = config.num_chunks * config.slices
        share, saved_bytes = 1 / parts, 2**30 // parts
        cost = StageCost(
            forward_s=share, backward_s=2 * share, weight_s=share, saved_bytes=saved_bytes, moved_bytes=saved_bytes
        )
        # A transfer takes half as long as the computation beside it.
        links = Links(Link(bytes_per_s=2**31))
        simulations[name] = simulate(build(config), uniform(config.num_ranks * config.num_chunks, cost, links))
    longest = max(float(simulation.makespan_s) for simulation in simulations.values())
    return write_picture(
        stack([lay_out_simulation(simulation, name, longest, PAGE) for name, simulation in simulations.items()]), stem
    )


def draw_every_family(stem: Path) -> list[Path]:
    """One below the other, on the unit grid; svg alone, of which a browser shows any size."""
    drawn = []
    for name, family in FAMILIES.items():
        config = ScheduleConfig(name, 4, 8, num_chunks=family.chunks(2)[-1])
        schedule = build(config)
        peak = plain(Fraction(max(peak_counts(schedule)), config.num_chunks))
        bubble = float(iteration_time(schedule, ALIKE).bubble_percent)
        drawn.append(lay_out(schedule, f"at most {peak} micro-batches held, bubble {bubble:.1f} %"))
    file = stem.with_suffix(".svg")
    file.write_text(render_svg(stack(drawn)), encoding="utf-8")
    return [file]


def write_picture(picture: Picture, stem: Path) -> list[Path]:
    files = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    files[0].write_text(render_svg(picture), encoding="utf-8")
    files[1].write_bytes(render_png(picture))
    return files


def read_memory(runs: Path) -> list[StagePeaks]:
    """Read both runs of a quickstart. Raises ValueError where a rank's file is missing or the folders are swapped."""
    found, _ = read_stages(runs / "plain")
    if not found:
        raise ValueError(
            f"{runs / 'plain'}: no rank_*.json there; --runs takes the folder that scripts/quickstart.sh fills"
        )
    plain, balanced = (
        read_stages(runs / name, 1 + max(found), name == "balanced")[0] for name in ("plain", "balanced")
    )
    return [
        StagePeaks(
            stage,
            plain[stage].peak_bytes,
            plain[stage].predicted_bytes,
            plain[stage].peak_microbatches,
            balanced[stage].peak_bytes,
            balanced[stage].predicted_bytes,
            balanced[stage].peak_microbatches,
        )
        for stage in sorted(plain)
    ]


def draw_memory(stem: Path, runs: Path) -> list[Path]:
    return write(
        memory_chart(read_memory(runs), "The quickstart: most memory of saved activations on each stage"), stem
    )


def read_records(runs: Path) -> list[StagePeaks]:
    """Read the peaks of both runs from what their ranks recorded."""
    stages = [report_of(runs / name).comparison.stages for name in ("plain", "balanced")]
    return [
        StagePeaks(
            plain.stage,
            plain.measured_bytes or 0,
            plain.predicted_bytes or 0,
            plain.measured_microbatches or 0,
            balanced.measured_bytes or 0,
            balanced.predicted_bytes or 0,
            balanced.measured_microbatches or 0,
        )
        for plain, balanced in zip(*stages, strict=True)
    ]


def draw_gpu_memory(stem: Path) -> list[Path]:
    title = "Four ranks on one H200: most memory of saved activations on each stage"
    file = stem.with_suffix(".svg")
    file.write_text(to_svg(memory_chart(read_records(ROOT / "tests" / "data" / "h200"), title)), encoding="utf-8")
    return [file]


def overheads(times: StageTimes, batch_sizes: tuple[int, ...] = BATCH_SIZES) -> list[Overhead]:
    """Return overheads of both kinds of transfer at one stage's times.

    Raises ValueError for a batch that is no multiple of the micro-batch.
    """
    costs = uniform(times.pipeline, StageCost(times.forward_ms, times.backward_ms, transfer_s=times.transfer_ms))
    percents: dict[bool, list[float]] = {True: [], False: []}
    for size in batch_sizes:
        if size % times.micro_batch:
            raise ValueError(f"batch size {size} is no multiple of the micro-batch size {times.micro_batch}")
        config = ScheduleConfig("1f1b", times.pipeline, size // times.micro_batch)
        plain = simulate(build(config), costs).makespan_s
        balanced = build(replace(config, balance=BalanceConfig()))
        for kind, found in percents.items():
            report = simulate(balanced, replace(costs, synchronous=kind))
            found.append(100 * (float(report.makespan_s / plain) - 1))
    return [Overhead(SCOPES[times.recompute], batch_sizes, tuple(percents[kind]), kind) for kind in (True, False)]


def draw_overhead(stem: Path) -> list[Path]:
    # With whole layers recomputed a transfer is a fiftieth of a forward: nothing to see.
    measured = [times for times in STAGE_TIMES if times.model == "gpt3-13b" and times.recompute != "full"]
    lines = [line for times in measured for line in overheads(times)]
    title = "Predicted cost of balancing: GPT-3 13B in 8 stages, at the stage times of Kim et al. 2023"
    return write(overhead_chart(lines, title, "batch size (micro-batches of 1)"), stem)


def draw_ranking(stem: Path) -> list[Path]:
    cluster = parse_cluster("a100-80g:4x8")
    space = Space(PRESETS["gpt3-96b"], cluster, global_batch=128, sequence=2048, attention="unfused", precision="fp16")
    rows = []
    for found in search(space, 10).rows:
        setup = found.prediction.setup
        form = f"interleaved v={setup.num_chunks}" if setup.num_chunks > 1 else setup.schedule.upper()
        label = (
            f"t={setup.tensor} p={setup.pipeline} d={setup.data} b={setup.micro_batch}, {form}, "
            f"{SCOPES[setup.recompute]}"
        )
        note = "" if found.unbalanced_bytes is None else f"without: {found.unbalanced_bytes / 2**30:.1f} GiB"
        rows.append(Ranked(label, 100 * found.prediction.mfu, found.unbalanced_bytes is not None, note))
    limit = cluster.device.memory_bytes / 2**30
    title = f"bpipe plan: GPT-3 96B on 32 A100s of {limit:.1f} GiB, batch 128, unfused attention"
    return write(ranking_chart(rows, title), stem)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the figures of the documentation.")
    parser.add_argument("--runs", type=Path, help="folder of a quickstart's two runs, such as runs/quickstart")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures", help="default docs/figures")
    options = parser.parse_args()
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [
            *draw_schedule(folder / "schedule"),
            *draw_families(folder / "families"),
            *draw_every_family(folder / "every"),
        ]
        files += [*draw_overhead(folder / "overhead"), *draw_ranking(folder / "ranking")]
        files += draw_gpu_memory(folder / "gpu_memory")
        if options.runs is None:
            print(
                "memory: not made, it needs measurements: run scripts/quickstart.sh, then this with --runs "
                "runs/quickstart"
            )
        else:
            files += draw_memory(folder / "memory", options.runs)
    except (ValueError, OSError) as error:
        print(f"make_figures.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(file) for file in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
