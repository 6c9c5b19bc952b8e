"""Our own loop in Megatron's trainer equals stock Megatron's loops to the last bit, whatever it runs.

"Stock" runs with no patch of ours in Megatron's scheduler. Ours runs stock's two programs, with dropout and clipping on, and GPipe, whose
forwards come in stock's order; with an engine around them too, which poisons what it frees and what it loads into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gloo.conftest import BPIPE, Case, Outcome
from tests.gloo.test_parallelism import EXPERTS, GROUPS, INTERLEAVED, LLAMA, OVERLAPS
from tests.gloo.test_training import same
from tests.unit.torch_schedules import as_csv, torch_schedule

OWN = ("--bpipe-executor",)
OURS = {
    "own": OWN,
    "balanced": (*OWN, *BPIPE, "--bpipe-transport", "peer"),
    "balanced_gloo": (*OWN, *BPIPE, "--bpipe-transport", "gloo"),
    "gpipe": ("--bpipe-schedule", "gpipe"),
    "grouped": ("--bpipe-schedule", "grouped-interleaved"),
    "grouped_balanced": ("--bpipe-schedule", "grouped-interleaved", *BPIPE, "--bpipe-transport", "peer"),
    "grouped_groups": ("--bpipe-schedule", "grouped-interleaved", "--bpipe-group", "3", "--bpipe-report", "{folder}/grouped"),
    "grouped_whole": ("--bpipe-schedule", "grouped-interleaved", "--bpipe-keep-weights-halves", "none"),
}

# A schedule of torch's own, from a file.
OURS["torch"] = ("--bpipe-schedule", "{schedules}/torch.csv", "--bpipe-report", "{folder}/torch")
OURS["torch_balanced"] = ("--bpipe-schedule", "{schedules}/torch.csv", *BPIPE, "--bpipe-transport", "peer")
# Halves of backwards in stock's order of forwards.
OURS["zb_h1"] = ("--bpipe-schedule", "zb-h1")
OURS["split"] = ("--bpipe-schedule", "1f1b-split", "--bpipe-delay", "2", *BPIPE, "--bpipe-transport", "gloo")

# Another order of forwards draws other dropout.
QUIET = ("--attention-dropout", "0", "--hidden-dropout", "0")
QUIET_OURS = ("grouped", "grouped_balanced", "grouped_groups", "grouped_whole", "torch", "torch_balanced")
# One row a feature of Megatron's, of four stages: its flags, and which of ours are compared with stock.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "m8": (("--global-batch-size", "16"), ("own", "balanced", "balanced_gloo", "gpipe", "zb_h1", "split")),
    "m3": (("--global-batch-size", "6"), ("own", "gpipe")),
    "interleaved": ((*INTERLEAVED, "--global-batch-size", "16"), ("own", "balanced", "balanced_gloo")),
    "interleaved_groups": ((*INTERLEAVED, *GROUPS, "--global-batch-size", "20"), ("own",)),
    "interleaved_v3": (("--num-layers", "12", "--num-virtual-stages-per-pipeline-rank", "3", "--global-batch-size", "8"), ("own",)),
    "interleaved_quiet": ((*INTERLEAVED, *QUIET, "--global-batch-size", "16"), QUIET_OURS),
    "evaluation": (("--global-batch-size", "16", "--eval-interval", "2", "--eval-iters", "2"), ("own", "gpipe")),
    "evaluation_of_another_size": (
        (
            *("--global-batch-size", "16", "--eval-interval", "1", "--eval-iters", "1", "--eval-global-batch-size", "6"),
            *("--eval-micro-batch-size", "1"),
        ),
        ("own",),
    ),
    "evaluation_interleaved": ((*INTERLEAVED, "--global-batch-size", "8", "--eval-interval", "2", "--eval-iters", "1"), ("own",)),
    "batch_that_grows": (("--step-batch-size-schedule", "0:8 1024:16", "--train-samples", "48", "--lr-decay-samples", "48"), ("balanced",)),
    "fp16": (("--global-batch-size", "16", "--fp16", "--initial-loss-scale", "4294967296", "--loss-scale-window", "2"), ("balanced",)),
    "bf16": (("--global-batch-size", "16", "--bf16"), ("own",)),
    "llama": (("--global-batch-size", "16", *LLAMA), ("balanced",)),
    "per_token_loss": (("--global-batch-size", "16", "--calculate-per-token-loss"), ("own",)),
    "selective": (("--global-batch-size", "16", "--recompute-granularity", "selective"), ("own",)),
    "full_uniform": (
        (
            *("--num-layers", "8", "--global-batch-size", "16", "--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ),
        ("balanced",),
    ),
    "layout": (("--num-layers", "5", "--pipeline-model-parallel-layout", "Et|tt|t|tL", "--global-batch-size", "8"), ("own",)),
    "experts": ((*EXPERTS, "--global-batch-size", "8"), ("own",)),
    "multi_token_prediction": (("--global-batch-size", "8", "--mtp-num-layers", "2", "--position-embedding-type", "rope"), ("own",)),
    "timed": (("--global-batch-size", "8", "--timing-log-level", "2"), ("own",)),
}

SMALL_BUCKETS = ("--ddp-bucket-size", "20000")
UNALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
CHUNKS = ("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
# Two stages, and two ranks in another dimension.
WIDE_ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (("--tensor-model-parallel-size", "2"), ("own",)),
    "sequence": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), ("own",)),
    "data": ((), ("own",)),
    "overlaps": (OVERLAPS, ("own", "gpipe")),
    "overlaps_unaligned": ((*OVERLAPS, *SMALL_BUCKETS, *UNALIGNED), ("own",)),
    "interleaved_overlaps": ((*CHUNKS, *OVERLAPS), ("own",)),
    "interleaved_unaligned": ((*CHUNKS, *OVERLAPS, *SMALL_BUCKETS, *UNALIGNED), ("own",)),
    "interleaved_sequence": ((*CHUNKS, "--tensor-model-parallel-size", "2", "--sequence-parallel"), ("own",)),
    "reduction_alone": (("--overlap-grad-reduce",), ("own",)),
}

ALWAYS = ("m8", "interleaved_quiet")
Rows = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def compared(rows: Rows) -> list[Any]:
    """Every run of ours by its row."""
    return [
        pytest.param(row, ours, marks=() if row in ALWAYS else pytest.mark.slow, id=f"{row}-{ours}")
        for row, (_, which) in rows.items()
        for ours in which
    ]


def cases(rows: Rows, request: pytest.FixtureRequest, common: tuple[str, ...] = ()) -> list[Case]:
    wanted = rows if request.config.getoption("--slow") else {name: row for name, row in rows.items() if name in ALWAYS}
    found = []
    for name, (flags, which) in wanted.items():
        found.append(Case(name, [*common, *flags]))
        found += [Case(f"{name}_{ours}", [*common, *flags, *OURS[ours]]) for ours in which]
    return found


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    schedules = tmp_path_factory.mktemp("schedules")
    (schedules / "torch.csv").write_text(as_csv(torch_schedule("ScheduleInterleavedZeroBubble", 4, 8, 2)))
    placed = [Case(case.name, [each.replace("{schedules}", str(schedules)) for each in case.arguments]) for case in cases(ROWS, request)]
    return run_cases(4, placed, timeout_s=900)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(("row", "ours"), compared(ROWS))
def test_our_own_loop_equals_stock(four: Outcome, row: str, ours: str) -> None:
    same(four, row, f"{row}_{ours}", 4)


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    common = ("--num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
    return run_cases(4, cases(WIDE_ROWS, request, common), timeout_s=900)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(("row", "ours"), compared(WIDE_ROWS))
def test_another_dimension_changes_nothing(wide: Outcome, row: str, ours: str) -> None:
    same(wide, row, f"{row}_{ours}", 4)
