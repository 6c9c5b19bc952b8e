"""The output layer in shards trains the same bits whatever the schedule is, and each holds what it predicts.

What 1F1B with shards trains is compared with stock in test_vocabulary, here with other schedules, some of which place stages as a V. No
dropout, whose numbers depend on the rank that draws them, no clipping, whose norm adds up the same numbers in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import OVERLAPS, PLAIN_ATTENTION
from tests.gloo.test_placed import ALIKE, FOUR, TWO, alike, as_predicted
from tests.gloo.test_vocabulary import FP32, SHARDS, TENSOR, UNALIGNED, UNTIED, near

CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
PEER, GLOO = ((*BPIPE, "--bpipe-transport", name) for name in ("peer", "gloo"))
WHOLE = ("--bpipe-keep-weights-halves", "none")


def named(schedule: str, *more: str) -> tuple[str, ...]:
    return "--bpipe-schedule", schedule, *more


# Of four stages, and whether anything is to be moved; `v-half` and the others of a V have their chunks by themselves.
OURS: dict[str, tuple[tuple[str, ...], bool]] = {
    "v_half": (named("v-half"), False),
    "v_half_whole": (named("v-half", *WHOLE), False),
    "v_min": (named("v-min"), False),
    "zb_v": (named("zb-v"), False),
    "zb_h1": (named("zb-h1"), False),
    "split_balanced": (named("1f1b-split", "--bpipe-delay", "1", *PEER), True),
    "interleaved": (CHUNKS, False),
    "interleaved_balanced": ((*CHUNKS, *PEER), True),
    "grouped": (named("grouped-interleaved", *CHUNKS), False),
    "grouped_balanced": (named("grouped-interleaved", *CHUNKS, *PEER), True),
    "grouped_for_a_bound": (named("grouped-interleaved", *CHUNKS, *PEER, "--bpipe-bound", "5"), True),
    "grouped_balanced_gloo": (named("grouped-interleaved", *CHUNKS, *GLOO), True),
}
TIED: tuple[str, ...] = ()
PER_TOKEN = (*UNTIED, "--calculate-per-token-loss")
EVALUATION = (*UNTIED, "--eval-interval", "1", "--eval-iters", "2")
RECOMPUTED = (*TIED, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
# One row a feature: its flags, and which of ours are compared with 1F1B's shards.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tied": (TIED, tuple(OURS)),
    "untied": (UNTIED, tuple(OURS)),
    "few": ((*TIED, "--global-batch-size", "4"), ("v_half", "interleaved", "grouped")),
    "many": ((*UNTIED, "--global-batch-size", "32"), ("v_half", "grouped_balanced")),
    "per_token": (PER_TOKEN, ("v_half", "grouped")),
    "evaluated": (EVALUATION, ("v_half", "interleaved", "grouped")),
    "recomputed": (RECOMPUTED, ("v_half", "grouped")),
    "bf16": ((*TIED, "--bf16"), ("v_half", "v_half_whole", "interleaved", "grouped")),
    "fp16": ((*UNTIED, "--fp16", "--initial-loss-scale", "65536"), ("v_half",)),
    "by_algorithm_2": (TIED, tuple(OURS)),
    "untied_by_algorithm_2": (EVALUATION, ("v_half", "v_half_whole", "interleaved", "grouped")),
}
# Two stages, and two ranks in another dimension.
CONTEXT = ("--context-parallel-size", "2", *PLAIN_ATTENTION)
SEQUENCE = (*TENSOR, "--sequence-parallel")
SHORT = ("--global-batch-size", "12")
WIDE_ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "data": (UNTIED, ("v_half", "grouped")),
    "data_tied": (TIED, ("v_half", "grouped")),
    "overlaps": ((*UNTIED, *OVERLAPS), ("v_half", "grouped", "interleaved")),
    "unaligned": (
        (*UNTIED, *OVERLAPS, *UNALIGNED),
        ("v_half", "grouped"),
    ),
    "overlaps_tied": ((*TIED, *OVERLAPS), ("v_half", "grouped")),
    "context": ((*UNTIED, *CONTEXT), ("v_half", "interleaved", "grouped")),
    "context_tied_by_algorithm_2": ((*TIED, *CONTEXT), ("v_half", "zb_h1", "grouped")),
    "sequence": ((*UNTIED, *SEQUENCE), ("v_half", "grouped")),
    "sequence_tied_by_algorithm_2": ((*TIED, *SEQUENCE), ("v_half", "zb_h1", "interleaved")),
}
ALWAYS = {("tied", "v_half"), ("untied", "grouped_balanced")}


def compared(rows: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(row, ours, marks=() if (row, ours) in ALWAYS else pytest.mark.slow, id=f"{row}-{ours}")
        for row, (_, which) in rows.items()
        for ours in which
    ]


def trained(rows: dict[str, Any], common: tuple[str, ...], run: Callable[..., Outcome], wanted: set[tuple[Any, ...]]) -> Outcome:
    """Of each row stock, 1F1B in shards, and what is compared with these."""
    cases = []
    for row, (flags, which) in rows.items():
        of_row = [ours for ours in which if (row, ours) in wanted]
        shards = ("--bpipe-vocabulary", "2" if "algorithm_2" in row else "1")
        kinds = {"stock": (), "one": shards, **{ours: (*shards, *OURS[ours][0]) for ours in of_row}} if of_row else {}
        for kind, added in kinds.items():
            measured = () if kind == "stock" else ("--bpipe-min-bytes", "1024", "--bpipe-report", f"{{folder}}/{row}_{kind}")
            cases.append(Case(f"{row}_{kind}", (*ALIKE, *common, *flags, *added, *measured)))
    return run(4, cases, timeout_s=1800, worker="named_worker.py")


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return trained(ROWS, FOUR, run_cases, asked_for(request, "row", "ours"))


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return trained(WIDE_ROWS, (*TWO, *SHORT), run_cases, asked_for(request, "row", "ours"))


def as_1f1b(outcome: Outcome, row: str, ours: str) -> None:
    """Its bits, evaluations too, within what it holds; and so near stock as 1F1B is."""
    alike(outcome, f"{row}_one", f"{row}_{ours}")
    one, other, stock = (outcome.record(f"{row}_{kind}", 3) for kind in ("one", ours, "stock"))
    assert other["evaluations"] == one["evaluations"]
    assert len(other["evaluations"]) == len(stock["evaluations"])
    half = bool({"--bf16", "--fp16"} & set({**ROWS, **WIDE_ROWS}[row][0]))
    for mine, its in zip(other["iterations"], stock["iterations"], strict=True):
        assert near(*(float.fromhex(step["lm loss"]) for step in (mine, its)), 1e-3 if half else FP32.later), (mine, its)
    as_predicted(outcome, f"{row}_{ours}", 4, OURS[ours][1])


@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("row", "ours"), compared(ROWS))
def test_other_schedules_train_shards_to_the_bit_as_1f1b_does(four: Outcome, row: str, ours: str) -> None:
    as_1f1b(four, row, ours)


@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("row", "ours"), compared(WIDE_ROWS))
def test_another_dimension_changes_no_more(wide: Outcome, row: str, ours: str) -> None:
    as_1f1b(wide, row, ours)


SAVING, RESUMED = ("--save-interval", "1"), ("--override-opt-param-scheduler",)
KINDS = {"stock": (), "one": SHARDS, "v_half": (*SHARDS, *OURS["v_half"][0]), "grouped": (*SHARDS, *OURS["grouped"][0])}
DISTRIBUTED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")


@pytest.fixture(scope="module", params=["tied", "untied", "tied_distributed"])
def resumed(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    """From stock's checkpoint, and from what a V with shards made of it."""
    flags = {"tied": FOUR, "untied": (*FOUR, *UNTIED), "tied_distributed": (*TWO, *DISTRIBUTED)}[request.param]
    common = (*ALIKE, *flags, *SHORT, *RESUMED)
    cases = [Case("begun", (*common, "--train-iters", "1", "--save", "{folder}/begun", *SAVING))]
    for kind, ours in KINDS.items():
        cases.append(
            Case(kind, (*common, *ours, "--load", "{folder}/begun", "--train-iters", "2", "--save", f"{{folder}}/{kind}", *SAVING))
        )
    for kind, ours in KINDS.items():
        cases.append(Case(f"{kind}_on", (*common, *ours, "--load", "{folder}/v_half", "--train-iters", "3")))
    cases.append(Case("v_half_from_one", (*common, *KINDS["v_half"], "--load", "{folder}/one", "--train-iters", "3")))
    return run_cases(4, cases, timeout_s=900, worker="named_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_checkpoints_of_any_schedule_are_stocks(resumed: Outcome) -> None:
    """Its keys and shapes, loaded and continued by any other, to the bit where both have shards."""

    def held(kind: str) -> dict[str, tuple[int, ...] | None]:
        entries = FileSystemReader(resumed.folder / kind / "iter_0000002").read_metadata().state_dict_metadata
        return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in entries.items()}

    assert held("v_half") == held("grouped") == held("one") == held("stock")
    for kind in ("v_half", "grouped"):
        alike(resumed, "one", kind)
        alike(resumed, "one_on", f"{kind}_on")
    alike(resumed, "one_on", "v_half_from_one")
    for kind in ("one", "one_on"):
        mine, stock = (resumed.record(name, 3)["iterations"][-1] for name in (kind, kind.replace("one", "stock")))
        assert near(float.fromhex(mine["lm loss"]), float.fromhex(stock["lm loss"]), FP32.later)


@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("row", "ours"), [("tied", "v_half")])
def test_a_v_half_holds_half_of_1f1b_and_two_micro_batches(four: Outcome, row: str, ours: str) -> None:
    """Every rank p / 2 + 2, of two chunks each."""
    assert [report["peak_microbatches"] for report in four.reports(f"{row}_{ours}")] == [8] * 4
    assert [report["peak_microbatches"] for report in four.reports(f"{row}_one")] == [6, 5, 4, 3]
