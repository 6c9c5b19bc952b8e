"""Lay what the roofline predicts beside published throughputs and peaks.

In: tests/data/published_throughput.csv. Out: rows with both.

Nothing is given but what the source says of the run: no time is measured, no constant is fitted. Needs no torch, writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

from bpipe.plan.predict import costs_of
from bpipe.plan.timing import steady_timing
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layer_counts import split_layers
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import gpt
from bpipe.predict.rates import LINK_EFFICIENCY, LINK_LATENCY_S
from bpipe.predict.sizes import sent_bytes
from bpipe.predict.switches import Switches
from bpipe.predict.tensor_parallel import exposed
from bpipe.simulate.cost import Costs
from validation.measurements import rows

DEVICES = {"A100-80GB": "a100-80g", "H100-80GB": "h100-80g"}
DEVICES_PER_NODE = 8
PEAK = "peak_memory_gb"
# Of Qi et al. the vocabulary is not published; this is the size their tokenizer has.
USUAL_VOCABULARY = 32000
# As the published recipe has it, whose `ub_tp_comm_overlap: true` is Megatron's --tp-comm-overlap.
NVIDIA = Switches(overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_bf16=True, tp_comm_overlap=True)
# Who sent parts, for lack of sequence parallelism.
SCATTERING = ("Narayanan", "Korthikanti")
# And who is taken to have run before tensor-parallel sums were hidden in the backward; the paper does not say.
WAITING = ("Narayanan",)
# Columns of the file of runs that were kept back.
KEPT_BACK = ("layers", "hidden", "heads", "tensor", "pipeline", "micro_batch")
# What is looked at where the source says neither, as its authors took what was best.
MICRO_BATCHES, CHUNKS = (1, 2, 4, 8), tuple(range(1, 9))


@dataclass(frozen=True)
class Throughput:
    """`measured` and `predicted` in the unit of `quantity`."""

    source: str
    model: str
    gpus: int
    quantity: str
    setup: Setup
    measured: float
    predicted: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def seconds_ratio(self) -> float:
        """Predicted to measured seconds, of times and throughputs: a throughput is the higher the fewer seconds."""
        ratio = self.predicted / self.measured
        return ratio if self.quantity == "iteration_s" else 1 / ratio


@cache
def throughputs() -> tuple[Throughput, ...]:
    """Return every row of the file."""
    return tuple(_prediction(row) for row in rows("published_throughput.csv"))


def without_tp_overlap() -> list[float]:
    """Return the percent, with their signs, of the runs with `--tp-comm-overlap`, had they been predicted without
    it."""
    setups = ((one, one.setup.switches) for one in throughputs() if one.setup.switches.tp_comm_overlap)
    others = [(one, replace(one.setup, switches=replace(switches, tp_comm_overlap=False))) for one, switches in setups]
    return [100 * (steady_timing(setup, costs_of(setup)).iteration_s / one.measured - 1) for one, setup in others]


@cache
def kept_back() -> tuple[Throughput, ...]:
    """Return every row of the file of runs that no constant was looked at with."""
    found = []
    for row in rows("kept_back_throughput.csv"):
        layers, hidden, heads, tensor, pipeline, micro_batch = (int(row[name]) for name in KEPT_BACK)
        setup = Setup(
            gpt(f"{layers} x {hidden}, {heads} heads", layers, hidden, heads, 250880, 2048),
            parse_cluster("a100-80g:48x8@6.25"),
            tensor,
            pipeline,
            micro_batch,
            2048,
            2048,
            # As their file has it: both embeddings count as a layer.
            _ends_spared(layers, pipeline),
            "full",
            "unfused",
            precision="bf16",
            sequence_parallel=False,
        )
        seconds = steady_timing(setup, costs_of(setup)).iteration_s
        found.append(
            Throughput(
                "BigScience 2022", setup.model.name, 384, "iteration_s", setup, float(row["iteration_s"]), seconds
            )
        )
    return tuple(found)


def errors_by_source() -> dict[str, list[float]]:
    """Return the percent, without signs; peaks apart from times."""
    errors: dict[str, list[float]] = {}
    for one in throughputs():
        name = one.source.split(" (")[0] + (", peaks" if one.quantity == PEAK else "")
        errors.setdefault(name, []).append(abs(one.error_percent))
    return errors


class Calibrated(NamedTuple):
    """Percent, without signs, of the other rows: by the factor of the source's first row, and by that of each of its
    rows in turn."""

    by_first: list[float]
    by_any: list[float]


def calibrated_errors_by_source() -> dict[str, Calibrated]:
    """The same of times alone, by what `bpipe calibrate` makes of one row."""
    seconds: dict[str, list[float]] = {}
    for one in throughputs():
        if one.quantity != PEAK:
            seconds.setdefault(one.source.split(" (")[0], []).append(one.seconds_ratio)
    return {
        source: Calibrated(calibrated(ratios, 1), calibrated(ratios, len(ratios))) for source, ratios in seconds.items()
    }


def calibrated(ratios: Sequence[float], num_calibrating: int) -> list[float]:
    """Of predicted and measured seconds, once each of the first rows has calibrated."""
    pairs = ((one, ratio) for one in range(num_calibrating) for place, ratio in enumerate(ratios) if place != one)
    return [abs(100 * (ratio / ratios[one] - 1)) for one, ratio in pairs]


def agreement(found: Sequence[Throughput]) -> float:
    """Kendall's coefficient of measured and predicted, over pairs of one source and quantity that were measured over
    5 % apart."""
    agreeing = [
        (one.measured < other.measured) == (one.predicted < other.predicted)
        for one, other in combinations(found, 2)
        if (one.source, one.quantity) == (other.source, other.quantity)
        and abs(one.measured / other.measured - 1) > 0.05
    ]
    return 2 * sum(agreeing) / len(agreeing) - 1


def _prediction(row: dict[str, str]) -> Throughput:
    if row["quantity"] == PEAK:
        # As many micro-batches as fill the pipeline, three times.
        setup = next(_setups(row, 3 * int(row["pipeline"]) * int(row["micro_batch"])))
        predicted = (
            max(rank.state_bytes + rank.activations_bytes + rank.working_bytes for rank in predict_memory(setup)) / 1e9
        )
    else:
        found = [setup for setup in _setups(row, int(row["global_batch"])) if row["micro_batch"] or _fits(setup)]
        seconds, setup = min(((_iteration_s(setup, row["source"]), setup) for setup in found), key=lambda one: one[0])
        predicted = _quantity(row["quantity"], setup, seconds)
    return Throughput(
        row["source"], row["model"], int(row["gpus"]), row["quantity"], setup, float(row["measured"]), predicted
    )


def _iteration_s(setup: Setup, source: str) -> float:
    costs = costs_of(setup)
    if source.startswith(WAITING):
        costs = _waiting(setup, costs)
    if source.startswith(SCATTERING):
        costs = _scattered(setup, costs)
    return steady_timing(setup, costs).iteration_s


def _waiting(setup: Setup, costs: Costs) -> Costs:
    """Where a backward waits for its sums, which Megatron lays beside the weights' gradients since 2022."""
    waits = exposed(setup)
    hidden = waits.input_half_s - waits.backward_s
    stages = zip(costs.stages, setup.layers, strict=True)
    return replace(
        costs, stages=tuple(replace(cost, backward_s=cost.backward_s + num * hidden) for cost, num in stages)
    )


def _scattered(setup: Setup, costs: Costs) -> Costs:
    """Where all tensor-parallel ranks have the same to send: each sends a part, and who receives gathers them
    (Narayanan et al. 2021, 4.1).

    Megatron has dropped it since, for with sequence parallelism each has a part anyway.
    """
    if setup.tensor == 1 or setup.sequence_parallel:
        return costs
    gathered = (
        sent_bytes(setup)
        * (setup.tensor - 1)
        / setup.tensor
        / (setup.cluster.device.inside_bytes_per_s * LINK_EFFICIENCY)
        + LINK_LATENCY_S
    )
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


def _fits(setup: Setup) -> bool:
    return all(rank.fits for rank in predict_memory(setup))


def _quantity(quantity: str, setup: Setup, seconds: float) -> float:
    devices = setup.cluster.num_devices
    if quantity == "samples_per_gpu_s":
        return setup.global_batch / seconds / devices
    if quantity == "tflops_per_gpu":
        return recomputed_flops(setup) / seconds / devices / 1e12
    return seconds


def recomputed_flops(setup: Setup) -> float:
    """Of an iteration with whole layers recomputed. Source: Narayanan et al. 2021, equation 3."""
    model, s = setup.model, setup.sequence
    h, layers = model.hidden_size, model.num_layers
    return 96 * setup.global_batch * s * layers * h**2 * (1 + s / (6 * h) + setup.padded_vocabulary / (16 * layers * h))


def _setups(row: dict[str, str], global_batch: int) -> Iterator[Setup]:
    """What the row says; where it leaves the micro-batch or the chunks open, all that can be."""
    chunks = (int(row["chunks"]),) if row["chunks"] else CHUNKS if int(row["pipeline"]) > 1 else (1,)
    sizes = (int(row["micro_batch"]),) if row["micro_batch"] else MICRO_BATCHES
    for num_chunks in chunks:
        for micro_batch in sizes:
            try:
                yield _setup(row, num_chunks, micro_batch, global_batch)
            except ValueError:
                # The batch or the layers do not divide: its authors did not run it either.
                if row["micro_batch"] and row["chunks"]:
                    raise


def _setup(row: dict[str, str], chunks: int, micro_batch: int, global_batch: int) -> Setup:
    sequence, gpus, pipeline = int(row["sequence"]), int(row["gpus"]), int(row["pipeline"])
    vocabulary = int(row["vocabulary"] or USUAL_VOCABULARY)
    model = gpt(row["model"], int(row["layers"]), int(row["hidden"]), int(row["heads"]), vocabulary, sequence)
    of_nvidia, of_qi = row["source"].startswith("NVIDIA"), row["source"].startswith("Qi")
    each = min(DEVICES_PER_NODE, gpus)
    stages = pipeline * chunks
    layers = _ends_spared(model.num_layers, stages) if of_qi else split_layers(model.num_layers, stages)
    if layers is None:
        raise ValueError(
            f"{row['source']} {row['model']}: {model.num_layers} layers do not divide into {stages} stages"
        )
    return Setup(
        # Qi et al. leave the output layer untied.
        replace(model, tied_embedding=not of_qi),
        parse_cluster(f"{DEVICES[row['gpu']]}:{gpus // each}x{each}"),
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


def _ends_spared(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """One layer fewer at both ends than elsewhere."""
    each = (num_layers + 2) // num_stages
    return (each - 1, *(each,) * (num_stages - 2), each - 1)
