"""scripts/bench/predictions.py compares predictions with measurements, and docs/validation.md has its tables."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import build
from bpipe.predict import cluster
from bpipe.predict.activations import moved_bytes
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.model import Model
from bpipe.predict.sizes import sent_bytes
from bpipe.record.format import Sizes
from bpipe.record.report.memory import rank_peaks
from bpipe.schedule.host_buffers import num_host_buffers
from tests.support.predicted import saves_input

# Some published runs are predicted in forty configurations, which takes a quarter of a minute. The snapshots of
# commands also show whether a prediction changes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PAGE = Path(__file__).resolve().parents[2] / "docs/validation.md"


@pytest.fixture
def predictions(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("bench.predictions")


def test_the_page_has_the_tables_that_the_script_makes(predictions: ModuleType) -> None:
    assert predictions.rewritten(PAGE.read_text()) == PAGE.read_text(), (
        "run python scripts/bench/predictions.py --write docs/validation.md"
    )


# Number of values, and the largest allowed mean and single error in percent, by source.
LIMITS = [
    ("iteration times, Yeung 2024", 20, 1, 2),
    ("stage times, Kim 2023 and Yeung 2024", 16, 4, 10),
    ("MFU of one stage, Huang 2024", 4, 9, 14),
    ("MFU of GPT-3 96B, Kim 2023", 19, 8, 41),
    ("Narayanan 2021 table 1", 10, 3, 8),
    ("Narayanan 2021 table 2", 6, 3, 6),
    ("Korthikanti 2022 table 5", 8, 4.5, 7),
    ("Qi 2024 table 4", 24, 2.5, 6),
    ("NVIDIA DGX Cloud benchmarking recipes 24.09", 5, 1.5, 3),
    ("BigScience 2022, before BLOOM", 17, 10, 22),
    ("experts in bf16, Megatron Core 0.9 and Bridge 25.11", 3, 11, 22),
    ("dense in FP8, Bridge 25.11", 2, 8, 10),
    ("dense in FP8, Bridge 25.11", 7, 20, 27),
    ("experts in FP8, Bridge 25.11", 3, 44, 69),
    ("allocated memory, Qi 2024 table 4", 8, 3, 3),
    ("allocated memory, Yeung 2024", 20, 3, 3),
]


def test_no_error_grows(predictions: ModuleType) -> None:
    """Some sources miss the target of 4 and 10 %, as the page says; their errors must not grow further."""
    sources = predictions.comparisons()
    assert [(name, len(rows)) for name, _, _, rows in sources] == [(name, number) for name, number, _, _ in LIMITS]
    for (name, _, _, rows), (_, _, mean, largest) in zip(sources, LIMITS, strict=True):
        errors = [abs(row.error_percent) for row in rows]
        assert statistics.mean(errors) <= mean, name
        assert max(errors) <= largest, name


def test_runs_are_predicted_in_their_measured_order(predictions: ModuleType) -> None:
    assert predictions.agreement(predictions.runs.published()) >= 0.8
    assert predictions.agreement(predictions.runs.before_bloom()) >= 0.75


def test_the_grid_of_gpt3_96b(predictions: ModuleType) -> None:
    """At most one row is missed, and the two balanced rows are the fastest, in their measured order."""
    rows = predictions.runs.grid()
    assert sum(not row.agrees for row in rows) <= 1
    for column in ("measured", "predicted"):
        fastest = sorted(rows, key=lambda row: -getattr(row.mfu, column))[:2]
        assert [(row.name, row.balanced) for row in fastest] == [("4/8/2", "yes"), ("2/16/1", "yes")], column


def test_nvidias_runs_are_predicted_with_the_overlap_of_their_recipe(predictions: ModuleType) -> None:
    rows = [row for row in predictions.runs.published() if row.source.startswith("NVIDIA")]
    assert [row.setup.switches.tp_comm_overlap for row in rows] == [True] * 5


def recorded_peaks(setup: Setup) -> list[int]:
    """Return what a run of the setup records: its micro-batches, host buffers, and the stage's input."""
    schedule, stages = build(setup.program()), range(setup.num_stages)
    saved = [moved_bytes(setup, stage, 1) for stage in stages]
    moved = [moved_bytes(setup, stage, 65536) for stage in stages]  # the default of --bpipe-min-bytes
    peaks = []
    for rank in range(setup.pipeline):
        received = sent_bytes(setup) if rank and saves_input(setup) else 0
        lent = num_host_buffers(schedule, rank) * moved[setup.pipeline - 1 - rank]
        of_one, leaving = {rank: saved[rank]}, {rank: moved[rank]}
        sizes = Sizes(iteration=1, saved_bytes=of_one, moved_bytes=leaving, received_bytes=received, host_bytes=lent)
        peak = rank_peaks(schedule, rank, sizes).num_bytes
        assert peak is not None
        peaks.append(peak)
    return peaks


def test_our_own_runs_are_predicted_to_the_byte(predictions: ModuleType) -> None:
    """GPT and LLaMA with both precisions, every recomputation, tensor and sequence parallelism, and balancing."""
    recorded = json.loads((PAGE.parents[1] / "tests/data/cpu_runs.json").read_text())
    models = {name: Model(name=name, **sizes) for name, sizes in recorded["models"].items()}
    setups = []
    for run in recorded["runs"]:
        choices = {"kernels": "cpu", **run["setup"]}
        model = models[choices.pop("model")]
        sizes = [choices.pop(name) for name in ("tensor", "pipeline", "micro_batch", "global_batch")]
        choices |= {"balance": named_balance(choices["balance"]), "sequence": model.sequence}
        setup = predictions.runs.setup_of(model, f"a100-80g:{sizes[0] * sizes[1]}", *sizes, **choices)
        assert recorded_peaks(setup) == run["peak_bytes"], run["name"]
        setups.append(setup)
    assert {setup.balance for setup in setups} == {None, EVENLY}
    assert {setup.precision for setup in setups} == {"fp32", "bf16"}
    assert {setup.recompute for setup in setups} == {
        *("none", "selective", "full", "full:block:1", "full:uniform:2"),
        *("selective:core_attn+mlp", "selective:layernorm"),
    }
    assert {setup.sequence_shards for setup in setups if setup.tensor == 2} == {1, 2}


def test_error_bars_are_those_of_the_runs(predictions: ModuleType) -> None:
    kinds = (cluster.AMPERE, cluster.HOPPER, cluster.BLACKWELL, cluster.EXPERTS, cluster.CALIBRATED)
    assert predictions.measured_bars() == list(kinds)
