"""The output layer in shards trains what stock Megatron trains, within what another order of additions makes of it.

"Stock" runs with no patch of ours in Megatron's scheduler. Weights are equal to the bit at the start, and so is
everything that balancing alone changes. Every row has a case of stock's and one with shards; the weight of the output
layer is compared in one piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layers.ends import shard_bytes
from bpipe.predict.layout import Setup
from bpipe.predict.model import gpt
from bpipe.record.read import read_held
from bpipe.schedule.layout import Vocabulary
from tests.gloo.conftest import BPIPE, ITERATIONS, ROOT, Case, Outcome, asked_for, finish, free_ports, start
from tests.gloo.test_launch import FOUR, iterations
from tests.gloo.test_parallelism import LLAMA, OVERLAPS, PLAIN_ATTENTION
from tests.gloo.test_training import same

OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"
UNTIED = ("--untie-embeddings-and-output-weights",)
SHARDS = ("--bpipe-vocabulary", "1")
INPUT = ("--bpipe-vocabulary-input", "--bpipe-vocabulary")
AHEAD = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
OURS = {
    "one": ("--bpipe-vocabulary", "1", "--bpipe-report", "{{folder}}/{case}"),
    "two": ("--bpipe-vocabulary", "2", "--bpipe-report", "{{folder}}/{case}"),
    "interlaced": (
        "--bpipe-vocabulary",
        "interlaced",
        "--bpipe-min-bytes",
        "1024",
        "--bpipe-report",
        "{{folder}}/{case}",
    ),
    "balanced": ("--bpipe-vocabulary", "1", *BPIPE, "--bpipe-transport", "peer", "--bpipe-report", "{{folder}}/{case}"),
    "input": (*INPUT, "1", "--bpipe-min-bytes", "1024", "--bpipe-report", "{{folder}}/{case}"),
    "input_two": (*INPUT, "2", "--bpipe-min-bytes", "1024", "--bpipe-report", "{{folder}}/{case}"),
    "input_interlaced": (*INPUT, "interlaced", "--bpipe-min-bytes", "1024", "--bpipe-report", "{{folder}}/{case}"),
    "input_balanced": (*INPUT, "1", *BPIPE, "--bpipe-transport", "peer", "--bpipe-report", "{{folder}}/{case}"),
    "input_zb_h1": (
        *INPUT,
        "2",
        "--bpipe-schedule",
        "zb-h1",
        "--bpipe-min-bytes",
        "1024",
        "--bpipe-report",
        "{{folder}}/{case}",
    ),
    "input_split_balanced": (
        *INPUT,
        "1",
        "--bpipe-schedule",
        "1f1b-split",
        *BPIPE,
        "--bpipe-report",
        "{{folder}}/{case}",
    ),
    "zb_h1": ("--bpipe-vocabulary", "1", "--bpipe-schedule", "zb-h1", "--bpipe-report", "{{folder}}/{case}"),
    "two_balanced": (
        "--bpipe-vocabulary",
        "2",
        *BPIPE,
        "--bpipe-transport",
        "peer",
        "--bpipe-report",
        "{{folder}}/{case}",
    ),
}


class Tolerance(NamedTuple):
    """Relative: of the first loss, later ones, the first gradient norm, each tensor's gradient (its L2 norm), the
    whole gradient."""

    loss: float
    later: float
    norm: float
    gradient: float
    whole: float


FP32 = Tolerance(2.5e-7, 1e-6, 1e-6, 3e-6, 3e-6)
# A rank of the distributed optimizer has the sum of a part of its gradients only, and another part than stock's.
PARTS = FP32._replace(gradient=math.inf, whole=math.inf)
HALF = Tolerance(1e-6, 1e-3, 1e-3, 3e-2, 1e-2)

# The embedding in shards, too.
INPUTS = ("input", "input_two", "input_interlaced", "input_balanced")
# And backwards in halves.
SPLIT_INPUTS = ("input_zb_h1", "input_split_balanced")
# One row a feature of Megatron's, of four stages: its flags, which of ours are compared with stock, and how closely.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Tolerance]] = {
    "vocabulary_m8": (
        ("--global-batch-size", "16"),
        ("one", "two", "interlaced", "balanced", "two_balanced", *INPUTS, *SPLIT_INPUTS),
        FP32,
    ),
    "vocabulary_tied": (("--global-batch-size", "16"), ("one", "two", "balanced", *INPUTS, *SPLIT_INPUTS), FP32),
    "vocabulary_tied_bf16": (("--global-batch-size", "16", "--bf16"), ("one", "two", "input"), HALF),
    "vocabulary_m1": (("--global-batch-size", "2"), ("one", "two", "interlaced", "input"), FP32),
    "vocabulary_m2": (("--global-batch-size", "4"), ("one", "two", "input"), FP32),
    "vocabulary_m3": (("--global-batch-size", "6"), ("one", "two", "input_two"), FP32),
    "vocabulary_m5": (("--global-batch-size", "10"), ("one", "two"), FP32),
    "vocabulary_m16": (("--global-batch-size", "32"), ("one",), FP32),
    "vocabulary_bf16": (
        ("--global-batch-size", "16", "--bf16"),
        ("one", "two", "balanced", "two_balanced", "input"),
        HALF,
    ),
    "vocabulary_fp16": (
        ("--global-batch-size", "16", "--fp16", "--initial-loss-scale", "65536"),
        ("one", "two", "input"),
        HALF,
    ),
    "vocabulary_per_token_loss": (
        ("--global-batch-size", "16", "--calculate-per-token-loss"),
        ("one", "two", "input"),
        FP32,
    ),
    "vocabulary_evaluation": (
        ("--global-batch-size", "16", "--eval-interval", "2", "--eval-iters", "2"),
        ("one", "two", "interlaced", "input", "input_two", "input_interlaced"),
        FP32,
    ),
    "vocabulary_llama": (("--global-batch-size", "16", *LLAMA), ("one", "input"), FP32),
    "vocabulary_further": (
        ("--global-batch-size", "16", *AHEAD, "--eval-interval", "2", "--eval-iters", "2"),
        ("one", "two", "interlaced", "balanced", "two_balanced", "zb_h1"),
        FP32,
    ),
    "vocabulary_two_further": (
        ("--global-batch-size", "16", *AHEAD, "--mtp-num-layers", "2", "--calculate-per-token-loss"),
        ("one", "two"),
        FP32,
    ),
    "vocabulary_further_fp16": (
        ("--global-batch-size", "16", *AHEAD, "--fp16", "--initial-loss-scale", "65536"),
        ("one", "two"),
        HALF,
    ),
    "vocabulary_full_recomputation": (
        (
            *("--global-batch-size", "16", "--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
        ("one", "two", "input"),
        FP32,
    ),
}
# Two stages, and two ranks in another dimension.
UNALIGNED = ("--ddp-bucket-size", "20000", "--no-align-grad-reduce", "--no-align-param-gather")
TENSOR = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
WIDE_ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Tolerance]] = {
    "vocabulary_tensor": (TENSOR, ("one", "two", "input"), FP32),
    "vocabulary_sequence": ((*TENSOR, "--sequence-parallel"), ("one", "two", "input"), FP32),
    # Megatron's embedding transposes and scatters itself.
    "vocabulary_sequence_llama": ((*TENSOR, "--sequence-parallel", *LLAMA), ("one", "input", "input_two"), FP32),
    "vocabulary_further_sequence": (
        (*TENSOR, "--sequence-parallel", *AHEAD, "--mtp-num-layers", "2"),
        ("one", "two"),
        FP32,
    ),
    "vocabulary_tied_tensor": (TENSOR, ("one", "two", "input", "input_two"), FP32),
    "vocabulary_tied_data": ((), ("one", "input"), FP32),
    "vocabulary_data": ((), ("one", "two", "input"), FP32),
    "vocabulary_overlaps": (OVERLAPS, ("one", "two", "interlaced", "input"), PARTS),
    "vocabulary_tied_overlaps": (OVERLAPS, ("one", "two", "input", "input_two"), PARTS),
    "vocabulary_unaligned": ((*OVERLAPS, *UNALIGNED), ("one", "two", "input"), PARTS),
    "vocabulary_tied_unaligned": ((*OVERLAPS, *UNALIGNED), ("one", "two", "input"), PARTS),
    "vocabulary_tied_distributed": (("--use-distributed-optimizer",), ("one",), PARTS),
    "vocabulary_context": (
        ("--context-parallel-size", "2", *PLAIN_ATTENTION),
        ("one", "two", "interlaced", "input"),
        FP32,
    ),
    "vocabulary_tied_context": (("--context-parallel-size", "2", *PLAIN_ATTENTION), ("one", "two", "input"), FP32),
}
# Every algorithm, one of them balanced, one weight of both layers, and the embedding in shards, too.
ALWAYS = {
    *(("vocabulary_m8", ours) for ours in ("one", "two", "interlaced", "balanced")),
    *(("vocabulary_tied", ours) for ours in ("one", "input")),
    *(("vocabulary_further", ours) for ours in ("one", "balanced")),
}


def compared(rows: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(row, ours, marks=() if (row, ours) in ALWAYS else pytest.mark.slow, id=f"{row}-{ours}")
        for row, (_, which, _) in rows.items()
        for ours in which
    ]


def cases(rows: dict[str, Any], request: pytest.FixtureRequest, common: tuple[str, ...] = ()) -> list[Case]:
    """Of each row that a test asks for, stock's and what it is compared with; tests that name a row alone look at
    its first."""
    wanted = asked_for(request, "row", "ours") | {(row, "one") for (row,) in asked_for(request, "row")}
    wanted |= {(row, ours) for row, *both in asked_for(request, "row", "plain", "moved") for ours in both}
    wanted |= {(row, "interlaced") for row, _ in asked_for(request, "row", "held")}
    found = []
    for name, (flags, which, _) in rows.items():
        of_row = [ours for ours in which if (name, ours) in wanted]
        if not of_row:
            continue
        flags = (*(() if "tied" in name else UNTIED), *common, *flags)
        found.append(Case(name, flags))
        for ours in of_row:
            case = f"{name}_{ours}"
            found.append(Case(case, [*flags, *(flag.format(case=case) for flag in OURS[ours])]))
    return found


def tensors(outcome: Outcome, case: str, what: str, stages: int) -> dict[str, torch.Tensor]:
    """Of all ranks, by rank and name; the vocabulary's rows in one piece, for each rank of another dimension."""
    found: dict[str, torch.Tensor] = {}
    rows: dict[str, list[torch.Tensor]] = {}
    world = len(outcome.codes)
    # Ranks of the pipeline are the outermost.
    beside = world // stages
    for rank in range(world):
        for name, tensor in torch.load(outcome.folder / f"{case}.rank{rank}.pt")[what].items():
            if name in (OUTPUT, EMBEDDING):
                rows.setdefault(f"{rank % beside} {name}", []).append(tensor.double())
            else:
                found[f"{rank} {name}"] = tensor.double()
    found |= {name: torch.cat(parts) for name, parts in rows.items()}
    # A shard of both layers is one weight.
    return found | {
        f"{rank} {OUTPUT}": found[f"{rank} {EMBEDDING}"] for rank in range(beside) if f"{rank} {OUTPUT}" not in found
    }


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def near(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)


def as_stock(outcome: Outcome, row: str, ours: str, tolerance: Tolerance, stages: int = 4) -> None:
    case = f"{row}_{ours}"
    stock, sharded = (outcome.record(name, len(outcome.codes) - 1) for name in (row, case))
    assert len(stock["iterations"]) == len(sharded["iterations"]) == 3
    for place, (one, other) in enumerate(zip(sharded["iterations"], stock["iterations"], strict=True)):
        losses = [float.fromhex(each["lm loss"]) for each in (one, other)]
        assert near(*losses, tolerance.later if place else tolerance.loss), f"iteration {place + 1}: {losses}"
    norms = [float.fromhex(record["iterations"][0]["grad_norm"]) for record in (sharded, stock)]
    assert near(*norms, tolerance.norm), norms
    assert len(sharded["evaluations"]) == len(stock["evaluations"])
    for one, other in zip(sharded["evaluations"], stock["evaluations"], strict=True):
        losses = [float.fromhex(each["lm loss"]) for each in (one, other)]
        assert near(*losses, tolerance.later), f"evaluation: {losses}"
    pairs = pairs_of(outcome, case, row, "start", stages)
    assert all(torch.equal(one, other) for one, other in pairs.values())
    if tolerance.whole == math.inf:
        return
    pairs = pairs_of(outcome, case, row, "gradients", stages)
    distances = {name: apart(*pair) for name, pair in pairs.items()}
    assert max(distances.values()) <= tolerance.gradient, distances
    whole = [torch.cat([pair[side].flatten() for pair in pairs.values()]) for side in (0, 1)]
    assert apart(*whole) <= tolerance.whole


def pairs_of(
    outcome: Outcome, case: str, row: str, what: str, stages: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found, expected = tensors(outcome, case, what, stages), tensors(outcome, row, what, stages)
    assert found.keys() == expected.keys()
    return {name: (found[name], expected[name]) for name in expected}


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return run_cases(4, cases(ROWS, request), timeout_s=900, worker="tensors_worker.py")


@pytest.mark.timeout(960)
@pytest.mark.parametrize(("row", "ours"), compared(ROWS))
def test_shards_train_what_the_whole_layer_does(four: Outcome, row: str, ours: str) -> None:
    as_stock(four, row, ours, ROWS[row][2])


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("row", "ours"),
    [("vocabulary_further", "one"), pytest.param("vocabulary_two_further", "two", marks=pytest.mark.slow)],
)
def test_losses_of_further_tokens_are_logged(four: Outcome, row: str, ours: str) -> None:
    """Zeros stand in for them in the last stage's forward; they are known, and logged, behind everybody's S."""
    stock, sharded = (further_logged(four, name) for name in (row, f"{row}_{ours}"))
    assert len(stock) == len(sharded) >= 3
    for one, other in zip(sharded, stock, strict=True):
        assert other > 1
        assert near(one, other, 1e-5)


def further_logged(outcome: Outcome, case: str) -> list[float]:
    (said,) = (log.split(f"=== {case}\n")[1].split("===")[0] for log in outcome.logs[-1:])
    return [float(value) for value in re.findall(r"mtp_\d loss: ([0-9.E+-]+)", said)]


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("row", "plain", "moved"),
    [
        ("vocabulary_further", "one", "balanced"),
        pytest.param("vocabulary_further", "two", "two_balanced", marks=pytest.mark.slow),
    ],
)
def test_balancing_shards_of_further_tokens_changes_no_bit(four: Outcome, row: str, plain: str, moved: str) -> None:
    same(four, f"{row}_{plain}", f"{row}_{moved}", 4)
    assert four.reports(f"{row}_{moved}")[0]["evictions"] > 0


BALANCED = [
    ("vocabulary_m8", "one", "balanced"),
    pytest.param("vocabulary_tied", "one", "balanced", marks=pytest.mark.slow),
    pytest.param("vocabulary_bf16", "one", "balanced", marks=pytest.mark.slow),
    pytest.param("vocabulary_m8", "two", "two_balanced", marks=pytest.mark.slow),
    pytest.param("vocabulary_bf16", "two", "two_balanced", marks=pytest.mark.slow),
    pytest.param("vocabulary_m8", "input", "input_balanced", marks=pytest.mark.slow),
    pytest.param("vocabulary_tied", "input", "input_balanced", marks=pytest.mark.slow),
]
# Of micro-batches, by algorithm and then balanced.
PEAKS = {"one": [6, 5, 4, 3], "balanced": [5, 5, 4, 4], "two": [5, 4, 3, 2], "two_balanced": [4, 4, 3, 4]}
PEAKS |= {"input": PEAKS["one"], "input_balanced": PEAKS["balanced"]}


@pytest.mark.timeout(960)
@pytest.mark.parametrize(("row", "plain", "moved"), BALANCED)
def test_balancing_shards_changes_no_bit(four: Outcome, row: str, plain: str, moved: str) -> None:
    same(four, f"{row}_{plain}", f"{row}_{moved}", 4)
    for ours in (plain, moved):
        modelled = shard_modelled("2" if "two" in ours else "1", "bf16" if "bf16" in row else "fp32")
        reports = four.reports(f"{row}_{ours}")
        assert [report["peak_microbatches"] for report in reports] == PEAKS[ours]
        for report in reports:
            assert report["peak_microbatches"] == report["predicted_microbatches"], f"{ours}: stage {report['stage']}"
            assert report["peak_bytes"] == report["predicted_bytes"] > 0, f"{ours}: stage {report['stage']}"
            assert shard_held(four, f"{row}_{ours}", report["rank"]) == modelled, f"{ours}: stage {report['stage']}"
        held = read_held(Path(four.report_folder(f"{row}_{ours}")))
        assert held is not None
        # What is written as it happens, for a run that runs out of memory.
        assert {max(mark.shard_bytes for mark in rank.marks) for rank in held.ranks} == {modelled}


def shard_held(outcome: Outcome, case: str, rank: int) -> int:
    """Bytes of a micro-batch from S to T, as the run's record has them."""
    path = Path(outcome.report_folder(case)) / f"record_{rank:05d}.jsonl"
    return int(json.loads(path.read_text().splitlines()[-1])["shard_bytes"])


def shard_modelled(algorithm: str, precision: str = "fp32", stages: int = 4, micro_batch: int = 2) -> int:
    """The same of the tiny model, before anything ran."""
    tiny = replace(gpt("tiny", stages, 64, 4, 128, 64), tied_embedding=False)
    cut = (parse_cluster(f"a100-80g:1x{stages}"), 1, stages, micro_batch, 16, 64, (1,) * stages)
    choices = {"precision": precision, "kernels": "cpu", "attention": "unfused", "vocabulary": Vocabulary(algorithm)}
    return shard_bytes(Setup(tiny, *cut, **choices))  # type: ignore[arg-type]


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("row", "held"),
    [("vocabulary_m8", (6, 5, 3, 2)), pytest.param("vocabulary_m1", (1, 1, 1, 1), marks=pytest.mark.slow)],
)
def test_interlaced_holds_half_as_much_again_as_1f1b(four: Outcome, row: str, held: tuple[int, ...]) -> None:
    """To the byte what is predicted."""
    reports = four.reports(f"{row}_interlaced")
    assert tuple(report["peak_microbatches"] for report in reports) == held
    for report in reports:
        assert report["peak_microbatches"] == report["predicted_microbatches"]
        assert report["peak_bytes"] == report["predicted_bytes"] > 0


# Other numbers of stages, and of micro-batches: from one to four for each. What a rank holds follows from how many
# stages are behind it.
SIZES = {2: (1, 3, 8), 8: (1, 9, 32)}
HELD: dict[str, Callable[[int], int]] = {
    "one": lambda behind: behind + 3,
    "two": lambda behind: behind + 2,
    "interlaced": lambda behind: math.ceil(1.5 * (behind + 1)),
    "input": lambda behind: behind + 3,
}


@pytest.fixture(scope="module", params=SIZES)
def sized(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> tuple[int, Outcome]:
    p, found = request.param, []
    for m in SIZES[p]:
        flags = (*(UNTIED if m % 2 else ()), "--global-batch-size", f"{2 * m}")
        found.append(Case(f"m{m}", flags))
        wanted = {ours for (ours,) in asked_for(request, "ours")} | {plain for (plain,) in asked_for(request, "plain")}
        for ours in sorted(wanted):
            case = f"m{m}_{ours}"
            found.append(
                Case(case, (*flags, "--bpipe-min-bytes", "1024", *(flag.format(case=case) for flag in OURS[ours])))
            )
    return p, run_cases(p, found, timeout_s=900, worker="tensors_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("ours", HELD)
def test_any_number_of_stages_and_micro_batches(sized: tuple[int, Outcome], ours: str) -> None:
    """As near stock as four stages are, and each rank holds what it says it will."""
    p, outcome = sized
    for m in SIZES[p]:
        as_stock(outcome, f"m{m}", ours, FP32, stages=p)
        reports = outcome.reports(f"m{m}_{ours}")
        assert [report["peak_microbatches"] for report in reports] == [
            min(m, HELD[ours](p - 1 - rank)) for rank in range(p)
        ]
        assert all(report["peak_bytes"] == report["predicted_bytes"] > 0 for report in reports)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    ("ours", "plain", "more"), [("balanced", "one", 2), ("two_balanced", "two", 1), ("input_balanced", "input", 2)]
)
def test_balancing_any_number_of_stages_changes_no_bit(
    sized: tuple[int, Outcome], ours: str, plain: str, more: int
) -> None:
    """Within (p + 3) // 2 and as many as there are barriers; with two stages nothing moves."""
    p, outcome = sized
    for m in SIZES[p]:
        same(outcome, f"m{m}_{plain}", f"m{m}_{ours}", p)
        reports = outcome.reports(f"m{m}_{ours}")
        assert max(report["peak_microbatches"] for report in reports) <= (p + 3) // 2 + more
        assert all(report["peak_bytes"] == report["predicted_bytes"] > 0 for report in reports)
        assert any(report["evictions"] for report in reports) is (p > 2 and m > p)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("row", ["vocabulary_tied"])
def test_copies_of_a_tied_weight_stay_equal(four: Outcome, row: str) -> None:
    start, end = (tensors(four, f"{row}_one", what, 4) for what in ("start", "end"))
    assert not torch.equal(start[f"0 {EMBEDDING}"], end[f"0 {EMBEDDING}"])
    for found in (start, end):
        assert torch.equal(found[f"0 {EMBEDDING}"], found[f"0 {OUTPUT}"])


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    common = ("--num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
    return run_cases(4, cases(WIDE_ROWS, request, common), timeout_s=600, worker="tensors_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("row", ["vocabulary_tied_data", "vocabulary_tied_distributed"])
def test_copies_on_several_replicas_stay_equal(wide: Outcome, row: str) -> None:
    """The distributed optimizer has other parts of each copy on a replica."""
    start, end = (tensors(wide, f"{row}_one", what, 2) for what in ("start", "end"))
    for replica in "01":
        assert not torch.equal(start[f"{replica} {EMBEDDING}"], end[f"{replica} {EMBEDDING}"])
        assert torch.equal(end[f"{replica} {EMBEDDING}"], end[f"{replica} {OUTPUT}"])


@pytest.mark.timeout(660)
@pytest.mark.parametrize(("row", "ours"), compared(WIDE_ROWS))
def test_another_dimension_changes_no_more(wide: Outcome, row: str, ours: str) -> None:
    as_stock(wide, row, ours, WIDE_ROWS[row][2], stages=2)


LARGE = (
    *("--vocab-size", "131071", "--seq-length", "512", "--max-position-embeddings", "512", "--global-batch-size", "4"),
    *("--train-iters", "2"),
)


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("ways", [("early",), ("shards", "inputs")])
def test_the_last_rank_no_longer_holds_all_logits(
    run_cases: Callable[..., Outcome], capsys: pytest.CaptureFixture[str], ways: tuple[str, ...]
) -> None:
    """131072 rows: what every process holds when its second iteration begins, and what in it, beside weights and
    optimizer state."""
    beyond, before = {}, {}
    flags = {"shards": SHARDS, "early": (SHARDS[0], "2"), "inputs": (*INPUT, "1")}
    for name, ours in (("stock", ()), *((way, flags[way]) for way in ways)):
        outcome = run_cases(4, [Case(name, [*UNTIED, *LARGE, *ours])], timeout_s=170, worker="peak_worker.py")
        found = [outcome.record(name, rank)["weights"] for rank in range(4)]
        beyond[name] = [each["peak"] - each["held"] for each in found]
        before[name] = [each["held"] for each in found]
        with capsys.disabled():
            held = ", ".join(f"{each['peak'] / 2**20:.0f}" for each in found)
            more = ", ".join(f"{each / 2**20:.0f}" for each in beyond[name])
            print(f"\n{name}: MiB of each rank at its peak {held}; beyond what it held when the iteration began {more}")
    # Stock makes the gradient in the place of the logits, too; beside theirs shards have 32 MiB of them in 32 bit at a
    # time, whatever p is.
    logits = 2 * 512 * 131072 * 4
    assert beyond["stock"][-1] > logits
    assert all(max(beyond[way]) < beyond["stock"][-1] / 2 for way in ways)
    if "inputs" in ways:
        # Weight, gradient and two moments of the embedding, all of them or a quarter; a process rounds what it gives
        # back.
        assert before["shards"][0] - before["inputs"][0] > 4 * (64 * 131072 * 4) * 3 / 4 * 0.8


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_fewer_layers_for_the_last_stage_are_a_layout_of_megatrons(run_cases: Callable[..., Outcome]) -> None:
    """1024 rows take as long as 1.14 layers of this width."""
    sizes = (*UNTIED, "--num-layers", "8", "--vocab-size", "1023", "--global-batch-size", "8")
    cases = [
        Case("stock", [*sizes, "--pipeline-model-parallel-layout", "Et*2|t*2|t*3|tL"]),
        Case("moved", [*sizes, "--bpipe-vocabulary", "redistribute"]),
        Case("balanced", [*sizes, "--bpipe-vocabulary", "redistribute", *BPIPE]),
    ]
    outcome = run_cases(4, cases, timeout_s=300)
    for ours in ("moved", "balanced"):
        same(outcome, "stock", ours, 4)
    assert "so stages have 2, 2, 3, 1: --pipeline-model-parallel-layout Et*2|t*2|t*3|tL" in outcome.logs[0]


def trained(tmp_path: Path, case: str, script: Path, *flags: str) -> Outcome:
    """By the launcher, with a report beside."""
    folder = tmp_path / case
    folder.mkdir()
    command = [
        "-m",
        "megatron.scheduling.launch",
        str(script),
        *FOUR,
        *ITERATIONS,
        "--bpipe-report",
        str(folder),
        *flags,
    ]
    return finish(start(4, command, folder, free_ports(1)[0]), folder, 80)


OF_SCRIPTS = [
    pytest.param("plain_script.py", ("--num-layers", "4", "--label-shift", "2", *UNTIED), id="gpt"),
    pytest.param(
        "plain_script.py",
        ("--num-layers", "4", "--label-shift", "2", *UNTIED, INPUT[0]),
        id="inputs",
        marks=pytest.mark.slow,
    ),
    pytest.param("plain_script_hybrid.py", ("--num-layers", "12"), id="hybrid", marks=pytest.mark.slow),
    pytest.param(
        "plain_script_hybrid.py", ("--num-layers", "12", INPUT[0]), id="hybrid_inputs", marks=pytest.mark.slow
    ),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "flags"), OF_SCRIPTS)
def test_a_script_of_ones_own_is_split(tmp_path: Path, name: str, flags: tuple[str, ...]) -> None:
    """Its model, labels and mean of the losses are its own."""
    found = []
    for case, ours in (("stock", ()), ("shards", SHARDS)):
        used = flags if ours else [flag for flag in flags if flag != INPUT[0]]
        outcome = trained(tmp_path, case, ROOT / "tests/gloo" / name, *used, *ours)
        assert outcome.codes == [0] * 4, outcome.logs[3][-3000:]
        found.append([float.fromhex(step["lm loss"]) for step in iterations(tmp_path / case)])
    assert len(set(found[0])) == 3
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        assert near(one, other, FP32.later if place else FP32.loss), found


@pytest.mark.timeout(120)
def test_a_loss_that_is_not_linear_in_the_tokens_is_refused(tmp_path: Path) -> None:
    """A mean of their squares counts each by what it is."""
    squares = tmp_path / "squares.py"
    script = (ROOT / "tests/gloo/plain_script.py").read_text()
    squares.write_text(script.replace("losses.float().mean()", "losses.float().square().mean()"))
    outcome = trained(tmp_path, "squares", squares, "--num-layers", "4", *UNTIED, *SHARDS)
    assert outcome.codes.count(0) == 0
    assert "the weight of each token depends on the losses" in outcome.logs[3]
