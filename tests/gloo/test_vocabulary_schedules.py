"""The output layer in shards trains the same bits whatever the schedule is, the embedding beside it too, and each holds
what it predicts.

What 1F1B with shards trains is compared with stock in test_vocabulary, here with other schedules, some of which place
stages as a V. No dropout, whose numbers depend on the rank that draws them, no clipping, whose norm adds up the same
numbers in the order of the ranks. A weight that both layers share adds up their gradients in the order of a rank's T
and IB, which schedules differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import OVERLAPS, PLAIN_ATTENTION
from tests.gloo.test_placed import ALIKE, FOUR, TWO, alike, as_predicted
from tests.gloo.test_vocabulary import (
    FP32,
    INPUT,
    SHARDS,
    TENSOR,
    UNALIGNED,
    UNTIED,
    apart,
    near,
    shard_held,
    shard_modelled,
)

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
    "inputs": (EVALUATION, tuple(OURS)),
    "inputs_tied": (TIED, ("v_half", "zb_v", "zb_h1", "interleaved_balanced", "grouped_balanced")),
    "inputs_few": ((*UNTIED, "--global-batch-size", "2"), ("v_half", "interleaved", "grouped")),
    "inputs_many": ((*TIED, "--global-batch-size", "32"), ("v_half",)),
    "inputs_per_token": (PER_TOKEN, ("v_half", "grouped")),
    "inputs_recomputed": (RECOMPUTED, ("v_half",)),
    "inputs_bf16": ((*UNTIED, "--bf16"), ("v_half", "v_half_whole", "interleaved", "grouped")),
    "inputs_fp16": ((*UNTIED, "--fp16", "--initial-loss-scale", "65536"), ("v_half",)),
    "inputs_by_algorithm_2": (UNTIED, ("v_half", "v_min", "interleaved", "grouped_balanced")),
    "inputs_tied_by_algorithm_2": (TIED, ("v_half", "interleaved", "grouped")),
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
    "inputs_data_tied": (TIED, ("v_half", "grouped")),
    "inputs_overlaps": ((*UNTIED, *OVERLAPS), ("v_half", "interleaved", "grouped")),
    "inputs_unaligned": ((*UNTIED, *OVERLAPS, *UNALIGNED), ("v_half", "grouped")),
    "inputs_overlaps_tied": ((*TIED, *OVERLAPS), ("v_half", "interleaved")),
    "inputs_context_tied": ((*TIED, *CONTEXT), ("v_half", "grouped")),
    "inputs_sequence": ((*UNTIED, *SEQUENCE), ("v_half", "interleaved")),
    "inputs_sequence_tied_by_algorithm_2": ((*TIED, *SEQUENCE), ("v_half", "grouped")),
}
ALWAYS = {("tied", "v_half"), ("untied", "grouped_balanced")}


def compared(rows: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(row, ours, marks=() if (row, ours) in ALWAYS else pytest.mark.slow, id=f"{row}-{ours}")
        for row, (_, which) in rows.items()
        for ours in which
    ]


def trained(
    rows: dict[str, Any], common: tuple[str, ...], run: Callable[..., Outcome], wanted: set[tuple[Any, ...]]
) -> Outcome:
    """Of each row stock, 1F1B in shards, and what is compared with these."""
    cases = []
    for row, (flags, which) in rows.items():
        of_row = [ours for ours in which if (row, ours) in wanted]
        shards = ("--bpipe-vocabulary", "2" if "algorithm_2" in row else "1", *(INPUT[:1] if "inputs" in row else ()))
        kinds = {"stock": (), "one": shards, **{ours: (*shards, *OURS[ours][0]) for ours in of_row}} if of_row else {}
        for kind, added in kinds.items():
            measured = (
                () if kind == "stock" else ("--bpipe-min-bytes", "1024", "--bpipe-report", f"{{folder}}/{row}_{kind}")
            )
            kept = () if exact(row) else ("--gradients",)
            cases.append(Case(f"{row}_{kind}", (*ALIKE, *common, *flags, *added, *measured, *kept)))
    return run(4, cases, timeout_s=1800, worker="named_worker.py")


@pytest.fixture(scope="module")
def four(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return trained(ROWS, FOUR, run_cases, asked_for(request, "row", "ours"))


@pytest.fixture(scope="module")
def wide(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Outcome:
    return trained(WIDE_ROWS, (*TWO, *SHORT), run_cases, asked_for(request, "row", "ours"))


def flags_of(row: str) -> tuple[str, ...]:
    return {**ROWS, **WIDE_ROWS}[row][0]


def exact(row: str) -> bool:
    """Whether a schedule changes no bit: one weight that has the gradients of both layers has them in another order."""
    return "inputs" not in row or UNTIED[0] in flags_of(row)


def gradients(outcome: Outcome, case: str) -> dict[str, torch.Tensor]:
    """Of the first iteration, by the names of the whole model, the vocabulary's rows in one piece."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(4):
        found |= torch.load(outcome.folder / f"{case}.rank{rank}.gradients")
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for name in [name for name in found if " from " in name]:
        layer, _, first, tensor_rank = name.rsplit(" ", 3)
        rows.setdefault(f"{layer} {tensor_rank}", {})[int(first)] = found.pop(name)
    return found | {name: torch.cat([parts[first] for first in sorted(parts)]) for name, parts in rows.items()}


def gradients_near(outcome: Outcome, row: str, ours: str) -> None:
    mine, its = (gradients(outcome, f"{row}_{kind}") for kind in (ours, "stock"))
    assert mine.keys() == its.keys()
    distances = {name: apart(mine[name].double(), its[name].double()) for name in its}
    assert max(distances.values()) <= FP32.gradient, distances


def as_1f1b(outcome: Outcome, row: str, ours: str) -> None:
    """Its bits, evaluations too, within what it holds; and so near stock as 1F1B is."""
    one, other, stock = (outcome.record(f"{row}_{kind}", 3) for kind in ("one", ours, "stock"))
    assert len(other["evaluations"]) == len(stock["evaluations"])
    if exact(row):
        alike(outcome, f"{row}_one", f"{row}_{ours}")
        assert other["evaluations"] == one["evaluations"]
    elif "--use-distributed-optimizer" not in flags_of(row):
        gradients_near(outcome, row, ours)
    half = bool({"--bf16", "--fp16"} & set(flags_of(row)))
    for mine, its in zip(other["iterations"], stock["iterations"], strict=True):
        assert near(*(float.fromhex(step["lm loss"]) for step in (mine, its)), 1e-3 if half else FP32.later), (
            mine,
            its,
        )
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
KINDS = {"one": (), "v_half": OURS["v_half"][0], "grouped": OURS["grouped"][0]}
DISTRIBUTED = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
SAVED = {
    "tied": FOUR,
    "untied": (*FOUR, *UNTIED),
    "tied_distributed": (*TWO, *DISTRIBUTED),
    "inputs_tied": FOUR,
    "inputs": (*FOUR, *UNTIED),
    "inputs_distributed": (*TWO, *DISTRIBUTED, *UNTIED),
}


@pytest.fixture(scope="module", params=SAVED)
def resumed(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> tuple[Outcome, bool]:
    """From stock's checkpoint, and from what a V with shards made of it; and whether no schedule changes a bit."""
    common = (*ALIKE, *SAVED[request.param], *SHORT, *RESUMED)
    shards = (*SHARDS, *(INPUT[:1] if "inputs" in request.param else ()))
    kinds = {"stock": (), **{kind: (*shards, *ours) for kind, ours in KINDS.items()}}
    cases = [Case("begun", (*common, "--train-iters", "1", "--save", "{folder}/begun", *SAVING))]
    for kind, ours in kinds.items():
        cases.append(
            Case(
                kind,
                (
                    *common,
                    *ours,
                    "--load",
                    "{folder}/begun",
                    "--train-iters",
                    "2",
                    "--save",
                    f"{{folder}}/{kind}",
                    *SAVING,
                ),
            )
        )
    for kind, ours in kinds.items():
        cases.append(Case(f"{kind}_on", (*common, *ours, "--load", "{folder}/v_half", "--train-iters", "3")))
    cases.append(Case("v_half_from_one", (*common, *kinds["v_half"], "--load", "{folder}/one", "--train-iters", "3")))
    return run_cases(4, cases, timeout_s=900, worker="named_worker.py"), request.param != "inputs_tied"


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_checkpoints_of_any_schedule_are_stocks(resumed: tuple[Outcome, bool]) -> None:
    """Its keys and shapes, loaded and continued by any other, to the bit where both have shards."""
    outcome, exactly = resumed

    def held(kind: str) -> dict[str, tuple[int, ...] | None]:
        entries = FileSystemReader(outcome.folder / kind / "iter_0000002").read_metadata().state_dict_metadata
        return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in entries.items()}

    assert held("v_half") == held("grouped") == held("one") == held("stock")
    pairs = [
        ("one", "v_half"),
        ("one", "grouped"),
        ("one_on", "v_half_on"),
        ("one_on", "grouped_on"),
        ("one_on", "v_half_from_one"),
    ]
    for its, mine in pairs if exactly else ():
        alike(outcome, its, mine)
    stocks = {"one": "stock", "one_on": "stock_on"}
    for its, mine in (*((stock, one) for one, stock in stocks.items()), *((stocks[one], ours) for one, ours in pairs)):
        last = [float.fromhex(outcome.record(name, 3)["iterations"][-1]["lm loss"]) for name in (mine, its)]
        assert near(*last, FP32.later), (mine, its)


@pytest.mark.timeout(1860)
@pytest.mark.parametrize(("row", "ours"), [("tied", "v_half")])
def test_a_v_half_holds_half_of_1f1b_and_two_micro_batches(four: Outcome, row: str, ours: str) -> None:
    """Every rank p / 2 + 2, of two chunks each."""
    assert [report["peak_microbatches"] for report in four.reports(f"{row}_{ours}")] == [8] * 4
    assert [report["peak_microbatches"] for report in four.reports(f"{row}_one")] == [6, 5, 4, 3]


# Other numbers of stages; of each from one to four micro-batches per stage, and by which algorithm.
SIZES: dict[int, dict[int, tuple[str, tuple[str, ...]]]] = {
    2: {1: ("2", TIED), 3: ("1", TIED), 8: ("2", UNTIED)},
    4: {1: ("1", UNTIED), 5: ("2", UNTIED), 16: ("1", TIED)},
    8: {1: ("1", TIED), 9: ("2", UNTIED), 32: ("1", TIED)},
}


@pytest.fixture(scope="module")
def sized(run_cases: Callable[..., Outcome], request: pytest.FixtureRequest) -> Callable[[int], Outcome]:
    """Of that many stages, a rank with two: stock, 1F1B in shards, and V-Half. Micro-batches of one sample."""
    wanted, done = asked_for(request, "stages", "microbatches"), dict[int, Outcome]()

    def of(stages: int) -> Outcome:
        if stages not in done:
            cases = []
            for microbatches, (algorithm, tied) in SIZES[stages].items():
                if (stages, microbatches) not in wanted:
                    continue
                sizes = (
                    "--num-layers",
                    f"{2 * stages}",
                    "--micro-batch-size",
                    "1",
                    "--global-batch-size",
                    f"{microbatches}",
                )
                shards = ("--bpipe-vocabulary", algorithm)
                for kind, ours in {"stock": (), "one": shards, "v_half": (*shards, *OURS["v_half"][0])}.items():
                    name = f"m{microbatches}_{kind}"
                    measured = ("--bpipe-min-bytes", "1024", "--bpipe-report", f"{{folder}}/{name}") if ours else ()
                    cases.append(Case(name, (*ALIKE, *tied, *sizes, *ours, *measured)))
            done[stages] = run_cases(stages, cases, timeout_s=580, worker="named_worker.py")
        return done[stages]

    return of


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(stages, each) for stages, sizes in SIZES.items() for each in sizes]
)
def test_a_v_half_is_flat_however_many_stages_there_are(
    sized: Callable[[int], Outcome], stages: int, microbatches: int
) -> None:
    """Every rank p / 2 + 2 micro-batches, measured as predicted, and logits as modelled; 1F1B's bits, as near stock
    as that is."""
    outcome, case = sized(stages), f"m{microbatches}"
    alike(outcome, f"{case}_one", f"{case}_v_half", world=stages)
    as_predicted(outcome, f"{case}_v_half", stages, moves=False)
    peaks = [report["peak_microbatches"] for report in outcome.reports(f"{case}_v_half")]
    # Of a chunk, of which a rank has two.
    assert peaks == [2 * min(microbatches, stages // 2 + 2)] * stages
    logits = {shard_held(outcome, f"{case}_v_half", rank) for rank in range(stages)}
    assert logits == {shard_modelled(SIZES[stages][microbatches][0], stages=stages, micro_batch=1)}
    print(f"p={stages} m={microbatches}: {peaks[0] / 2} micro-batches on every rank, {logits} bytes from S to T")
    ours, stock = (outcome.record(f"{case}_{kind}", stages - 1)["iterations"] for kind in ("v_half", "stock"))
    for mine, its in zip(ours, stock, strict=True):
        assert near(*(float.fromhex(step["lm loss"]) for step in (mine, its)), FP32.later), (mine, its)
