"""The output layer in shards trains what stock Megatron trains, within what another order of additions makes of it.

"Stock" runs with no patch of ours in Megatron's scheduler. Weights are equal to the bit at the start, and so is everything that balancing
alone changes. Every row has a case of stock's and one with shards; the weight of the output layer is compared in one piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_parallelism import LLAMA, OVERLAPS
from tests.gloo.test_training import same

OUTPUT = "output_layer.weight"
UNTIED = ("--untie-embeddings-and-output-weights",)
OURS = {
    "one": ("--bpipe-vocabulary", "1", "--bpipe-report", "{{folder}}/{case}"),
    "interlaced": ("--bpipe-vocabulary", "interlaced"),
    "balanced": ("--bpipe-vocabulary", "1", *BPIPE, "--bpipe-transport", "peer", "--bpipe-report", "{{folder}}/{case}"),
}


class Tolerance(NamedTuple):
    """Relative: of the first loss, later ones, the first gradient norm, each tensor's gradient (its L2 norm), the whole gradient."""

    loss: float
    later: float
    norm: float
    gradient: float
    whole: float


FP32 = Tolerance(2.5e-7, 1e-6, 1e-6, 3e-6, 3e-6)
# A rank of the distributed optimizer has the sum of a part of its gradients only, and another part than stock's.
PARTS = FP32._replace(gradient=math.inf, whole=math.inf)
HALF = Tolerance(1e-6, 1e-3, 1e-3, 3e-2, 1e-2)

# One row a feature of Megatron's, of four stages: its flags, which of ours are compared with stock, and how closely.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Tolerance]] = {
    "vocabulary_m8": (("--global-batch-size", "16"), ("one", "interlaced", "balanced"), FP32),
    "vocabulary_m1": (("--global-batch-size", "2"), ("one", "interlaced"), FP32),
    "vocabulary_m2": (("--global-batch-size", "4"), ("one",), FP32),
    "vocabulary_m16": (("--global-batch-size", "32"), ("one",), FP32),
    "vocabulary_bf16": (("--global-batch-size", "16", "--bf16"), ("one", "balanced"), HALF),
    "vocabulary_fp16": (("--global-batch-size", "16", "--fp16", "--initial-loss-scale", "65536"), ("one",), HALF),
    "vocabulary_per_token_loss": (("--global-batch-size", "16", "--calculate-per-token-loss"), ("one",), FP32),
    "vocabulary_evaluation": (
        ("--global-batch-size", "16", "--eval-interval", "2", "--eval-iters", "2"),
        ("one", "interlaced"),
        FP32,
    ),
    "vocabulary_llama": (("--global-batch-size", "16", *LLAMA), ("one",), FP32),
    "vocabulary_full_recomputation": (
        (
            *("--global-batch-size", "16", "--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
        ("one",),
        FP32,
    ),
}
# Two stages, and two ranks in another dimension.
TENSOR = ("--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64")
WIDE_ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Tolerance]] = {
    "vocabulary_tensor": (TENSOR, ("one",), FP32),
    "vocabulary_sequence": ((*TENSOR, "--sequence-parallel"), ("one",), FP32),
    "vocabulary_data": ((), ("one",), FP32),
    "vocabulary_overlaps": (OVERLAPS, ("one", "interlaced"), PARTS),
}
ALWAYS = ("vocabulary_m8",)


def compared(rows: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(row, ours, marks=() if row in ALWAYS else pytest.mark.slow, id=f"{row}-{ours}")
        for row, (_, which, _) in rows.items()
        for ours in which
    ]


def cases(rows: dict[str, Any], request: pytest.FixtureRequest, common: tuple[str, ...] = ()) -> list[Case]:
    wanted = rows if request.config.getoption("--slow") else {name: row for name, row in rows.items() if name in ALWAYS}
    found = []
    for name, (flags, which, _) in wanted.items():
        found.append(Case(name, [*UNTIED, *common, *flags]))
        for ours in which:
            case = f"{name}_{ours}"
            found.append(Case(case, [*UNTIED, *common, *flags, *(flag.format(case=case) for flag in OURS[ours])]))
    return found


def tensors(outcome: Outcome, case: str, what: str, stages: int) -> dict[str, torch.Tensor]:
    """Of all four ranks, by rank and name; the output layer's rows in one piece, for each rank of another dimension."""
    found: dict[str, torch.Tensor] = {}
    rows: dict[int, list[torch.Tensor]] = {}
    # Ranks of the pipeline are the outermost.
    beside = 4 // stages
    for rank in range(4):
        for name, tensor in torch.load(outcome.folder / f"{case}.rank{rank}.pt")[what].items():
            if name == OUTPUT:
                rows.setdefault(rank % beside, []).append(tensor.double())
            else:
                found[f"{rank} {name}"] = tensor.double()
    return found | {f"{rank} {OUTPUT}": torch.cat(parts) for rank, parts in rows.items()}


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def near(one: float, other: float, tolerance: float) -> bool:
    return math.isclose(one, other, rel_tol=tolerance)


def as_stock(outcome: Outcome, row: str, ours: str, tolerance: Tolerance, stages: int = 4) -> None:
    case = f"{row}_{ours}"
    stock, sharded = (outcome.record(name, 3) for name in (row, case))
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
    pairs = _pairs(outcome, case, row, "start", stages)
    assert all(torch.equal(one, other) for one, other in pairs.values())
    if tolerance.whole == math.inf:
        return
    pairs = _pairs(outcome, case, row, "gradients", stages)
    distances = {name: apart(*pair) for name, pair in pairs.items()}
    assert max(distances.values()) <= tolerance.gradient, distances
    whole = [torch.cat([pair[side].flatten() for pair in pairs.values()]) for side in (0, 1)]
    assert apart(*whole) <= tolerance.whole


def _pairs(outcome: Outcome, case: str, row: str, what: str, stages: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
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
@pytest.mark.parametrize("row", [pytest.param("vocabulary_m8"), pytest.param("vocabulary_bf16", marks=pytest.mark.slow)])
def test_balancing_shards_changes_no_bit(four: Outcome, row: str) -> None:
    same(four, f"{row}_one", f"{row}_balanced", 4)
    held = [[report["peak_microbatches"] for report in four.reports(f"{row}_{ours}")] for ours in ("one", "balanced")]
    assert held == [[6, 5, 4, 3], [5, 5, 4, 4]]
    for ours in ("one", "balanced"):
        for report in four.reports(f"{row}_{ours}"):
            assert report["peak_microbatches"] == report["predicted_microbatches"], f"{ours}: stage {report['stage']}"
            assert report["peak_bytes"] == report["predicted_bytes"] > 0, f"{ours}: stage {report['stage']}"


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    common = ("--num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
    return run_cases(4, cases(WIDE_ROWS, request, common), timeout_s=600, worker="tensors_worker.py")


@pytest.mark.timeout(660)
@pytest.mark.parametrize(("row", "ours"), compared(WIDE_ROWS))
def test_another_dimension_changes_no_more(wide: Outcome, row: str, ours: str) -> None:
    as_stock(wide, row, ours, WIDE_ROWS[row][2], stages=2)
