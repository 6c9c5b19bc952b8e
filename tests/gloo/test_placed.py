"""Trainings whose stages are placed as a V, or in both directions, equal stock Megatron's, weight by weight.

"Stock" is Megatron's own loop without our patches. Compared with a V, it has one stage per rank. Two pipes over p ranks
are, to Megatron, pipelines of p/2 ranks in twice as many replicas, so stock runs with those sizes; its weights have
the same bits with and without virtual stages. Dropout is off because it depends on the rank that draws it, and so is
clipping, whose norm is summed in the order of the ranks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.schedule import Schedule
from tests.gloo.compare import furthest, gradients, losses_of, row_is_alike, weights, without_norms
from tests.gloo.conftest import Case, Outcome, Row
from tests.gloo.flags import (
    BPIPE,
    BUCKETS,
    CHUNKS,
    CONTEXT,
    DEFERRED,
    EIGHT_LAYERS,
    EXPERT_PAIR,
    EXPERTS,
    FOUR,
    FP16,
    FULL,
    FURTHER,
    GLOO,
    GROWS,
    LAYOUT,
    LLAMA,
    MEASURED,
    OVERLAPS,
    PEER,
    SEQUENCE,
    TENSOR,
    TWO,
    UNALIGNED,
    UNTIED,
    WHOLE,
    batch,
)
from tests.support.torch_schedules import as_csv, torch_schedule

pytestmark = pytest.mark.timeout(2460)
Trained = Callable[[Row], Outcome]

NAMED = f"--named {EIGHT_LAYERS}"
SEEDED = "--seeded --attention-dropout 0.1 --hidden-dropout 0.1"


def whole(schedule: Schedule) -> Schedule:
    """Return the same schedule without split backwards."""
    orders = [
        [
            Action(op.stage, Kind.BACKWARD if op.kind is Kind.BACKWARD_INPUT else op.kind, op.microbatch)
            for slot in row
            for op in slot.computations
            if op.kind is not Kind.BACKWARD_WEIGHT
        ]
        for row in schedule.ranks
    ]
    return place(schedule.name, schedule.num_microbatches, schedule.layout, orders)


def eager(schedule: Schedule) -> Schedule:
    """Return the same schedule, but stage 0 computes all its forwards first, so that its rank holds the most."""
    orders = [[op for slot in row for op in slot.computations] for row in schedule.ranks]
    orders[0].sort(key=lambda op: (op.stage, op.kind) != (0, Kind.FORWARD))
    return place("eager", schedule.num_microbatches, schedule.layout, orders)


def write(folder: Path) -> None:
    """Write schedules as files whose names have the numbers of ranks and micro-batches."""
    schedules = {
        "eager": write_csv(eager(build(ScheduleConfig("v-min", 4, 8, num_chunks=2)))),
        "dual_pipe_v": as_csv(torch_schedule("ScheduleDualPipeV", 4, 8, 2)),
        "dual_pipe_v_8": as_csv(torch_schedule("ScheduleDualPipeV", 8, 16, 2)),
        "chimera_8": write_csv(build(ScheduleConfig("chimera", 8, 8, balance=BalanceConfig()))),
    }
    for ranks, microbatches in ((4, 6), (4, 3), (2, 3), (2, 6)):
        schedule = build(ScheduleConfig("v-half", ranks, microbatches, num_chunks=2))
        schedules[f"v_half_whole_{ranks}_{microbatches}"] = write_csv(whole(schedule))
    for name, text in schedules.items():
        (folder / f"{name}.csv").write_text(text)


def of_file(name: str) -> str:
    return f"--bpipe-schedule {{schedules}}/{name}.csv"


# By name: flags, and whether eight micro-batches over four stages move anything.
SCHEDULES = {
    "v-half": ("--bpipe-schedule v-half", False),
    "v-half_whole": (f"--bpipe-schedule v-half {WHOLE}", False),
    "v-half_balanced": (f"--bpipe-schedule v-half {BPIPE}", False),
    "v-min": ("--bpipe-schedule v-min", False),
    "v-min_whole": (f"--bpipe-schedule v-min {WHOLE}", False),
    "v-min_balanced": (f"--bpipe-schedule v-min {BPIPE}", False),
    "zb-v": ("--bpipe-schedule zb-v", False),
    "zb-v_whole": (f"--bpipe-schedule zb-v {WHOLE}", False),
    "zb-v_balanced": (f"--bpipe-schedule zb-v {BPIPE}", False),
    "v-half_of_a_file": (of_file("v_half_whole_{ranks}_{microbatches}"), False),
    "v-half_of_a_file_balanced": (f"{of_file('v_half_whole_{ranks}_{microbatches}')} {BPIPE}", False),
    "dual_pipe_v": (of_file("dual_pipe_v"), False),
    "eager_balanced": (f"{of_file('eager')} {PEER}", True),
    "eager_balanced_gloo": (f"{of_file('eager')} {GLOO}", True),
    # Placed as in stock, with other orders.
    "grouped": (f"--bpipe-schedule grouped-interleaved {CHUNKS}", False),
    "grouped_balanced": (f"--bpipe-schedule grouped-interleaved {CHUNKS} {PEER}", True),
    "zb-h1": ("--bpipe-schedule zb-h1", False),
    "1f1b": ("--bpipe-executor", False),
}
V = "v-half v-min v-half_of_a_file"
# Flags of a feature, micro-batches, and what is compared with stock; of four stages a rank of a V has two.
V_ROWS: dict[str, tuple[str, int, str]] = {
    "m8": (
        "",
        8,
        "v-half v-half_whole v-min v-min_whole zb-v zb-v_whole zb-v_balanced dual_pipe_v eager_balanced "
        "eager_balanced_gloo",
    ),
    "balanced": ("", 6, "v-half_balanced v-min_balanced v-half_of_a_file_balanced zb-v_balanced"),
    "fewer_than_stages": ("", 3, f"{V} zb-v"),
    "llama": (f"{LLAMA} --calculate-per-token-loss --eval-interval 1 --eval-iters 2", 6, V),
    "uneven_ends": (
        "--num-layers 12 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 "
        f"{FULL} --timing-log-level 2",
        6,
        f"{V} grouped zb-h1 1f1b",
    ),
    "account_for_both_ends": (
        "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--recompute-granularity selective",
        6,
        V,
    ),
    "layout": (f"--num-layers 9 {LAYOUT} Et|tt|ttt|tttL", 6, V),
    "experts": (EXPERTS, 6, V),
    "predictions": (FURTHER, 6, V),
    "untied_predictions": (f"{LLAMA} {FURTHER}", 6, V),
    "predictions_in_a_layout": (
        f"--mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*2|t*2|t*2|t*2mL",
        8,
        "v-half",
    ),
    "untied_predictions_in_a_layout": (
        f"--mtp-num-layers 1 --position-embedding-type rope {UNTIED} {LAYOUT} Et*2|t*2|t*2|t*2mL",
        8,
        "v-min_balanced",
    ),
    "fp16": (FP16, 6, V),
    "tokens_of_a_file": (
        # Megatron searches an empty part for samples forever.
        "--data-path {schedules}/tokens --tokenizer-type NullTokenizer --vocab-size 512 "
        "--split 6,3,2 --eval-interval 2 --eval-iters 1",
        6,
        f"{V} grouped zb-h1 1f1b",
    ),
    # The script's own function makes its model, and Megatron builds chunks with it elsewhere.
    "script_of_ones_own": ("--script plain_script.py", 6, f"{V} grouped zb-h1 1f1b"),
    # Only by name: a file has one number of micro-batches.
    "grows": (GROWS, 0, "v-half"),
    # Equal chunks, and dropout drawn by stage, so a V differs only in the order of ranks.
    "dropout": (f"{CHUNKS} {SEEDED}", 8, "v-half zb-v grouped_balanced"),
    # Deferred to the end of an iteration and accumulated in the matrix product, also on the rank with the embedding.
    "deferred": (DEFERRED, 8, "v-half zb-v"),
}
# Layouts of a V that correspond to stock's.
OF_A_V = {
    "Et|tt|ttt|tttL": "Et|tt|t|t|t|t|t|tL",
    "Et*2|t*2|t*2|t*2mL": "Et|t|t|t|t|t|t|tmL",
}
# Two stages, and two ranks in another dimension.
V_WIDE_ROWS: dict[str, tuple[str, int, str]] = {
    "v_and_tensor": (TENSOR, 6, V),
    "v_and_sequence": (SEQUENCE, 6, V),
    "v_and_data": ("", 3, V),
    "v_and_overlaps": (f"{OVERLAPS} {BUCKETS} --use-tp-pp-dp-mapping", 3, V),
    "v_and_unaligned": (UNALIGNED, 3, V),
    "v_and_context": (CONTEXT, 6, V),
    "v_and_experts": (EXPERT_PAIR, 3, V),
}
# With eight ranks and sixteen micro-batches: flags, and whether anything moves.
EIGHT_RANKS: dict[str, tuple[str, bool]] = {
    "1f1b": ("--bpipe-executor", False),
    "1f1b_balanced": (f"--bpipe-executor {PEER}", True),
    "interleaved": (f"--bpipe-executor {CHUNKS}", False),
    "interleaved_balanced": (f"--bpipe-executor {CHUNKS} {PEER}", True),
    "1f1b-split": ("--bpipe-schedule 1f1b-split", False),
    "1f1b-split_balanced": (f"--bpipe-schedule 1f1b-split --bpipe-delay 1 {PEER}", True),
    "zb-h1": ("--bpipe-schedule zb-h1", False),
    "v-half": ("--bpipe-schedule v-half", False),
    "v-min": ("--bpipe-schedule v-min", False),
    "zb-v": ("--bpipe-schedule zb-v", False),
    "dual_pipe_v": (of_file("dual_pipe_v_8"), False),
    "grouped-interleaved": (f"--bpipe-schedule grouped-interleaved --bpipe-group 4 {CHUNKS}", False),
    "grouped-interleaved_balanced": (f"--bpipe-schedule grouped-interleaved --bpipe-group 4 {CHUNKS} {PEER}", True),
}


def v_rows() -> Iterable[Row]:
    for rows, pipeline, ranks in ((V_ROWS, FOUR, 4), (V_WIDE_ROWS, TWO, 2)):
        for feature, (flags, microbatches, which) in rows.items():
            # With two stages, two replicas share the batch.
            size = batch(microbatches if ranks == 4 else 6) if microbatches else ""
            common = f"{NAMED} {pipeline} {size} {flags}"
            ours = common
            for stocks, of_a_v in OF_A_V.items():
                ours = ours.replace(stocks, of_a_v)
            for schedule in which.split():
                added, moves = SCHEDULES[schedule]
                added = added.replace("{ranks}", str(ranks)).replace("{microbatches}", str(microbatches))
                name = f"{feature}-{schedule}"
                measured, expected = (MEASURED, moves) if feature in ("m8", "balanced") else ("", None)
                slow = (feature, schedule) not in V_ALWAYS
                yield Row(
                    name, Case(feature, common), Case(name, f"{ours} {added} {measured}"), 4, slow, moves=expected
                )
    deep = f"{NAMED} --num-layers 16 --pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 16"
    for name, (added, moves) in EIGHT_RANKS.items():
        yield Row(f"eight-{name}", Case("eight", deep), Case(name, f"{deep} {added} {MEASURED}"), 8, moves=moves)


V_ALWAYS = {("untied_predictions_in_a_layout", "v-min_balanced")}

# -- hybrid models: a layer pattern is divided into stages. The same layers in four, eight and two stages.
LAYERS = ("M*", "-*", "M", "-M", "*-", "M-", "M", "*-")


def pattern(stages: int) -> str:
    size = len(LAYERS) // stages
    parts = ["".join(LAYERS[first : first + size]) for first in range(0, len(LAYERS), size)]
    return f"--hybrid-layer-pattern {'|'.join(parts)}"


def hybrid_rows() -> Iterable[Row]:
    common = f"{NAMED} --script plain_script_hybrid.py {batch(8)}"
    for schedule, stock in (("v-half", FOUR), ("v-min_balanced", FOUR), ("bitpipe", TWO)):
        stages = int(stock.split()[-1])
        added = SCHEDULES[schedule][0] if schedule in SCHEDULES else by(schedule)
        stocks = Case(f"hybrid_{stages}", f"{common} {stock} {pattern(stages)}")
        ours = Case(f"hybrid-{schedule}", f"{common} {FOUR} {pattern(8)} {added}")
        yield Row(ours.name, stocks, ours, slow=schedule != "bitpipe")


# -- two pipes in opposite directions


def pipeline(ranks: int, chunks: int = 1) -> str:
    more = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    return f"--pipeline-model-parallel-size {ranks} {more}"


def chunks_of(schedule: str) -> int:
    """Return the number of chunks at the end of a family's name."""
    return int(schedule[-1]) if schedule[-1].isdigit() else 1


def by(schedule: str, ranks: int = 4) -> str:
    chunks = chunks_of(schedule)
    return f"{pipeline(ranks, chunks)} --bpipe-schedule {schedule.removesuffix(f'-{chunks}')}"


EVERY = " ".join(("chimera", "mixpipe", "bitpipe-2", "bitpipe-early-2"))
# Flags of both, micro-batches of both pipes together, and the schedules compared with stock, on four ranks.
PIPES_ROWS: dict[str, tuple[str, int, str]] = {
    "two_of_six": ("", 6, EVERY),
    # Odd, so a rank's first and last chunks serve different pipes, and the stages turn at both ends.
    "three_chunks": ("--num-layers 12 --gradients", 8, "bitpipe-3"),
    "two_of_llama": (f"{LLAMA} --calculate-per-token-loss --eval-interval 1 --eval-iters 2", 8, "chimera bitpipe-2"),
    "two_of_fp16": (FP16, 8, "chimera"),
    "two_of_experts": (EXPERTS, 8, "chimera"),
    "two_of_predictions": (FURTHER, 8, "chimera"),
    "two_of_predictions_in_a_layout": (
        f"--mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*4|t*4mL",
        8,
        "bitpipe",
    ),
    "two_of_uneven_ends": (f"--num-layers 12 --decoder-first-pipeline-num-layers 2 {FULL}", 8, "chimera"),
    # Dropout is drawn by stage, so stock has the same chunks.
    "two_of_dropout": (SEEDED, 8, "bitpipe-2"),
    # The same stages on half as many ranks: virtual stages in stock.
    "two_of_layout": (f"--num-layers 9 {LAYOUT} Et|tt|ttt|tttL", 8, "chimera"),
    "two_of_grows": (GROWS, 0, "chimera"),
    # Megatron logs the loss of one replica, which with an odd number of chunks is the other one's.
    "two_of_script": ("--script plain_script.py", 8, "bitpipe-2"),
}
PIPES_OF_A_LAYOUT = {"Et*4|t*4mL": "Et|t|t|t|t|t|t|tmL"}
# With two ranks in another dimension, gradients are summed over four ranks, in another order than stock's: they are
# equal to the bit only if the order does not matter.
PIPES_WIDE_ROWS: dict[str, tuple[str, int, str]] = {
    "two_and_sequence": (SEQUENCE, 8, "chimera bitpipe-2"),
    "two_and_context": (f"{CONTEXT} --exact-sums --gradients", 8, "chimera bitpipe-2"),
    "two_and_context_dropout": (f"{CONTEXT} {SEEDED} --exact-sums", 8, "bitpipe-2"),
    "two_and_data": ("--exact-sums --gradients", 16, "chimera bitpipe-2 bitpipe-early-2"),
}
DEEPER = "--num-layers 16"
SIXTEEN_ROWS: dict[str, tuple[str, int, str]] = {
    "two_of_eight_and_sequence": (f"{SEQUENCE} {DEEPER}", 16, "chimera bitpipe-2"),
    "two_of_eight_and_data": (f"--exact-sums --gradients {DEEPER}", 32, "chimera bitpipe-2"),
}
# Two ranks of a pair share experts, and sums are not exact. Stock has the same chunks, because a ring begins where a
# weight's place in its chunk's buffer says.
PAIR_ROWS: dict[str, tuple[str, int, str]] = {"experts_of_a_pair": (f"{EXPERT_PAIR} --gradients", 8, EVERY)}
PAIR_EIGHT_ROWS: dict[str, tuple[str, int, str]] = {
    "experts_of_a_pair_of_eight": (f"{EXPERT_PAIR} --gradients {DEEPER}", 16, "chimera bitpipe-2"),
}
ROUNDED_ROWS: dict[str, tuple[str, int, str]] = {
    "context_rounded": (f"{CONTEXT} --gradients", 8, "chimera"),
    "data_rounded": ("--gradients", 16, "bitpipe-2"),
    "data_overlaps": (OVERLAPS, 16, "bitpipe-2"),
}


def pipes_rows(rows: dict[str, tuple[str, int, str]], world: int = 4, ranks: int = 4) -> list[Row]:
    pairs = []
    for feature, (flags, microbatches, which) in rows.items():
        common = f"{NAMED} {flags} {batch(microbatches) if microbatches else ''}"
        chunks = 1
        if "--seeded" in flags or rows is ROUNDED_ROWS:
            chunks = max(2 * chunks_of(schedule) for schedule in which.split())
        ours = common
        for stocks, of_both in PIPES_OF_A_LAYOUT.items():
            ours = ours.replace(stocks, of_both)
        for schedule in which.split():
            name = f"{feature}-{schedule}"
            stock = Case(feature, f"{common} {pipeline(ranks // 2, chunks)}")
            is_slow = feature != "three_chunks"
            pairs.append(Row(name, stock, Case(name, f"{ours} {by(schedule, ranks)}"), world, is_slow))
    return pairs


# All numbers of ranks, rounds of micro-batches and chunks, compared with stock's same number of virtual stages.
SIZED: dict[str, tuple[str, str]] = {
    "plain": ("--gradients", "chimera bitpipe-2 bitpipe-3 mixpipe bitpipe-early-2 bitpipe-early-3"),
    # A rank then has only its shard's sums of gradients, and stock's shards have other weights.
    "sharded": (
        "--use-distributed-optimizer --calculate-per-token-loss --eval-interval 1 --eval-iters 2",
        "chimera bitpipe-2 bitpipe-3",
    ),
    "eager": (f"--overlap-grad-reduce --bf16 {BUCKETS}", "chimera bitpipe-2 bitpipe-3 mixpipe bitpipe-early-2"),
    "overlaps": (f"{OVERLAPS} {BUCKETS}", "chimera bitpipe-2 bitpipe-3"),
    "unaligned": (UNALIGNED, "chimera bitpipe-2 bitpipe-3"),
}
# On eight ranks something moves: rounds, the chunks of stock, and flags. With one unit of 8 micro-batches, the middle
# ranks hold the most.
MOVING: dict[str, tuple[int, int, str]] = {
    "chimera_balanced": (1, 1, f"{by('chimera', 8)} {PEER}"),
    "chimera_balanced_gloo": (1, 1, f"{by('chimera', 8)} {GLOO}"),
    "chimera_of_a_file": (1, 1, f"{pipeline(8)} {of_file('chimera_8')} {BPIPE}"),
    "mixpipe_balanced": (4, 1, f"{by('mixpipe', 8)} {PEER}"),
}


def sized_row(feature: str, name: str, ranks: int, rounds: int, chunks: int, ours: str, moves: bool = False) -> Row:
    microbatches = rounds * ranks
    sizes = f"--num-layers {ranks * chunks} --micro-batch-size 1 --global-batch-size {microbatches} --train-iters 2"
    common, measured = f"{NAMED} {sizes} {SIZED[feature][0]}", feature == "plain"
    stock = Case(f"{feature}_{microbatches}_stock_{chunks}", f"{common} {pipeline(ranks // 2, 2 * chunks)}")
    name = f"{feature}_{microbatches}-{name}"
    case = Case(name, f"{common} {ours} {MEASURED if measured else ''}")
    return Row(f"{name}-{ranks}", stock, case, ranks, moves=moves if measured else None)


def sized_rows() -> Iterable[Row]:
    """A plain schedule has every number of rounds and ranks; with a feature, these numbers alternate."""
    number = 0
    for feature, (_, which) in SIZED.items():
        for schedule in which.split():
            for rounds in range(1, 5) if feature == "plain" else [1 + number % 4]:
                ranks = (4, 8)[number % 2]
                yield sized_row(feature, schedule, ranks, rounds, chunks_of(schedule), by(schedule, ranks))
                number += 1
            number += feature == "plain"
    for name, (rounds, chunks, ours) in MOVING.items():
        yield sized_row("plain", name, 8, rounds, chunks, ours, moves=True)


def parameters(rows: Iterable[Row]) -> list[Any]:
    return [row.parameter() for row in rows]


V_AND_STOCK = {row.name: row for row in v_rows()}
PIPES = [
    *pipes_rows(PIPES_ROWS),
    *pipes_rows(PIPES_WIDE_ROWS, 8),
    *pipes_rows(SIXTEEN_ROWS, 16, 8),
    *sized_rows(),
]


# Writes documents of random tokens as Megatron's file and index, in a process with the stand-in for CUDA.
TOKENS = """
import sys
import torch
from megatron.scheduling.start import startup
startup.prepare()
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
torch.manual_seed(0)
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin")
for length in torch.randint(20, 2000, (100,)).tolist():
    builder.add_document(torch.randint(512, (length,)), [length])
builder.finalize(sys.argv[1] + ".idx")
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("schedules")
    write(folder)
    if request.config.getoption("--slow"):
        subprocess.run([sys.executable, "-c", TOKENS, str(folder / "tokens")], check=True, timeout=120)
    return {"schedules": folder}


@pytest.mark.parametrize("row", parameters(V_AND_STOCK.values()))
def test_a_v_trains_as_stock_does(trained: Trained, row: Row) -> None:
    outcome = trained(row)
    row_is_alike(outcome, row)
    skipped = [step["skipped"] for step in outcome.record(row.ours.name, row.world - 1)["iterations"]]
    assert any(skipped) is ("--fp16" in row.stock.flags), "a step whose gradients overflow is skipped"


@pytest.mark.parametrize("row", parameters([V_AND_STOCK["grows-v-half"]]))
def test_a_batch_grows_in_a_v(trained: Trained, row: Row) -> None:
    printed = trained(row).said(row.ours.name, 3)
    assert set(re.findall(r"global batch size: +(\d+)", printed)) == {"8", "16"}


@pytest.mark.parametrize("row", parameters(hybrid_rows()))
def test_a_pattern_is_dealt_out_by_stage(trained: Trained, row: Row) -> None:
    row_is_alike(trained(row), row)


@pytest.mark.parametrize("row", parameters(PIPES))
def test_two_pipes_train_as_stock_does(trained: Trained, row: Row) -> None:
    outcome = trained(row)
    row_is_alike(outcome, row)
    if row.moves is not None:
        reports = outcome.reports(row.ours.name)
        assert [report["pipeline"] for report in reports] == [0] * row.world
        assert sorted(report["stage"] for report in reports) == list(range(row.world))


@pytest.mark.parametrize("row", parameters([*pipes_rows(PAIR_ROWS), *pipes_rows(PAIR_EIGHT_ROWS, 8, 8)]))
def test_experts_of_a_pair_add_up_tokens_of_both_pipes(trained: Trained, row: Row) -> None:
    """A chunk adds up its own pipe's tokens first, unlike stock, so experts' sums differ in the last bits."""
    outcome, ours, stock = trained(row), row.ours.name, row.stock.name
    first, of_stock = (without_norms(outcome.record(case, row.world - 1))[0] for case in (ours, stock))
    assert first == of_stock
    expected, actual = (gradients(outcome, case, row.world) for case in (stock, ours))
    differ = {name for name, gradient in expected.items() if not torch.equal(actual[name], gradient)}
    assert all("local_experts" in name for name in differ)
    assert furthest(actual, expected) < 1e-6


# Layers of chunks whose pipe begins in their rank's half of the ranks.
ITS_OWN_PIPES = {"chimera": {0, 1, 2, 3}, "bitpipe-2": {0, 1, 6, 7}}


@pytest.mark.parametrize("row", parameters(pipes_rows(ROUNDED_ROWS, 8)))
def test_a_sum_of_four_differs_by_its_order(trained: Trained, row: Row) -> None:
    """Half of a rank's chunks read its pair's samples, so their sums have another order; the rest are equal."""
    outcome, ours, stock = trained(row), row.ours.name, row.stock.name
    assert losses_of(outcome, ours) == pytest.approx(losses_of(outcome, stock), rel=1e-6)
    if "--gradients" in row.stock.flags:
        expected, actual = (gradients(outcome, case, 8) for case in (stock, ours))
        assert furthest(actual, expected) < 1e-6
        layers = {
            layer: [name for name in expected if name.startswith(f"decoder.layers.{layer}.")] for layer in range(8)
        }
        equal = {
            layer for layer, names in layers.items() if all(torch.equal(actual[name], expected[name]) for name in names)
        }
        assert equal == ITS_OWN_PIPES[row.name.partition("-")[2]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_are_those_of_one_process_over_the_same_samples(run_cases: Callable[..., Outcome]) -> None:
    """If both pipes read the first one's samples, no loss of a single run would show the unread ones."""
    common = f"{NAMED} {batch(8)} --gradients --train-iters 1"
    alone = run_cases(1, [Case("alone", f"{common} {pipeline(1)}")], 200)
    cases = [
        Case("bitpipe", f"{common} {by('bitpipe-2')}"),
        Case("deaf", f"{common} {by('bitpipe-2')} --one-pipes-samples"),
    ]
    both = run_cases(4, cases, 300)
    expected = gradients(alone, "alone", 1)
    assert furthest(gradients(both, "bitpipe", 4), expected) < 1e-6
    assert furthest(gradients(both, "deaf", 4), expected) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_seeded_dropout_drops_something(run_cases: Callable[..., Outcome]) -> None:
    common = f"{NAMED} {FOUR} {batch(8)}"
    outcome = run_cases(4, [Case("dropped", f"{common} {CHUNKS} {SEEDED}"), Case("quiet", common)], 400)
    assert weights(outcome, "dropped", 4) != weights(outcome, "quiet", 4)


# The logits of all tokens in shards, whose sums have another order.
SHARDED = {
    "v-half": "--bpipe-schedule v-half --bpipe-vocabulary 1",
    "grouped": f"--bpipe-schedule grouped-interleaved --bpipe-vocabulary 2 {BPIPE}",
}


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_further_tokens_of_a_layout_have_their_logits_in_shards(run_cases: Callable[..., Outcome]) -> None:
    common = f"{NAMED} {batch(8)} --mtp-num-layers 1 --position-embedding-type rope {FOUR} {UNTIED} {LAYOUT}"
    cases = [Case("stock", f"{common} Et*2|t*2|t*2|t*2mL")]
    cases += [Case(name, f"{common} Et|t|t|t|t|t|t|tmL {added}") for name, added in SHARDED.items()]
    outcome = run_cases(4, cases, 300)
    for name in SHARDED:
        pairs = zip(losses_of(outcome, name), losses_of(outcome, "stock"), strict=True)
        for number, (actual, expected) in enumerate(pairs):
            assert actual == pytest.approx(expected, rel=1e-6 if number else 2.5e-7), f"{name}, iteration {number + 1}"
