"""Hold the measurements that predictions are laid beside, and make the predictions.

In: tests/data. Out: rows with both.

Published runs, and this project's own on CPUs. Fits nothing: every constant is that of bpipe.predict, the same for all
rows. Needs no torch, writes nothing; `validate` makes the document of it.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path

from bpipe.balance.config import BALANCES, BalanceConfig, named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.plan.predict import predict, simulation_of
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.links import links
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS, Model, gpt
from bpipe.predict.replicas import update_seconds
from bpipe.predict.saved_tensors import moved_bytes, saves_input
from bpipe.predict.sizes import sent_bytes
from bpipe.record.report.memory import RankSizes, rank_peaks
from bpipe.schedule.host_buffers import num_host_buffers
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import CollectiveCost, Costs, ShardCost, StageCost
from bpipe.simulate.engine import simulate

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
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


def setup_of(
    model: Model, cluster: str, t: int, p: int, b: int, batch: int, recompute: str, **changes: object
) -> Setup:
    layers = split_layers(model.num_layers, p)
    assert layers is not None
    choices = {"attention": "unfused", "precision": "fp16", **changes}
    return Setup(model, parse_cluster(cluster), t, p, b, batch, 2048, layers, recompute, **choices)  # type: ignore[arg-type]


# -- replaying published pass times
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replay:
    method: str
    vocabulary: int
    measured_s: float
    predicted_s: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)


# By the published name of the method: how the vocabulary is split, and what of S and T together is S. Of three products
# algorithm 1 leaves two to T, algorithm 2 one.
SHARDED = {
    "vocab-1": (Vocabulary.ONE, 1 / 3),
    "vocab-2": (Vocabulary.TWO, 2 / 3),
    "interlaced": (Vocabulary.INTERLACED, 1 / 3),
}
# Of redistributed layers, by vocabulary, as the forward times of the ranks show them: 2.65 ms per layer.
REDISTRIBUTED = {
    256000: (4, 4, 4, 5, 5, 5, 5, 0),
    128000: (4, 4, 4, 4, 4, 5, 5, 2),
    64000: (4, 4, 4, 4, 4, 4, 5, 3),
    32000: (4,) * 8,
}


def published(vocabulary: int, method: str = "baseline") -> Setup:
    """Return the model of the published runs: 8 A100s of one node, pure pipeline parallelism."""
    model = replace(gpt("published", 32, 3072, 24, vocabulary), tied_embedding=False)
    setup = setup_of(model, "a100-80g:1x8", 1, 8, 1, 128, "none", attention="flash")
    if method == "redis":
        return replace(setup, layers=REDISTRIBUTED[vocabulary])
    return replace(setup, vocabulary=SHARDED[method][0], input_shards=True) if method in SHARDED else setup


def replays() -> list[Replay]:
    """1F1B with the pass times as given, the vocabulary in shards or not; links and the update from the device
    table."""
    found = []
    for row in rows("vocabulary_parallelism_a100.csv"):
        method, vocabulary = row["method"], int(row["vocabulary"])
        setup = published(vocabulary, method)
        # What every rank's update takes stands at its stage; the largest counts.
        updates = [update for _, update in update_seconds(setup)]
        times = zip(_seconds(row["forward_us"]), _seconds(row["backward_us"]), updates, strict=True)
        stages = tuple(
            StageCost(forward, backward, sent_bytes=sent_bytes(setup), optimizer_s=update)
            for forward, backward, update in times
        )
        costs = Costs(stages, links(setup), exchange=Exchange.MEGATRON_1F1B)
        if method in SHARDED:
            costs = replace(costs, exchange=Exchange.POSTED, shards=_shards(row), collectives=_collectives(row))
        schedule = build(setup.program(int(row["micro_batches"])))
        found.append(
            Replay(method, vocabulary, float(row["iteration_ms"]) / 1e3, float(simulate(schedule, costs).makespan_s))
        )
    return found


def _seconds(microseconds: str) -> list[float]:
    return [int(one) / 1e6 for one in microseconds.split()]


def _shards(row: dict[str, str]) -> tuple[ShardCost, ...]:
    share = SHARDED[row["method"]][1]
    passes = zip(*(_seconds(row[f"{name}_us"]) for name in ("output", "input_forward", "input_backward")), strict=True)
    return tuple(
        ShardCost(share * output, (1 - share) * output, forward, backward) for output, forward, backward in passes
    )


def _collectives(row: dict[str, str]) -> CollectiveCost:
    """Return collectives: every sort takes what the file says of one."""
    return CollectiveCost(*(_seconds(row["communication_us"])[0],) * 5)


@dataclass(frozen=True)
class PeakRow:
    """MiB allocated at peak by the fullest rank."""

    method: str
    vocabulary: int
    measured: float
    predicted: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def published_peaks() -> list[PeakRow]:
    """Overhead and fragmentation are not allocated, so not in them."""
    found = []
    for row in rows("vocabulary_parallelism_a100.csv"):
        method, vocabulary = row["method"], int(row["vocabulary"])
        memory = predict_memory(published(vocabulary, method))
        predicted = max(rank.state_bytes + rank.activations_bytes + rank.working_bytes for rank in memory) / 2**20
        found.append(PeakRow(method, vocabulary, float(row["memory_max_mb"]), predicted))
    return found


# -- the papers' stage times and grid
# --------------------------------------------------------------------------------------------------


def predicted_mfu(times: StageTimes) -> float:
    """Return the percent, from the stage times alone, balanced, with the papers' FLOPs: the stage times contain the
    output layer's share."""
    model = PRESETS[times.model]
    microbatches = times.global_batch // times.micro_batch
    schedule = build(ScheduleConfig("1f1b", times.pipeline, microbatches, balance=BalanceConfig()))
    cost = StageCost(times.forward_ms / 1e3, times.backward_ms / 1e3, transfer_s=times.transfer_ms / 1e3)
    report = simulate(schedule, Costs((cost,) * times.pipeline))
    devices = parse_cluster(times.cluster).num_devices
    return 100 * mfu(
        training_flops(model, times.global_batch, 2048, "papers"), float(report.makespan_s), devices, 312e12
    )


def stage_setup(times: StageTimes) -> Setup:
    return setup_of(
        PRESETS[times.model],
        times.cluster,
        times.tensor,
        times.pipeline,
        times.micro_batch,
        times.global_batch,
        times.recompute,
    )


@dataclass(frozen=True)
class GridRow:
    """GiB the fullest rank needs: in the stated way; with less recomputation or, where that is balanced, without; the
    former balanced.

    `balanced_gib` is None for rows that are balanced.
    """

    row: dict[str, str]
    setup: Setup
    stated_gib: float
    less_gib: float
    balanced_gib: float | None
    limit_gib: float

    @property
    def agrees(self) -> bool:
        return self.stated_gib <= self.limit_gib < self.less_gib


def grid() -> list[GridRow]:
    """Return every row of the paper's table."""
    found = []
    for row in rows("bpipe_gpt3_96b.csv"):
        scope = PAPER_SCOPES[row["recompute"]]
        balanced = row["balanced"] == "yes"
        size = (int(row["tensor"]), int(row["pipeline"]), int(row["micro_batch"]))
        stated = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", *size, 128, scope, balance=EVENLY if balanced else None)
        less = replace(stated, balance=None) if balanced else replace(stated, recompute=SCOPES[SCOPES.index(scope) - 1])
        shared = None if balanced else _fullest_gib(replace(less, balance=EVENLY))
        limit = stated.cluster.device.memory_bytes / 2**30
        found.append(GridRow(row, stated, _fullest_gib(stated), _fullest_gib(less), shared, limit))
    return found


@dataclass(frozen=True)
class MfuRow:
    """Percent."""

    row: dict[str, str]
    measured: float
    predicted: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def grid_mfu() -> list[MfuRow]:
    """Return every row of the paper's table, its times predicted by the roofline."""
    found = []
    for one in grid():
        prediction = predict(one.setup, simulation=simulation_of(one.setup), formula="papers")
        found.append(MfuRow(one.row, float(one.row["mfu_percent"]), 100 * prediction.mfu))
    return found


def _fullest_gib(setup: Setup) -> float:
    return max(rank.peak_bytes for rank in predict_memory(setup)) / 2**30


def size_of(one: GridRow) -> str:
    return f"t={one.row['tensor']} p={one.row['pipeline']} b={one.row['micro_batch']}"


# -- this project's own runs
# -----------------------------------------------------------------------------------------------------------

# Smaller storages stay where they are: the default of --bpipe-min-bytes.
MINIMUM_BYTES = 65536


@dataclass(frozen=True)
class CpuRun:
    """Bytes of saved activations that every stage of one run held at most, and what the model says from sizes alone."""

    name: str
    setup: Setup
    measured: tuple[int, ...]
    predicted: tuple[int, ...]


def cpu_runs() -> list[CpuRun]:
    """Training runs of this project on CPUs, as recorded in tests/data/cpu_runs.json with how they were made."""
    recorded = json.loads((DATA / "cpu_runs.json").read_text())
    models = {name: Model(name=name, **sizes) for name, sizes in recorded["models"].items()}
    found = []
    for run in recorded["runs"]:
        chosen = dict(run["setup"])
        model = models[chosen.pop("model")]
        layers = split_layers(model.num_layers, chosen["pipeline"])
        assert layers is not None
        cluster = parse_cluster(f"a100-80g:{chosen['tensor'] * chosen['pipeline']}")
        chosen["balance"] = named_balance(chosen.pop("balance", BALANCES[0]))
        setup = Setup(
            model, cluster, sequence=model.sequence, layers=layers, attention="unfused", kernels="cpu", **chosen
        )
        found.append(CpuRun(run["name"], setup, tuple(run["peak_bytes"]), predicted_peaks(setup)))
    return found


def predicted_peaks(setup: Setup) -> tuple[int, ...]:
    """What every rank holds at most as a run counts it: its own micro-batches, host buffers, and the input that
    Megatron's loop keeps."""
    # What the loop holds besides, which is received, a run counts as its own.
    schedule, saved = build(setup.program()), [moved_bytes(setup, stage, 1) for stage in range(setup.num_stages)]
    moved = [moved_bytes(setup, stage, MINIMUM_BYTES) for stage in range(setup.num_stages)]
    peaks = []
    for rank in range(setup.pipeline):
        received = sent_bytes(setup) if rank and saves_input(setup) else 0
        lent = num_host_buffers(schedule, rank) * moved[setup.pipeline - 1 - rank]
        peak = rank_peaks(schedule, rank, RankSizes({rank: saved[rank]}, {rank: moved[rank]}, received, lent)).num_bytes
        assert peak is not None
        peaks.append(peak)
    return tuple(peaks)
