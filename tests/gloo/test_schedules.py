"""Our own loop in Megatron's trainer equals stock Megatron's loops to the last bit, whatever it runs.

"Stock" runs with no patch of ours in Megatron's scheduler. Ours runs stock's two programs, with dropout and clipping
on, and GPipe, whose forwards come in stock's order; with an engine around them too, which poisons what it frees and
what it loads into.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.files.text import write_csv
from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import (
    EXPERTS,
    FP16,
    GROUPS,
    INPUT_BYTES,
    INTERLEAVED,
    LLAMA,
    OVERLAPS,
    PLAIN_ATTENTION,
)
from tests.gloo.test_training import same
from tests.support.torch_schedules import as_csv, torch_schedule

MEASURED = ("--bpipe-min-bytes", "1024", "--bpipe-report", "{folder}/{case}")
OWN = ("--bpipe-executor", *MEASURED)
GROUPED = ("--bpipe-schedule", "grouped-interleaved", *MEASURED)
TORCH = ("--bpipe-schedule", "{schedules}/torch.csv", *MEASURED)
PEER, GLOO = (*BPIPE, "--bpipe-transport", "peer"), (*BPIPE, "--bpipe-transport", "gloo")
OURS = {
    "own": OWN,
    "balanced": (*OWN, *PEER),
    "balanced_gloo": (*OWN, *GLOO),
    "gpipe": ("--bpipe-schedule", "gpipe", *MEASURED),
    "split": ("--bpipe-schedule", "1f1b-split", "--bpipe-delay", "2", *MEASURED, *GLOO),
    "grouped": GROUPED,
    "grouped_balanced": (*GROUPED, *PEER),
    # Its order chosen for a bound.
    "grouped_chosen": (*GROUPED, *PEER, "--bpipe-bound", "8", "--bpipe-group", "auto"),
    "grouped_of_3": (*GROUPED, "--bpipe-group", "3"),
    "grouped_whole": (*GROUPED, "--bpipe-keep-weights-halves", "none"),
    "grouped_whole_balanced": (*GROUPED, "--bpipe-keep-weights-halves", "none", *GLOO),
    # A schedule of torch's own, from a file.
    "torch": TORCH,
    # A file that says itself what moves.
    "written_balanced": ("--bpipe-schedule", "{schedules}/moving.csv", *MEASURED, *PEER),
}

# Another order of forwards draws other dropout.
QUIET = ("--attention-dropout", "0", "--hidden-dropout", "0")
QUIET_OURS = (
    "grouped",
    "grouped_balanced",
    "grouped_chosen",
    "grouped_of_3",
    "grouped_whole",
    "grouped_whole_balanced",
    "torch",
)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
GROWS = ("--step-batch-size-schedule", "0:8 1024:16", "--train-samples", "48", "--lr-decay-samples", "48")
AHEAD = ("--global-batch-size", "16", "--mtp-num-layers", "2", "--position-embedding-type", "rope")
# One row a feature of Megatron's, of four stages: its flags, and which of ours are compared with stock.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "m8": (("--global-batch-size", "16"), ("own", "balanced", "balanced_gloo", "gpipe", "split", "written_balanced")),
    "m3": (("--global-batch-size", "6"), ("own", "gpipe")),
    "interleaved": ((*INTERLEAVED, "--global-batch-size", "16"), ("own", "balanced", "balanced_gloo")),
    "interleaved_groups": ((*INTERLEAVED, *GROUPS, "--global-batch-size", "20"), ("own",)),
    "interleaved_v3": (
        ("--num-layers", "12", "--num-virtual-stages-per-pipeline-rank", "3", "--global-batch-size", "8"),
        ("own",),
    ),
    "interleaved_quiet": ((*INTERLEAVED, *QUIET, "--global-batch-size", "16"), QUIET_OURS),
    "quiet_recomputed": ((*INTERLEAVED, *QUIET, *FULL, "--global-batch-size", "16"), ("grouped_balanced",)),
    "quiet_fp16": ((*INTERLEAVED, *QUIET, *FP16, "--global-batch-size", "16"), ("grouped_balanced",)),
    "quiet_llama": ((*INTERLEAVED, *QUIET, *LLAMA, "--bf16", "--global-batch-size", "16"), ("grouped_balanced",)),
    "quiet_experts": ((*INTERLEAVED, *QUIET, *EXPERTS, "--global-batch-size", "16"), ("grouped_balanced",)),
    "quiet_evaluation": (
        (*INTERLEAVED, *QUIET, "--global-batch-size", "16", "--eval-interval", "2", "--eval-iters", "2"),
        ("grouped_balanced",),
    ),
    "quiet_batch_that_grows": ((*INTERLEAVED, *QUIET, *GROWS), ("grouped_balanced",)),
    "quiet_predictions": (
        (*INTERLEAVED, *QUIET, *AHEAD, "--untie-embeddings-and-output-weights"),
        ("grouped_balanced",),
    ),
    "quiet_predictions_tied": ((*INTERLEAVED, *QUIET, *AHEAD), ("grouped_balanced",)),
    # Two virtual stages per rank, which the layout says.
    "quiet_layout": (
        (
            *QUIET,
            "--num-layers",
            "9",
            "--pipeline-model-parallel-layout",
            "Et|tt|t|t|tt|t|t|L",
            "--global-batch-size",
            "16",
        ),
        ("grouped_balanced",),
    ),
    "quiet_per_token_loss": (
        (*INTERLEAVED, *QUIET, "--global-batch-size", "16", "--calculate-per-token-loss"),
        ("grouped_balanced",),
    ),
    "evaluation": (("--global-batch-size", "16", "--eval-interval", "2", "--eval-iters", "2"), ("own", "gpipe")),
    "evaluation_of_another_size": (
        (
            *(
                "--global-batch-size",
                "16",
                "--eval-interval",
                "1",
                "--eval-iters",
                "1",
                "--eval-global-batch-size",
                "6",
            ),
            *("--eval-micro-batch-size", "1"),
        ),
        ("own",),
    ),
    "evaluation_interleaved": (
        (*INTERLEAVED, "--global-batch-size", "8", "--eval-interval", "2", "--eval-iters", "1"),
        ("own",),
    ),
    "batch_that_grows": (GROWS, ("balanced",)),
    "fp16": (("--global-batch-size", "16", *FP16), ("balanced",)),
    "bf16": (("--global-batch-size", "16", "--bf16"), ("own",)),
    "llama": (("--global-batch-size", "16", *LLAMA), ("balanced",)),
    "per_token_loss": (("--global-batch-size", "16", "--calculate-per-token-loss"), ("own",)),
    "selective": (("--global-batch-size", "16", "--recompute-granularity", "selective"), ("own",)),
    "full_uniform": (
        ("--num-layers", "8", "--global-batch-size", "16", *FULL),
        ("balanced",),
    ),
    "layout": (
        ("--num-layers", "5", "--pipeline-model-parallel-layout", "Et|tt|t|tL", "--global-batch-size", "8"),
        ("own",),
    ),
    "experts": ((*EXPERTS, "--global-batch-size", "8"), ("own",)),
    "multi_token_prediction": (
        ("--global-batch-size", "8", "--mtp-num-layers", "2", "--position-embedding-type", "rope"),
        ("own",),
    ),
    "timed": (("--global-batch-size", "8", "--timing-log-level", "2"), ("own",)),
}

SMALL_BUCKETS = ("--ddp-bucket-size", "20000")
UNALIGNED = ("--no-align-grad-reduce", "--no-align-param-gather")
CHUNKS = ("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2")
# Two stages, and two ranks in another dimension.
WIDE_ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tensor": (("--tensor-model-parallel-size", "2"), ("own",)),
    "expert_parallel": ((*EXPERTS, "--expert-model-parallel-size", "2"), ("own",)),
    "context": (("--context-parallel-size", "2", *PLAIN_ATTENTION), ("own",)),
    "sequence": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), ("own",)),
    "data": ((), ("own",)),
    "overlaps": (OVERLAPS, ("own", "gpipe")),
    "overlaps_unaligned": ((*OVERLAPS, *SMALL_BUCKETS, *UNALIGNED), ("own",)),
    "interleaved_overlaps": ((*CHUNKS, *OVERLAPS), ("own",)),
    "interleaved_unaligned": ((*CHUNKS, *OVERLAPS, *SMALL_BUCKETS, *UNALIGNED), ("own",)),
    "interleaved_sequence": ((*CHUNKS, "--tensor-model-parallel-size", "2", "--sequence-parallel"), ("own",)),
    "reduction_alone": (("--overlap-grad-reduce",), ("own",)),
    "quiet_overlaps": ((*CHUNKS, *QUIET, *OVERLAPS), ("grouped",)),
    "quiet_unaligned": ((*CHUNKS, *QUIET, *OVERLAPS, *SMALL_BUCKETS, *UNALIGNED), ("grouped",)),
    "quiet_sequence": ((*CHUNKS, *QUIET, "--tensor-model-parallel-size", "2", "--sequence-parallel"), ("grouped",)),
    "quiet_context": ((*CHUNKS, *QUIET, "--context-parallel-size", "2", *PLAIN_ATTENTION), ("grouped",)),
    "quiet_expert_parallel": ((*CHUNKS, *QUIET, *EXPERTS, "--expert-model-parallel-size", "2"), ("grouped",)),
}

# Of one chunk a layer's token dispatcher keeps, by a graph, the input of its last micro-batch until its next forward,
# while the other chunk fills.
SLACK = {"quiet_experts": INPUT_BYTES}

ALWAYS = ("m8", "interleaved_quiet")
# Of these, what others show beside something else.
NOT_ALWAYS = ("balanced_gloo", "grouped", "grouped_of_3", "grouped_whole")
Rows = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]


def compared(rows: Rows) -> list[Any]:
    """Every run of ours by its row."""
    return [
        pytest.param(
            row, ours, marks=() if row in ALWAYS and ours not in NOT_ALWAYS else pytest.mark.slow, id=f"{row}-{ours}"
        )
        for row, (_, which) in rows.items()
        for ours in which
    ]


def cases(
    rows: Rows, request: pytest.FixtureRequest | None, common: tuple[str, ...] = (), schedules: Path | None = None
) -> list[Case]:
    """What the tests of this request compare, or all."""
    wanted = None if request is None else asked_for(request, "row", "ours")
    found = []
    for name, (flags, which) in rows.items():
        of_row = [ours for ours in which if wanted is None or (name, ours) in wanted]
        if of_row:
            found.append(Case(name, [*common, *flags]))
        for ours in of_row:
            case = f"{name}_{ours}"
            placed = [flag.replace("{case}", case).replace("{schedules}", str(schedules)) for flag in OURS[ours]]
            found.append(Case(case, [*common, *flags, *placed]))
    return found


def as_stock(outcome: Outcome, row: str, ours: str, world: int = 4) -> None:
    """The same bits, and what was held is what the schedule predicted, to the byte."""
    same(outcome, row, f"{row}_{ours}", world)
    reports = outcome.reports(f"{row}_{ours}")
    assert len(reports) == world
    for report in reports:
        assert report["peak_microbatches"] == report["predicted_microbatches"], f"stage {report['stage']}"
        assert 0 <= report["peak_bytes"] - report["predicted_bytes"] <= SLACK.get(row, 0), f"stage {report['stage']}"
        assert report["predicted_bytes"] > 0
    moves = any(report["evictions"] for report in reports)
    assert moves is ("balanced" in ours or ours in ("split", "grouped_chosen")), (
        "what was to be moved was not, or the other way round"
    )


@pytest.fixture(scope="module")
def four(
    run_cases: Callable[..., Outcome], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    schedules = tmp_path_factory.mktemp("schedules")
    (schedules / "torch.csv").write_text(as_csv(torch_schedule("ScheduleInterleavedZeroBubble", 4, 8, 2)))
    (schedules / "moving.csv").write_text(write_csv(build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig()))))
    return run_cases(4, cases(ROWS, request, schedules=schedules), timeout_s=1500)


@pytest.mark.timeout(1560)
@pytest.mark.parametrize(("row", "ours"), compared(ROWS))
def test_our_own_loop_equals_stock(four: Outcome, row: str, ours: str) -> None:
    as_stock(four, row, ours)


@pytest.mark.timeout(1560)
@pytest.mark.parametrize(("row", "ours"), [("interleaved_quiet", "grouped_chosen")])
def test_an_order_chosen_for_a_bound_keeps_it_and_is_named(four: Outcome, row: str, ours: str) -> None:
    held = [report["peak_microbatches"] for report in four.reports(f"{row}_{ours}")]
    # The last rank is full when it hosts nobody any more, and its buffers stay: the order that takes turns, as fast,
    # would hold 9 there.
    assert held == [8, 8, 8, 8]
    assert "at most 8 held, bubble 5.9 %" in "".join(four.logs)
    said = (
        "bpipe: grouped-interleaved, chosen for a bound of 8 micro-batches of a chunk: groups: 2 of 4; pairs share "
        "one limit"
    )
    assert "".join(four.logs).count(said) == 1


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    common = ("--num-layers", "2", "--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
    return run_cases(4, cases(WIDE_ROWS, request, common), timeout_s=1500)


@pytest.mark.timeout(1560)
@pytest.mark.parametrize(("row", "ours"), compared(WIDE_ROWS))
def test_another_dimension_changes_nothing(wide: Outcome, row: str, ours: str) -> None:
    as_stock(wide, row, ours)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_eight_stages_equal_stock_with_dropout_and_clipping_on(run_cases: Callable[..., Outcome]) -> None:
    """Norms of gradients, too: where stages lie as stock's do, these are summed in the same order."""
    common = (
        "--num-layers",
        "16",
        "--pipeline-model-parallel-size",
        "8",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "16",
    )
    own = {"own": ("--bpipe-executor",), "balanced": ("--bpipe-executor", *PEER)}
    rows = {"plain": ((), {**own, "zb_h1": ("--bpipe-schedule", "zb-h1")}), "chunks": (CHUNKS[2:], own)}
    cases = [Case(row, (*common, *flags)) for row, (flags, _) in rows.items()]
    cases += [
        Case(f"{row}_{name}", (*common, *flags, *ours))
        for row, (flags, runs) in rows.items()
        for name, ours in runs.items()
    ]
    outcome = run_cases(8, cases, timeout_s=600)
    for row, (_, runs) in rows.items():
        for name in runs:
            same(outcome, row, f"{row}_{name}", 8)


@pytest.mark.slow
@pytest.mark.timeout(460)
def test_balanced_halves_beside_overlapped_gradients(run_cases: Callable[..., Outcome]) -> None:
    """Eight processes: transfers, messages, and reductions and gathers of two replicas are under way at the same
    time."""
    common = (*INTERLEAVED, *QUIET, *OVERLAPS, "--pipeline-model-parallel-size", "4", "--global-batch-size", "32")
    outcome = run_cases(8, cases({"overlaps": ((), ("grouped_balanced",))}, None, common), timeout_s=400)
    as_stock(outcome, "overlaps", "grouped_balanced", 8)
