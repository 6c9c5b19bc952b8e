"""Measured values of published runs and of this project's own, each with its prediction.

Nothing is fitted here: all runs are predicted with the constants of bpipe.predict. Needs no torch.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bpipe.build import build
from bpipe.plan.predict import costs_of, simulation_of, steady_timing
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.costs import links, predict_costs, update_seconds
from bpipe.predict.flops import mfu, training_flops
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.ends import output_seconds
from bpipe.predict.layout import EVENLY, Setup, split_layers
from bpipe.predict.matmul import exposed
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS, Model, gpt
from bpipe.predict.sizes import LINK_EFFICIENCY, LINK_LATENCY_S, sent_bytes
from bpipe.predict.training import Fp8, Switches
from bpipe.schedule.families.families import default_family
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from bpipe.simulate.cost import CollectiveCost, Costs, ShardCost, StageCost
from bpipe.simulate.engine import simulate

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MIB = 2**20
A100_FLOPS_PER_S = 312e12
SECONDS, PEAK_GB = "iteration_s", "peak_memory_gb"


class Row(NamedTuple):
    """A measured value and its prediction."""

    source: str  # who published it
    run: str
    quantity: str  # the unit of both values: of a time, a throughput, or memory
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


def read_rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def setup_of(model: Model, cluster: str, t: int, p: int, b: int, batch: int, recompute: str, **changes: Any) -> Setup:
    """Return a configuration with equal stages and, unless `changes` says otherwise, Megatron's own unfused attention in
    fp16."""
    choices: dict[str, Any] = {"attention": "unfused", "precision": "fp16", "sequence": 2048, **changes}
    choices = {"transformer_impl": "local", **choices}
    layers: Any = choices.pop("layers", None) or split_layers(model.num_layers, p)
    return Setup(model, parse_cluster(cluster), t, p, b, batch, layers=layers, recompute=recompute, **choices)


def allocated_bytes(setup: Setup) -> list[int]:
    """Return the most that each rank allocates, without overhead and fragmentation."""
    return [rank.state_bytes + rank.activations_bytes + rank.working_bytes for rank in predict_memory(setup)]


def fullest_gib(setup: Setup) -> float:
    return max(rank.peak_bytes for rank in predict_memory(setup)) / GIB


# -- Yeung et al. 2024: pass times, iteration times and peaks of 8 A100s

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
        setup = yeung_setup(int(row["vocabulary"]), row["method"])
        updates = (update for _, update in update_seconds(setup))
        passes = zip(_seconds(row, "forward"), _seconds(row, "backward"), updates, strict=True)
        stages = tuple(
            StageCost(forward, backward, sent_bytes=sent_bytes(setup), optimizer_s=update)
            for forward, backward, update in passes
        )
        costs = Costs(stages, links(setup), exchange=Exchange.MEGATRON_1F1B)
        if row["method"] in SHARDED:
            (collective, *_) = _seconds(row, "communication")
            collectives = CollectiveCost(*(collective,) * 5)
            costs = replace(costs, exchange=Exchange.POSTED, shards=_shards(row), collectives=collectives)
        seconds = float(simulate(build(setup.program(int(row["micro_batches"]))), costs).makespan_s)
        yield Row(YEUNG, _yeung_run(row), SECONDS, float(row["iteration_ms"]) / 1e3, seconds, setup)


def _yeung_run(row: dict[str, str]) -> str:
    return f"{row['method']}, V={row['vocabulary']}"


def _shards(row: dict[str, str]) -> tuple[ShardCost, ...]:
    share = SHARDED[row["method"]][1]
    passes = zip(*(_seconds(row, name) for name in ("output", "input_forward", "input_backward")), strict=True)
    return tuple(ShardCost(share * output, (1 - share) * output, first, last) for output, first, last in passes)


def _seconds(row: dict[str, str], name: str) -> list[float]:
    return [int(text) / 1e6 for text in row[f"{name}_us"].split()]


def yeung_peaks() -> Iterator[Row]:
    """Compare the allocated memory of the fullest rank."""
    for row in read_rows("vocabulary_parallelism_a100.csv"):
        predicted = max(allocated_bytes(yeung_setup(int(row["vocabulary"]), row["method"]))) / MIB
        yield Row(YEUNG, _yeung_run(row), "MiB", float(row["memory_max_mb"]), predicted)


# -- Kim et al. 2023 and Huang et al. 2024: stage times, and GPT-3 96B on 32 A100s

KIM, HUANG = "Kim 2023", "Huang 2024"
SCOPES = ("none", "selective", "full")
KIM_SCOPES = {"none": "none", "attention": "selective", "layer": "full"}
# GPT-3 96B, Huang et al., by attention and recomputation: MFU of one stage in percent at b = 1 and 2.
HUANG_MFU = {("unfused", "selective"): (37.8, 55.2), ("flash", "none"): (57.7, 62.4)}
# Milliseconds of the pass times of Yeung et al.: of a stage without the output layer, by vocabulary, and of that layer.
YEUNG_STAGE_MS = {32000: (10.61, 21.36), 256000: (10.44, 20.95)}
YEUNG_OUTPUT_MS = (26.4, 31.2)


def stage_times() -> Iterator[Row]:
    for row in read_rows("bpipe_stage_times.csv"):
        t, p, b, batch = (int(row[name]) for name in ("tensor", "pipeline", "micro_batch", "global_batch"))
        setup = setup_of(PRESETS[row["model"]], row["cluster"], t, p, b, batch, row["recompute"])
        measured_ms = float(row["forward_ms"]), float(row["backward_ms"])
        yield from _passes(KIM, f"{row['model']}, recompute {row['recompute']}", measured_ms, _stage_seconds(setup))
    for vocabulary, stage_ms in YEUNG_STAGE_MS.items():
        yield from _passes(YEUNG, f"stage, V={vocabulary}", stage_ms, _stage_seconds(yeung_setup(vocabulary)))
    yield from _passes(YEUNG, "output layer", YEUNG_OUTPUT_MS, output_seconds(yeung_setup(256000)))


def _stage_seconds(setup: Setup) -> tuple[Any, Any]:
    """Return forward and backward seconds of a stage between the ends."""
    cost = predict_costs(setup).stages[1]
    return cost.forward_s, cost.backward_s


def _passes(source: str, name: str, measured_ms: Sequence[float], predicted_s: Sequence[Any]) -> Iterator[Row]:
    for kind, measured, predicted in zip(("forward", "backward"), measured_ms, predicted_s, strict=True):
        yield Row(source, f"{name}, {kind}", "ms", measured, float(predicted) * 1e3)


def papers_flops(setup: Setup, passes: int = 3) -> float:
    """Return the FLOPs of an iteration as papers count them, with attention in full (Narayanan et al. 2021, equation 3).

    A forward and a backward are three passes; with whole layers recomputed there are four.
    """
    h, layers, s = setup.model.hidden_size, setup.model.num_layers, setup.sequence
    per_pass = 24 * setup.global_batch * s * layers * h**2
    return passes * per_pass * (1 + s / (6 * h) + setup.padded_vocabulary / (16 * layers * h))


def stage_mfu() -> Iterator[Row]:
    """Compare the MFU of one stage alone."""
    for (attention, recompute), of_stage in HUANG_MFU.items():
        for b, measured in zip((1, 2), of_stage, strict=True):
            setup = setup_of(PRESETS["gpt3-96b"], "a100-80g:4x8", 4, 8, b, 128, recompute, attention=attention)
            flops = papers_flops(setup) / setup.num_microbatches / setup.num_stages / setup.tensor
            predicted = 100 * flops / float(sum(_stage_seconds(setup))) / A100_FLOPS_PER_S
            yield Row(HUANG, f"{attention} attention, b={b}", "% MFU", measured, predicted)


class GridRow(NamedTuple):
    """A configuration for which Kim et al. state the least recomputation that fits."""

    name: str  # t/p/b
    recompute: str
    balanced: str
    needs_gib: float  # of the fullest rank
    less_gib: float  # the same with less recomputation or, if balanced, without balancing
    limit_gib: float  # of a device
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
        seconds = float(simulation_of(setup).makespan_s)
        predicted = 100 * mfu(papers_flops(setup), seconds, 32, A100_FLOPS_PER_S)
        percent = Row(KIM, name, "% MFU", float(row["mfu_percent"]), predicted)
        limit = setup.cluster.device.memory_bytes / GIB
        gib = (fullest_gib(setup), fullest_gib(less), limit)
        compared.append(GridRow(name, row["recompute"], row["balanced"], *gib, percent))
    return tuple(compared)


# -- published throughputs and peaks

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
        setups = _setups(row, int(row["global_batch"]))
        fitting = (one for one in setups if row["micro_batch"] or all(rank.fits for rank in predict_memory(one)))
        times = [(_iteration_s(setup, row["source"]), setup) for setup in fitting]
        seconds, setup = min(times, key=lambda time: time[0])
        predicted = _in_unit(row["quantity"], setup, seconds)
    sizes = f"{setup.tensor}/{setup.pipeline}/{setup.num_chunks}/{setup.micro_batch}"
    run = f"{row['model']}, {setup.cluster.num_devices} GPUs, t/p/v/b {sizes}, recompute {setup.recompute}"
    return Row(row["source"].split(" (")[0], run, row["quantity"], float(row["measured"]), predicted, setup)


def _setups(row: dict[str, str], global_batch: int) -> Iterator[Setup]:
    """Yield what the row says. If it leaves the micro-batch or the chunks open, yield every possibility."""
    chunks = (int(row["chunks"]),) if row["chunks"] else CHUNKS if int(row["pipeline"]) > 1 else (1,)
    sizes = (int(row["micro_batch"]),) if row["micro_batch"] else MICRO_BATCHES
    for num_chunks, micro_batch in product(chunks, sizes):
        try:
            yield _published_setup(row, num_chunks, micro_batch, global_batch)
        except ValueError:
            # The batch or the layers do not divide, so its authors did not run it either.
            if row["micro_batch"] and row["chunks"]:
                raise


def _published_setup(row: dict[str, str], chunks: int, micro_batch: int, global_batch: int) -> Setup:
    names = ("layers", "hidden", "heads", "vocabulary", "sequence", "tensor", "pipeline")
    num_layers, hidden, heads, vocabulary, sequence, tensor, pipeline = (int(row[name]) for name in names)
    model = gpt(row["model"], num_layers, hidden, heads, vocabulary, sequence)
    of_nvidia, of_qi = row["source"].startswith("NVIDIA"), row["source"].startswith("Qi")
    stages = pipeline * chunks
    layers = _shorter_ends(num_layers, stages) if of_qi else split_layers(num_layers, stages)
    if layers is None:
        raise ValueError(f"{num_layers} layers do not divide into {stages} stages")
    return setup_of(
        # Qi et al. leave the output layer untied.
        replace(model, tied_embedding=not of_qi),
        row["cluster"],
        *(tensor, pipeline, micro_batch, global_batch, row["recompute"]),
        layers=layers,
        sequence=sequence,
        attention=row["attention"],
        schedule=default_family(chunks),
        num_chunks=chunks,
        precision=row["precision"],
        distributed_optimizer=row["distributed_optimizer"] == "yes",
        sequence_parallel=row["sequence_parallel"] == "yes",
        switches=NVIDIA if of_nvidia else Switches(no_overlap_p2p_communication=chunks > 1),
    )


def _shorter_ends(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers with one less on the first and on the last stage."""
    most = (num_layers + 2) // num_stages
    return (most - 1, *(most,) * (num_stages - 2), most - 1)


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
    waiting = tuple(replace(cost, backward_s=cost.backward_s + num_layers * hidden) for cost, num_layers in stages)
    return replace(costs, stages=waiting)


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
    if quantity == SECONDS:
        return seconds
    if quantity == "samples_per_gpu_s":
        return setup.global_batch / seconds / setup.cluster.num_devices
    return papers_flops(setup, 4) / seconds / setup.cluster.num_devices / 1e12


# -- runs that influenced no constant: before BLOOM, with experts, in FP8

BIG_SCIENCE = "BigScience 2022, before BLOOM"
# Sizes by their authors' config.json.


@cache
def before_bloom() -> tuple[Row, ...]:
    compared = []
    for row in read_rows("kept_back_throughput.csv"):
        names = ("layers", "hidden", "heads", "tensor", "pipeline", "micro_batch")
        num_layers, hidden, heads, tensor, pipeline, micro_batch = (int(row[name]) for name in names)
        model = gpt(f"{num_layers} x {hidden}, {heads} heads", num_layers, hidden, heads, 250880, 2048)
        sizes = (tensor, pipeline, micro_batch, 2048)
        # Their file counts both embeddings as a layer.
        layers = _shorter_ends(num_layers, pipeline)
        choices: dict[str, Any] = {"layers": layers, "precision": "bf16", "sequence_parallel": False}
        setup = setup_of(model, "a100-80g:48x8@6.25", *sizes, "full", **choices)
        run = f"{model.name}, t/p/b {tensor}/{pipeline}/{micro_batch}"
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
    model, chunks = PRESETS[row["model"]], int(row["chunks"])
    t, p, b, batch = (int(row[name]) for name in ("tensor", "pipeline", "micro_batch", "global_batch"))
    return setup_of(
        *(model, row["cluster"], t, p, b, batch, "none"),
        attention="flash",
        precision="bf16",
        layers=split_layers(model.num_layers, p * chunks, allow_uneven=True),
        schedule=default_family(chunks),
        num_chunks=chunks,
        switches=Switches(overlap_grad_reduce=True, overlap_param_gather=True),
        routing=Routing(int(row["expert"]), 1, dispatcher) if model.experts else Routing(),
        **others,
    )


def _bridge_row(row: dict[str, str], setup: Setup) -> Row:
    flops = training_flops(setup.model, setup.global_batch, setup.sequence, setup.padded_vocabulary)
    reached = flops / _iteration_s(setup) / setup.cluster.num_devices / 1e12
    return Row(row["source"], row["model"], "tflops_per_gpu", float(row["tflops_per_gpu"]), reached, setup)
