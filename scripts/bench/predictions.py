#!/usr/bin/env python3
"""Compare predictions with measurements: published runs, one run on an H200, and this project's own runs on CPUs.

In: the measurements in tests/data. Out: the tables of docs/validation.md.

Usage: scripts/bench/predictions.py [--rows] [--write docs/validation.md]

Nothing is fitted: every constant is that of bpipe.predict, the same for all runs. Needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bpipe.balance.config import BALANCES, BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.plan.estimate import estimate
from bpipe.plan.predict import costs_of, predict, simulation_of
from bpipe.plan.timing import steady_timing
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.error_bars import AMPERE, BLACKWELL, CALIBRATED, EXPERTS, HOPPER, MANY_RUNS, ErrorBars
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.fp8 import Fp8
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layer_variants import Experts, Latent, Routing
from bpipe.predict.layers.ends import output_seconds
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.links import links
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS, Model, gpt, llama
from bpipe.predict.rates import LINK_EFFICIENCY, LINK_LATENCY_S
from bpipe.predict.replicas import update_seconds
from bpipe.predict.saved_tensors import moved_bytes, saves_input
from bpipe.predict.sizes import sent_bytes
from bpipe.predict.switches import Switches
from bpipe.predict.tensor_parallel import exposed
from bpipe.record.report.memory import RankSizes, rank_peaks
from bpipe.record.report.report import report_of
from bpipe.schedule.families.families import default_family
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import CollectiveCost, Costs, ShardCost, StageCost
from bpipe.simulate.engine import simulate

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MIB = 2**20
A100_FLOPS_PER_S = 312e12
# Target for times by formula: mean and largest error in percent, without signs.
MOST_MEAN, MOST_LARGEST = 4, 10
SECONDS, PEAK_GB = "iteration_s", "peak_memory_gb"


@dataclass(frozen=True)
class Row:
    """A measured value and its prediction.

    Attributes:
        source: who published it.
        run: which of their runs it is.
        quantity: the unit of both values; a time, a throughput, or memory.
        setup: the predicted configuration, if there is one.
    """

    source: str
    run: str
    quantity: str
    measured: float
    predicted: float
    setup: Setup | None = None

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def seconds_ratio(self) -> float:
        """Predicted divided by measured seconds. A higher throughput means fewer seconds."""
        ratio = self.predicted / self.measured
        return ratio if self.quantity == SECONDS else 1 / ratio

    @property
    def configuration(self) -> Setup:
        assert self.setup is not None
        return self.setup


def read_rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def setup_of(
    model: Model, cluster: str, t: int, p: int, b: int, batch: int, recompute: str, **changes: object
) -> Setup:
    """Return a configuration with equal stages and, unless `changes` says otherwise, unfused attention in fp16."""
    layers = split_layers(model.num_layers, p)
    assert layers is not None
    choices = {"attention": "unfused", "precision": "fp16", **changes}
    return Setup(model, parse_cluster(cluster), t, p, b, batch, 2048, layers, recompute, **choices)  # type: ignore[arg-type]


def allocated_bytes(setup: Setup) -> list[int]:
    """Return the most that the allocator of each rank's device allocates: without overhead and fragmentation."""
    return [rank.state_bytes + rank.activations_bytes + rank.working_bytes for rank in predict_memory(setup)]


def fullest_gib(setup: Setup) -> float:
    return max(rank.peak_bytes for rank in predict_memory(setup)) / GIB


# -- Yeung et al. 2024: pass times, iteration times and peaks of 8 A100s
# ---------------------------------------------------------------------------------------------------------------------

YEUNG = "Yeung 2024"
# By method, how the vocabulary is split, and the share of S in S and T together: of three products, algorithm 1 leaves
# two to T and algorithm 2 one.
SHARDED = {
    "vocab-1": (Vocabulary.ONE, 1 / 3),
    "vocab-2": (Vocabulary.TWO, 2 / 3),
    "interlaced": (Vocabulary.INTERLACED, 1 / 3),
}
# Layers of each rank with `redis`, by vocabulary, as the ranks' forward times show them: 2.65 ms per layer.
REDISTRIBUTED = {
    256000: (4, 4, 4, 5, 5, 5, 5, 0),
    128000: (4, 4, 4, 4, 4, 5, 5, 2),
    64000: (4, 4, 4, 4, 4, 4, 5, 3),
    32000: (4,) * 8,
}


def yeung_setup(vocabulary: int, method: str = "baseline") -> Setup:
    model = replace(gpt("published", 32, 3072, 24, vocabulary), tied_embedding=False)
    setup = setup_of(model, "a100-80g:1x8", 1, 8, 1, 128, "none", attention="flash")
    if method == "redis":
        return replace(setup, layers=REDISTRIBUTED[vocabulary])
    return replace(setup, vocabulary=SHARDED[method][0], input_shards=True) if method in SHARDED else setup


def replays() -> Iterator[Row]:
    """Simulate 1F1B with the published pass times, with the vocabulary in shards or not."""
    for row in read_rows("vocabulary_parallelism_a100.csv"):
        method = row["method"]
        setup = yeung_setup(int(row["vocabulary"]), method)
        passes = zip(
            _seconds(row["forward_us"]),
            _seconds(row["backward_us"]),
            (update for _, update in update_seconds(setup)),
            strict=True,
        )
        stages = tuple(
            StageCost(forward, backward, sent_bytes=sent_bytes(setup), optimizer_s=update)
            for forward, backward, update in passes
        )
        costs = Costs(stages, links(setup), exchange=Exchange.MEGATRON_1F1B)
        if method in SHARDED:
            (collective, *_) = _seconds(row["communication_us"])
            costs = replace(
                costs,
                exchange=Exchange.POSTED,
                shards=_shards(row),
                collectives=CollectiveCost(*(collective,) * 5),
            )
        seconds = float(simulate(build(setup.program(int(row["micro_batches"]))), costs).makespan_s)
        run = f"{method}, V={row['vocabulary']}"
        yield Row(YEUNG, run, SECONDS, float(row["iteration_ms"]) / 1e3, seconds, setup)


def _shards(row: dict[str, str]) -> tuple[ShardCost, ...]:
    share = SHARDED[row["method"]][1]
    passes = zip(*(_seconds(row[f"{name}_us"]) for name in ("output", "input_forward", "input_backward")), strict=True)
    return tuple(
        ShardCost(share * output, (1 - share) * output, forward, backward) for output, forward, backward in passes
    )


def _seconds(microseconds: str) -> list[float]:
    return [int(text) / 1e6 for text in microseconds.split()]


def yeung_peaks() -> Iterator[Row]:
    """Compare the allocated memory of the fullest rank."""
    for row in read_rows("vocabulary_parallelism_a100.csv"):
        predicted = max(allocated_bytes(yeung_setup(int(row["vocabulary"]), row["method"]))) / MIB
        run = f"{row['method']}, V={row['vocabulary']}"
        yield Row(YEUNG, run, "MiB", float(row["memory_max_mb"]), predicted)


# -- Kim et al. 2023 and Huang et al. 2024: stage times, and GPT-3 96B on 32 A100s
# ---------------------------------------------------------------------------------------------------------------------

KIM, HUANG = "Kim 2023", "Huang 2024"
SCOPES = ("none", "selective", "full")
KIM_SCOPES = {"none": "none", "attention": "selective", "layer": "full"}
# GPT-3 96B, Huang et al.: MFU in percent of one stage at b = 1 and 2, and of the whole training.
STAGE_MFU = {("unfused", "selective"): (37.8, 55.2), ("flash", "none"): (57.7, 62.4)}
WHOLE_MFU = {"unfused": (34.0, 45.8), "flash": (52.0, 51.7)}
# Milliseconds of the pass times of Yeung et al.: of a stage without the output layer, by vocabulary, and of that layer.
YEUNG_STAGE_MS = {32000: (10.61, 21.36), 256000: (10.44, 20.95)}
YEUNG_OUTPUT_MS = (26.4, 31.2)


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of one stage and one micro-batch, by Kim et al. 2023. `mfu_percent`: of the training, if stated."""

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

    @property
    def setup(self) -> Setup:
        sizes = (self.tensor, self.pipeline, self.micro_batch, self.global_batch)
        return setup_of(PRESETS[self.model], self.cluster, *sizes, self.recompute)


STAGE_TIMES = (
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "none", 22.48, 36.32, 74.12),
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "selective", 7.63, 36.32, 83.57),
    StageTimes("gpt3-13b", "a100-80g:1x8", 1, 8, 1, 32, "full", 0.58, 36.32, 110.33),
    StageTimes("gpt3-96b", "a100-80g:4x8", 4, 8, 2, 128, "selective", 15.63, 143.37, 287.90, 50.64),
    StageTimes("gpt3-134b", "a100-80g:6x8", 4, 12, 2, 192, "selective", 12.06, 126.87, 256.30),
)


def stage_times() -> Iterator[Row]:
    for times in STAGE_TIMES:
        cost = predict_costs(times.setup).stages[1]
        name = f"{times.model}, recompute {times.recompute}"
        yield from _passes(KIM, name, (times.forward_ms, times.backward_ms), (cost.forward_s, cost.backward_s))
    for vocabulary, measured_ms in YEUNG_STAGE_MS.items():
        cost = predict_costs(yeung_setup(vocabulary)).stages[1]
        yield from _passes(YEUNG, f"stage, V={vocabulary}", measured_ms, (cost.forward_s, cost.backward_s))
    yield from _passes(YEUNG, "output layer", YEUNG_OUTPUT_MS, output_seconds(yeung_setup(256000)))


def _passes(source: str, name: str, measured_ms: Sequence[float], predicted_s: Sequence[Any]) -> Iterator[Row]:
    for kind, measured, predicted in zip(("forward", "backward"), measured_ms, predicted_s, strict=True):
        yield Row(source, f"{name}, {kind}", "ms", measured, float(predicted) * 1e3)


def mfu_from_stage_times() -> Iterator[Row]:
    """Simulate balanced 1F1B with the stage times, which contain the output layer's share."""
    for times in STAGE_TIMES:
        if times.mfu_percent is None:
            continue
        microbatches = times.global_batch // times.micro_batch
        schedule = build(ScheduleConfig("1f1b", times.pipeline, microbatches, balance=BalanceConfig()))
        cost = StageCost(times.forward_ms / 1e3, times.backward_ms / 1e3, transfer_s=times.transfer_ms / 1e3)
        seconds = float(simulate(schedule, Costs((cost,) * times.pipeline)).makespan_s)
        flops = training_flops(PRESETS[times.model], times.global_batch, 2048, "papers")
        predicted = 100 * mfu(flops, seconds, parse_cluster(times.cluster).num_devices, A100_FLOPS_PER_S)
        yield Row(KIM, times.model, "% MFU", times.mfu_percent, predicted)


def stage_mfu() -> Iterator[Row]:
    """Compare the MFU of one stage alone."""
    for (attention, recompute), stated in STAGE_MFU.items():
        for b, measured in zip((1, 2), stated, strict=True):
            setup = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", 4, 8, b, 128, recompute, attention=attention)
            cost = predict_costs(setup).stages[1]
            flops = training_flops(setup.model, b, 2048, "papers") / 32
            predicted = 100 * flops / float(cost.forward_s + cost.backward_s) / A100_FLOPS_PER_S
            yield Row(HUANG, f"{attention} attention, b={b}", "% MFU", measured, predicted)


def gains() -> Iterator[Row]:
    """Compare `bpipe estimate` with what a micro-batch of 2 instead of 1 gained."""
    for (attention, _), (small, large) in STAGE_MFU.items():
        before, after = WHOLE_MFU[attention]
        yield Row(HUANG, attention, "gain", after / before, estimate(128, 8, 2, 1, large / 100, small / 100).ratio)


@dataclass(frozen=True)
class GridRow:
    """A configuration for which Kim et al. state the least recomputation that fits.

    Attributes:
        name: t/p/b.
        needs_gib: need of the fullest rank in the stated way.
        less_gib: the same one step below: with less recomputation or, if balanced, without balancing.
        limit_gib: what a device has.
        mfu: measured and predicted MFU in percent.
    """

    name: str
    recompute: str
    balanced: str
    needs_gib: float
    less_gib: float
    limit_gib: float
    mfu: Row

    @property
    def agrees(self) -> bool:
        return self.needs_gib <= self.limit_gib < self.less_gib


@cache
def grid() -> tuple[GridRow, ...]:
    compared = []
    for row in read_rows("bpipe_gpt3_96b.csv"):
        scope, balanced = KIM_SCOPES[row["recompute"]], row["balanced"] == "yes"
        t, p, b = (int(row[name]) for name in ("tensor", "pipeline", "micro_batch"))
        balance = EVENLY if balanced else None
        setup = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", t, p, b, 128, scope, balance=balance)
        less = replace(setup, balance=None) if balanced else replace(setup, recompute=SCOPES[SCOPES.index(scope) - 1])
        name = f"{t}/{p}/{b}"
        predicted = 100 * predict(setup, simulation=simulation_of(setup), formula="papers").mfu
        percent = Row(KIM, name, "% MFU", float(row["mfu_percent"]), predicted)
        limit = setup.cluster.device.memory_bytes / GIB
        gib = (fullest_gib(setup), fullest_gib(less), limit)
        compared.append(GridRow(name, row["recompute"], row["balanced"], *gib, percent))
    return tuple(compared)


def grid_mfu() -> Iterator[Row]:
    return (row.mfu for row in grid())


# -- published throughputs and peaks
# ---------------------------------------------------------------------------------------------------------------------

DEVICES = {"A100-80GB": "a100-80g", "H100-80GB": "h100-80g"}
DEVICES_PER_NODE = 8
# Qi et al. do not publish their vocabulary; this is the size of their tokenizer's.
USUAL_VOCABULARY = 32000
# As in the published recipe, whose `ub_tp_comm_overlap: true` is Megatron's --tp-comm-overlap.
NVIDIA = Switches(overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_bf16=True, tp_comm_overlap=True)
# Without sequence parallelism, each tensor-parallel rank of these runs sent a part of a message.
SCATTERING = ("Narayanan", "Korthikanti")
# Assumed to have run before backwards hid tensor-parallel sums; the paper does not say.
WAITING = ("Narayanan",)
# Tried where the source states neither: its authors took the best.
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8), tuple(range(1, 9))


@cache
def published() -> tuple[Row, ...]:
    return tuple(map(_published, read_rows("published_throughput.csv")))


def _published(row: dict[str, str]) -> Row:
    if row["quantity"] == PEAK_GB:
        # As many micro-batches as fill the pipeline, three times.
        setup = next(_setups(row, 3 * int(row["pipeline"]) * int(row["micro_batch"])))
        predicted = max(allocated_bytes(setup)) / 1e9
    else:
        setups = [setup for setup in _setups(row, int(row["global_batch"])) if row["micro_batch"] or _fits(setup)]
        times = [(_iteration_s(setup, row["source"]), setup) for setup in setups]
        seconds, setup = min(times, key=lambda time: time[0])
        predicted = _in_unit(row["quantity"], setup, seconds)
    run = f"{row['model']}, {row['gpus']} GPUs, t/p/v/b {setup.tensor}/{setup.pipeline}/{setup.num_chunks}"
    run = f"{run}/{setup.micro_batch}, recompute {setup.recompute}"
    return Row(row["source"].split(" (")[0], run, row["quantity"], float(row["measured"]), predicted, setup)


def _setups(row: dict[str, str], global_batch: int) -> Iterator[Setup]:
    """Yield what the row says. If it leaves the micro-batch or the chunks open, yield every possibility."""
    chunks = (int(row["chunks"]),) if row["chunks"] else CHUNKS if int(row["pipeline"]) > 1 else (1,)
    sizes = (int(row["micro_batch"]),) if row["micro_batch"] else MICRO_BATCHES
    for num_chunks in chunks:
        for micro_batch in sizes:
            try:
                yield _published_setup(row, num_chunks, micro_batch, global_batch)
            except ValueError:
                # The batch or the layers do not divide, so its authors did not run it either.
                if row["micro_batch"] and row["chunks"]:
                    raise


def _published_setup(row: dict[str, str], chunks: int, micro_batch: int, global_batch: int) -> Setup:
    sequence, gpus, pipeline = int(row["sequence"]), int(row["gpus"]), int(row["pipeline"])
    vocabulary = int(row["vocabulary"] or USUAL_VOCABULARY)
    model = gpt(row["model"], int(row["layers"]), int(row["hidden"]), int(row["heads"]), vocabulary, sequence)
    of_nvidia, of_qi = row["source"].startswith("NVIDIA"), row["source"].startswith("Qi")
    per_node = min(DEVICES_PER_NODE, gpus)
    stages = pipeline * chunks
    layers = _shorter_ends(model.num_layers, stages) if of_qi else split_layers(model.num_layers, stages)
    if layers is None:
        raise ValueError(f"{model.num_layers} layers do not divide into {stages} stages")
    return Setup(
        # Qi et al. leave the output layer untied.
        replace(model, tied_embedding=not of_qi),
        parse_cluster(f"{DEVICES[row['gpu']]}:{gpus // per_node}x{per_node}"),
        int(row["tensor"]),
        pipeline,
        micro_batch,
        global_batch,
        sequence,
        layers,
        row["recompute"],
        row["attention"],
        "interleaved-1f1b" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        precision="bf16" if of_nvidia else "fp16",
        distributed_optimizer=row["distributed_optimizer"] == "yes",
        sequence_parallel=row["sequence_parallel"] == "yes",
        switches=NVIDIA if of_nvidia else Switches(no_overlap_p2p_communication=chunks > 1),
    )


def _shorter_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers with one less on the first and on the last stage."""
    most = (num_layers + 2) // num_stages
    return (most - 1, *(most,) * (num_stages - 2), most - 1)


def _fits(setup: Setup) -> bool:
    return all(rank.fits for rank in predict_memory(setup))


def _iteration_s(setup: Setup, source: str = "") -> float:
    costs = costs_of(setup)
    if source.startswith(WAITING):
        costs = _waiting(setup, costs)
    if source.startswith(SCATTERING):
        costs = _scattered(setup, costs)
    return steady_timing(setup, costs).iteration_s


def _waiting(setup: Setup, costs: Costs) -> Costs:
    """Make backwards wait for their tensor-parallel sums, which Megatron has hidden since 2022."""
    waits = exposed(setup)
    hidden = waits.input_half_s - waits.backward_s
    stages = zip(costs.stages, setup.layers, strict=True)
    return replace(
        costs, stages=tuple(replace(cost, backward_s=cost.backward_s + num * hidden) for cost, num in stages)
    )


def _scattered(setup: Setup, costs: Costs) -> Costs:
    """Let every tensor-parallel rank send a part, which the receivers gather (Narayanan et al. 2021, section 4.1)."""
    if setup.tensor == 1 or setup.sequence_parallel:
        return costs
    share = (setup.tensor - 1) / setup.tensor
    inside = setup.cluster.device.inside_bytes_per_s * LINK_EFFICIENCY
    gathered = sent_bytes(setup) * share / inside + LINK_LATENCY_S
    stages = tuple(
        replace(
            cost,
            sent_bytes=cost.sent_bytes // setup.tensor,
            forward_s=cost.forward_s + gathered * (stage > 0),
            backward_s=cost.backward_s + gathered * (stage < setup.num_stages - 1),
        )
        for stage, cost in enumerate(costs.stages)
    )
    return replace(costs, stages=stages)


def _in_unit(quantity: str, setup: Setup, seconds: float) -> float:
    devices = setup.cluster.num_devices
    if quantity == "samples_per_gpu_s":
        return setup.global_batch / seconds / devices
    if quantity == "tflops_per_gpu":
        return _recomputed_flops(setup) / seconds / devices / 1e12
    return seconds


def _recomputed_flops(setup: Setup) -> float:
    """Return FLOPs of an iteration with whole layers recomputed (Narayanan et al. 2021, equation 3)."""
    model, s = setup.model, setup.sequence
    h, layers = model.hidden_size, model.num_layers
    return 96 * setup.global_batch * s * layers * h**2 * (1 + s / (6 * h) + setup.padded_vocabulary / (16 * layers * h))


# -- runs that influenced no constant: before BLOOM, with experts, in FP8
# ---------------------------------------------------------------------------------------------------------------------

BIG_SCIENCE = "BigScience 2022, before BLOOM"
# Sizes by their authors' config.json.
EXPERT_MODELS = {
    "mixtral-8x7b": replace(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 4096), experts=Experts(8, 2, 14336)),
    "qwen3-235b-a22b": replace(
        llama("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, 4096), qk_norm=True, experts=Experts(128, 8, 1536)
    ),
    "deepseek-v3": replace(
        llama("deepseek-v3", 61, 7168, 128, 128, 18432, 129280, 4096),
        experts=Experts(256, 8, 2048, 2048, pattern=(0,) * 3 + (1,) * 58, sigmoid=True),
        latent=Latent(1536, 512, 128, 64, 128),
    ),
}


@cache
def before_bloom() -> tuple[Row, ...]:
    compared = []
    for row in read_rows("kept_back_throughput.csv"):
        names = ("layers", "hidden", "heads", "tensor", "pipeline", "micro_batch")
        layers, hidden, heads, tensor, pipeline, micro_batch = (int(row[name]) for name in names)
        setup = Setup(
            gpt(f"{layers} x {hidden}, {heads} heads", layers, hidden, heads, 250880, 2048),
            parse_cluster("a100-80g:48x8@6.25"),
            tensor,
            pipeline,
            micro_batch,
            2048,
            2048,
            # Their file counts both embeddings as a layer.
            _shorter_ends(layers, pipeline),
            "full",
            "unfused",
            precision="bf16",
            sequence_parallel=False,
        )
        run = f"{setup.model.name}, t/p/b {tensor}/{pipeline}/{micro_batch}"
        compared.append(Row(BIG_SCIENCE, run, SECONDS, float(row["iteration_s"]), _iteration_s(setup), setup))
    return tuple(compared)


@cache
def with_experts() -> tuple[Row, ...]:
    rows = read_rows("experts_throughput.csv")
    return tuple(_bridge_row(row, _bridge_setup(row, row["dispatcher"], sequence=4096)) for row in rows)


@cache
def in_fp8() -> tuple[Row, ...]:
    """Dense models ran as in scripts/performance/configs/llama of the same repository."""
    compared = []
    for row in read_rows("fp8_throughput.csv"):
        sizes = {name: int(row[name]) for name in ("context", "sequence")}
        setup = _bridge_setup(row, "flex", fp8=Fp8("hybrid", row["recipe"], param_gather=True), **sizes)
        if not setup.model.experts:
            switches = replace(setup.switches, tp_comm_overlap=setup.tensor > 1, grad_reduce_in_bf16=True)
            setup = replace(setup, switches=switches)
        compared.append(_bridge_row(row, setup))
    return tuple(compared)


def _bridge_setup(row: dict[str, str], dispatcher: str, **others: Any) -> Setup:
    """Return a run of NVIDIA's. Where its source is silent: nothing recomputed, reductions and gathers overlapped."""
    model, chunks = {**PRESETS, **EXPERT_MODELS}[row["model"]], int(row["chunks"])
    sizes: dict[str, Any] = {name: int(row[name]) for name in ("tensor", "pipeline", "micro_batch", "global_batch")}
    layers = split_layers(model.num_layers, sizes["pipeline"] * chunks, allow_uneven=True)
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
        **sizes,
        **others,
    )


def _bridge_row(row: dict[str, str], setup: Setup) -> Row:
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, vocabulary=setup.padded_vocabulary)
    reached = flops / _iteration_s(setup) / setup.cluster.num_devices / 1e12
    return Row(row["source"], row["model"], "tflops_per_gpu", float(row["tflops_per_gpu"]), reached, setup)


# -- this project's own runs
# ---------------------------------------------------------------------------------------------------------------------

# The default of --bpipe-min-bytes: smaller storages stay where they are.
MINIMUM_BYTES = 65536


@dataclass(frozen=True)
class CpuRun:
    """Peaks of saved activations of one run on CPUs, in bytes per stage, as recorded in tests/data/cpu_runs.json."""

    name: str
    setup: Setup
    measured: tuple[int, ...]
    predicted: tuple[int, ...]


@cache
def cpu_runs() -> tuple[CpuRun, ...]:
    recorded = json.loads((DATA / "cpu_runs.json").read_text())
    models = {name: Model(name=name, **sizes) for name, sizes in recorded["models"].items()}
    compared = []
    for run in recorded["runs"]:
        choices = dict(run["setup"])
        model = models[choices.pop("model")]
        layers = split_layers(model.num_layers, choices["pipeline"])
        assert layers is not None
        cluster = parse_cluster(f"a100-80g:{choices['tensor'] * choices['pipeline']}")
        choices["balance"] = named_balance(choices.pop("balance", BALANCES[0]))
        setup = Setup(
            model, cluster, sequence=model.sequence, layers=layers, attention="unfused", kernels="cpu", **choices
        )
        compared.append(CpuRun(run["name"], setup, tuple(run["peak_bytes"]), _peaks_as_recorded(setup)))
    return tuple(compared)


def _peaks_as_recorded(setup: Setup) -> tuple[int, ...]:
    """Return what a run records: its micro-batches, host buffers, and the stage's input, which Megatron's loop keeps."""
    schedule, stages = build(setup.program()), range(setup.num_stages)
    saved = [moved_bytes(setup, stage, 1) for stage in stages]
    moved = [moved_bytes(setup, stage, MINIMUM_BYTES) for stage in stages]
    peaks = []
    for rank in range(setup.pipeline):
        received = sent_bytes(setup) if rank and saves_input(setup) else 0
        lent = num_host_buffers(schedule, rank) * moved[setup.pipeline - 1 - rank]
        peak = rank_peaks(schedule, rank, RankSizes({rank: saved[rank]}, {rank: moved[rank]}, received, lent)).num_bytes
        assert peak is not None
        peaks.append(peak)
    return tuple(peaks)


def h200_table() -> str:
    """Compare the run of four ranks that shared one H200; its records are in tests/data/h200."""
    model = llama("llama", 8, 4096, 32, 32, 10880, 32768, 4096)
    cluster = parse_cluster("h200-141g:1x4")
    setup = Setup(model, cluster, 1, 4, 1, 16, 4096, (2, 2, 2, 2), "none", "unfused", sequence_parallel=False)
    plain, balanced = (report_of(DATA / "h200" / name).comparison.stages for name in ("plain", "balanced"))
    # A balanced rank's activations include those that it hosts.
    with_hosted = [
        rank.activations_bytes + rank.hosted_bytes for rank in predict_memory(replace(setup, balance=EVENLY))
    ]
    predicted, allocated = predict_memory(setup), allocated_bytes(setup)
    body = [
        (
            stage,
            _both(plain[stage].measured_bytes, predicted[stage].activations_bytes),
            _both(balanced[stage].measured_bytes, with_hosted[stage]),
            _both(plain[stage].device_peak_bytes, allocated[stage]),
        )
        for stage in range(setup.pipeline)
    ]
    return table("stage|activations, GiB|the same, balanced|most allocated", body)


def _both(measured: float | None, predicted: float) -> str:
    return f"{(measured or 0) / GIB:.2f} ({predicted / GIB:.2f})"


# -- error bars and calibration
# ---------------------------------------------------------------------------------------------------------------------


def measured_bars() -> list[ErrorBars]:
    """Return how much longer than predicted runs took, by kind of run, as `bpipe plan` prints it."""
    ratios: dict[ErrorBars, list[float]] = {kind: [] for kind in (AMPERE, HOPPER, BLACKWELL, EXPERTS)}
    for row in (*published(), *before_bloom(), *in_fp8(), *with_experts()):
        kind = row.configuration.error_bars
        if row.quantity != PEAK_GB and kind is not None:
            ratios[kind].append(1 / row.seconds_ratio)
    ratios[CALIBRATED] = [
        other / first
        for rows in times_by_source().values()
        for first, other in permutations([1 / row.seconds_ratio for row in rows], 2)
    ]
    return [_bars(kind, of_kind) for kind, of_kind in ratios.items()]


def _bars(kind: ErrorBars, ratios: Sequence[float]) -> ErrorBars:
    percent = [100 * (ratio - 1) for ratio in ratios]
    low, high = min(percent), max(percent)
    if len(percent) >= MANY_RUNS:
        low, *_, high = statistics.quantiles(percent, n=20, method="inclusive")
    low, median, high = (round(value) for value in (low, statistics.median(percent), high))
    return kind._replace(num_runs=len(percent), low=low, median=median, high=high)


def times_by_source() -> dict[str, list[Row]]:
    """Return the published times and throughputs, without memory."""
    by_source: dict[str, list[Row]] = {}
    for row in published():
        if row.quantity != PEAK_GB:
            by_source.setdefault(row.source, []).append(row)
    return by_source


def calibrated_errors(rows: Sequence[Row], num_calibrating: int) -> list[float]:
    """Return the errors in percent of every row, calibrated in turn by each of the first ones."""
    ratios = [row.seconds_ratio for row in rows]
    return [
        abs(100 * (ratio / ratios[first] - 1))
        for first in range(num_calibrating)
        for place, ratio in enumerate(ratios)
        if place != first
    ]


def agreement(rows: Sequence[Row]) -> float:
    """Return Kendall's coefficient over pairs of one source and quantity that were measured over 5 % apart."""
    agreeing = [
        (first.measured < other.measured) == (first.predicted < other.predicted)
        for first, other in combinations(rows, 2)
        if (first.source, first.quantity) == (other.source, other.quantity)
        and abs(first.measured / other.measured - 1) > 0.05
    ]
    return 2 * sum(agreeing) / len(agreeing) - 1


# -- the tables of the page
# ---------------------------------------------------------------------------------------------------------------------

# What is compared, on which devices, what the prediction is given, and the rows.
Comparison = tuple[str, str, str, Sequence[Row]]


@cache
def comparisons() -> tuple[Comparison, ...]:
    dense = [row for row in in_fp8() if not row.configuration.model.experts]
    blocks = [row for row in dense if row.configuration.cluster.device.fp8_blocks]
    peaks = [row for row in published() if row.quantity == PEAK_GB]
    return (
        (f"iteration times, {YEUNG}", "8 A100s", "pass times", tuple(replays())),
        (f"MFU of GPT-3 96B, balanced, {KIM}", "32 A100s", "stage times", tuple(mfu_from_stage_times())),
        (f"gain of a larger micro-batch, {HUANG}", "32 A100s", "stage MFUs", tuple(gains())),
        (f"stage times, {KIM} and {YEUNG}", "A100s", "sizes", tuple(stage_times())),
        (f"MFU of one stage, {HUANG}", "A100s", "sizes", tuple(stage_mfu())),
        (f"MFU of GPT-3 96B, {KIM}", "32 A100s", "sizes", tuple(grid_mfu())),
        *((source, _gpus(rows), "sizes", rows) for source, rows in times_by_source().items()),
        (BIG_SCIENCE, "384 A100s", "sizes", before_bloom()),
        ("experts in bf16, Megatron Core 0.9 and Bridge 25.11", "H100s, GB200s", "sizes", with_experts()),
        ("dense in FP8, Bridge 25.11", "H100s", "sizes", [row for row in dense if row not in blocks]),
        ("dense in FP8, Bridge 25.11", "B200s, GB200s", "sizes", blocks),
        ("experts in FP8, Bridge 25.11", "B200s, GB200s", "sizes", [row for row in in_fp8() if row not in dense]),
        (f"allocated memory, {peaks[0].source}", _gpus(peaks), "sizes", peaks),
        (f"allocated memory, {YEUNG}", "8 A100s", "sizes", tuple(yeung_peaks())),
    )


def _gpus(rows: Iterable[Row]) -> str:
    clusters = [row.configuration.cluster for row in rows]
    numbers = sorted({cluster.num_devices for cluster in clusters})
    return f"{numbers[0]} to {numbers[-1]} {clusters[0].device.name.partition('-')[0].upper()}s"


def table(titles: str, body: Iterable[Iterable[object]]) -> str:
    names = titles.split("|")
    rows = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in body)]
    return "\n".join(f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows) + "\n"


def _mean_and_largest(errors: Iterable[float]) -> tuple[str, str]:
    sizes = [abs(error) for error in errors]
    return f"{statistics.mean(sizes):.1f}", f"{max(sizes):.1f}"


def is_on_target(errors: Iterable[float]) -> bool:
    sizes = [abs(error) for error in errors]
    return statistics.mean(sizes) <= MOST_MEAN and max(sizes) <= MOST_LARGEST


def comparison_table() -> str:
    body = []
    for name, devices, given, rows in comparisons():
        errors = [row.error_percent for row in rows]
        has_target = given == "sizes" and rows[0].quantity not in (PEAK_GB, "MiB")
        verdict = ("yes" if is_on_target(errors) else "**no**") if has_target else "-"
        body.append((name, devices, given, len(rows), *_mean_and_largest(errors), verdict))
    return table("compared|devices|given|values|mean error %|largest %|within 4 and 10 %", body)


def grid_table() -> str:
    body = (
        (
            *(row.name, row.recompute, row.balanced, f"{row.needs_gib:.1f}", f"{row.less_gib:.1f}"),
            *("yes" if row.agrees else "**no**", f"{row.mfu.measured:.1f}", f"{row.mfu.predicted:.1f}"),
        )
        for row in grid()
    )
    return table("t/p/b|recompute|balanced|needs GiB|with less|agrees|measured MFU %|predicted", body)


def calibration_table() -> str:
    body = (
        (
            source,
            *_mean_and_largest(calibrated_errors(rows, 1)),
            *_mean_and_largest(calibrated_errors(rows, len(rows))),
        )
        for source, rows in times_by_source().items()
    )
    return table("source|first run calibrates: mean %|largest|any run calibrates: mean %|largest", body)


def error_bars_table() -> str:
    body = (
        (bars.kind, bars.num_runs, bars.time_factor, f"{bars.low:+}", f"{bars.median:+}", f"{bars.high:+}")
        for bars in measured_bars()
    )
    return table("runs of|runs|formulas times|from %|median|to", body)


def count_table() -> str:
    pairs = [pair for run in cpu_runs() for pair in zip(run.measured, run.predicted, strict=True)]
    exact = sum(measured == predicted for measured, predicted in pairs)
    agreeing = sum(row.agrees for row in grid())
    order = (f"{name}: {agreement(rows):.2f}" for name, rows in (("published", published()), ("BLOOM", before_bloom())))
    body = (
        ("GPT-3 96B on 32 A100s: which configurations fit", f"{agreeing} of {len(grid())}"),
        ("own runs on CPUs: stages whose peak is exact to the byte", f"{exact} of {len(pairs)}"),
        ("order of runs that were measured over 5 % apart (Kendall's coefficient)", ", ".join(order)),
    )
    return table("compared|agrees", body)


TABLES: dict[str, Callable[[], str]] = {
    "comparisons": comparison_table,
    "counts": count_table,
    "error bars": error_bars_table,
    "calibration": calibration_table,
    "grid": grid_table,
    "h200": h200_table,
}


def rewritten(page: str) -> str:
    """Return the page with every table made anew. A table follows a comment with its name."""
    for name, make in TABLES.items():
        places = list(re.finditer(rf"<!-- {name} -->\n\n((?:\|.*\n)*)", page))
        if len(places) != 1:
            raise ValueError(f"the page needs one line '<!-- {name} -->'")
        (place,) = places
        page = page[: place.start(1)] + make() + page[place.end(1) :]
    return page


def all_rows() -> str:
    body = (
        (row.source, row.run, row.quantity, f"{row.measured:.4g}", f"{row.predicted:.4g}", f"{row.error_percent:+.1f}")
        for *_, rows in comparisons()
        for row in rows
    )
    return table("source|run|unit|measured|predicted|error %", body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every compared value instead of the page's tables")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the tables into this page")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_text(rewritten(options.write.read_text()))
    elif options.rows:
        print(all_rows(), end="")
    else:
        print("\n".join(f"{name}\n\n{make()}" for name, make in TABLES.items()), end="")


if __name__ == "__main__":
    main()
