"""The output layer, and the embedding, in shards train the same bits under any schedule, with the predicted peaks.

test_vocabulary compares 1F1B with stock; this compares other schedules, some of them on a V, with 1F1B. Dropout is off
because it depends on the rank that draws it, and so is clipping, whose norm is summed in the order of the ranks. A tied
weight sums its gradients in the order of a rank's T and IB, which differs between schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.gloo.compare import alike, as_predicted, furthest, gradients
from tests.gloo.conftest import Case, Outcome, Row
from tests.gloo.flags import (
    BUCKETS,
    CHUNKS,
    CONTEXT,
    EIGHT_LAYERS,
    FOUR,
    FULL,
    GLOO,
    MEASURED,
    OVERLAPS,
    PEER,
    SEQUENCE,
    TWO,
    UNALIGNED,
    UNTIED,
    WHOLE,
    batch,
)
from tests.gloo.test_vocabulary import DIVISIBLE, FP32, SCALED, near, shard_held, shard_modelled

pytestmark = pytest.mark.timeout(2460)
Trained = Callable[[Row], Outcome]

# With four stages; a V always has its chunks.
OURS = {
    "v_half": "--bpipe-schedule v-half",
    "v_half_whole": f"--bpipe-schedule v-half {WHOLE}",
    "v_min": "--bpipe-schedule v-min",
    "zb_v": "--bpipe-schedule zb-v",
    "zb_h1": "--bpipe-schedule zb-h1",
    "split_balanced": f"--bpipe-schedule 1f1b-split --bpipe-delay 1 {PEER}",
    "interleaved": CHUNKS,
    "interleaved_balanced": f"{CHUNKS} {PEER}",
    "grouped": f"--bpipe-schedule grouped-interleaved {CHUNKS}",
    "grouped_balanced": f"--bpipe-schedule grouped-interleaved {CHUNKS} {PEER}",
    "grouped_balanced_for_a_bound": f"--bpipe-schedule grouped-interleaved {CHUNKS} {PEER} --bpipe-bound 5",
    "grouped_balanced_gloo": f"--bpipe-schedule grouped-interleaved {CHUNKS} {GLOO}",
}
EVERY = " ".join(OURS)
EVALUATED = "--calculate-per-token-loss --eval-interval 1 --eval-iters 2"
# Flags of a feature, and which of ours are compared with 1F1B's shards. `inputs` also shards the embedding, and `by_2`
# uses the second algorithm.
ROWS: dict[str, tuple[str, str]] = {
    "tied": ("", EVERY),
    "untied": (UNTIED, EVERY),
    "few": (batch(2), "v_half interleaved grouped"),
    "many": (f"{UNTIED} {batch(16)}", "v_half grouped_balanced"),
    "evaluated": (f"{UNTIED} {EVALUATED}", "v_half interleaved grouped"),
    "recomputed": (FULL, "v_half grouped"),
    "bf16": ("--bf16", "v_half v_half_whole interleaved grouped"),
    "fp16": (f"{UNTIED} {SCALED}", "v_half"),
    "tied_by_2": ("", EVERY),
    "untied_by_2": (f"{UNTIED} --eval-interval 1 --eval-iters 2", "v_half v_half_whole interleaved grouped"),
    "inputs": (f"{UNTIED} {EVALUATED}", EVERY),
    "inputs_tied": ("", "v_half zb_v zb_h1 interleaved_balanced grouped_balanced"),
    "inputs_few": (f"{UNTIED} {batch(1)}", "v_half interleaved grouped"),
    "inputs_many": (f"{batch(16)} {FULL}", "v_half"),
    "inputs_bf16": (f"{UNTIED} --bf16", "v_half v_half_whole interleaved grouped"),
    "inputs_fp16": (f"{UNTIED} {SCALED}", "v_half"),
    "inputs_by_2": (UNTIED, "v_half v_min interleaved grouped_balanced"),
    "inputs_tied_by_2": ("", "v_half interleaved grouped"),
}
SPLIT_SEQUENCE = f"{SEQUENCE} {DIVISIBLE}"
# Two stages, and two ranks in another dimension.
WIDE_ROWS: dict[str, tuple[str, str]] = {
    "data": (UNTIED, "v_half grouped"),
    "data_tied": ("", "v_half grouped"),
    "overlaps": (f"{UNTIED} {OVERLAPS}", "v_half grouped interleaved"),
    "unaligned": (f"{UNTIED} {UNALIGNED} {BUCKETS}", "v_half grouped"),
    "overlaps_tied": (OVERLAPS, "v_half grouped"),
    "context": (f"{UNTIED} {CONTEXT}", "v_half interleaved grouped"),
    "context_tied_by_2": (CONTEXT, "v_half zb_h1 grouped"),
    "sequence": (f"{UNTIED} {SPLIT_SEQUENCE}", "v_half grouped"),
    "sequence_tied_by_2": (SPLIT_SEQUENCE, "v_half zb_h1 interleaved"),
    "inputs_data_tied": ("", "v_half grouped"),
    "inputs_overlaps": (f"{UNTIED} {OVERLAPS}", "v_half interleaved grouped"),
    "inputs_unaligned": (f"{UNTIED} {UNALIGNED} {BUCKETS}", "v_half grouped"),
    "inputs_overlaps_tied": (OVERLAPS, "v_half interleaved"),
    "inputs_context_tied": (CONTEXT, "v_half grouped"),
    "inputs_sequence": (f"{UNTIED} {SPLIT_SEQUENCE}", "v_half interleaved"),
    "inputs_sequence_tied_by_2": (SPLIT_SEQUENCE, "v_half grouped"),
}
# Other numbers of stages, each with one to four micro-batches per stage and an algorithm.
SIZES: dict[int, dict[int, tuple[str, str]]] = {
    2: {1: ("2", ""), 3: ("1", ""), 8: ("2", UNTIED)},
    4: {1: ("1", UNTIED), 5: ("2", UNTIED), 16: ("1", "")},
    8: {1: ("1", ""), 9: ("2", UNTIED), 32: ("1", "")},
}
ALWAYS = ("tied-v_half",)


def is_exact(row: Row) -> bool:
    """Whether a schedule changes no bit: a tied weight sums the gradients of both layers in another order."""
    return "inputs" not in row.name or UNTIED in row.stock.flags


def row_of(feature: str, common: str, shards: str, ours: str, world: int = 4) -> Row:
    name = f"{feature}-{ours}"
    keeps = "--gradients" if "inputs" in feature and UNTIED not in common else ""
    stock = f"--named {EIGHT_LAYERS} {common} {keeps}"
    of_1f1b = Case(f"{feature}-one", f"{stock} {shards} {MEASURED}")
    case = Case(name, f"{stock} {shards} {OURS[ours]} {MEASURED}")
    return Row(name, Case(feature, stock), case, world, name not in ALWAYS, (of_1f1b,), "balanced" in ours)


def rows_of(table: dict[str, tuple[str, str]], common: str) -> Iterable[Row]:
    for feature, (flags, which) in table.items():
        shards = f"--bpipe-vocabulary {'2' if 'by_2' in feature else '1'}"
        shards += " --bpipe-vocabulary-input" if "inputs" in feature else ""
        for ours in which.split():
            yield row_of(feature, f"{common} {flags}", shards, ours)


def sized_rows() -> Iterable[Row]:
    for stages, sizes in SIZES.items():
        for microbatches, (algorithm, tied) in sizes.items():
            size = f"--num-layers {2 * stages} --micro-batch-size 1 --global-batch-size {microbatches} {tied}"
            shards = f"--bpipe-vocabulary {algorithm}"
            yield row_of(f"p{stages}_m{microbatches}_by_{algorithm}", size, shards, "v_half", stages)


BY_NAME = {row.name: row for row in rows_of(ROWS, f"{FOUR} {batch(6)}")}
WIDE = {row.name: row for row in rows_of(WIDE_ROWS, f"{TWO} {batch(6)}")}


def losses_near_stock(outcome: Outcome, row: Row, tolerance: float) -> None:
    records = [outcome.record(case.name, row.world - 1)["iterations"] for case in (row.ours, row.stock)]
    for steps in zip(*records, strict=True):
        assert near(*(float.fromhex(step["lm loss"]) for step in steps), tolerance), steps


@pytest.mark.parametrize("row", [row.parameter() for row in (*BY_NAME.values(), *WIDE.values())])
def test_other_schedules_train_shards_to_the_bit_as_1f1b_does(trained: Trained, row: Row) -> None:
    """Compare bits, evaluations and peaks with 1F1B, and losses with stock."""
    outcome, (of_1f1b,), ours, flags = trained(row), row.others, row.ours.name, row.stock.flags
    stock, sharded = (outcome.record(case, 3)["evaluations"] for case in (row.stock.name, ours))
    assert len(sharded) == len(stock)
    if is_exact(row):
        alike(outcome, of_1f1b.name, ours)
    elif "--use-distributed-optimizer" not in flags:
        assert furthest(gradients(outcome, ours, 4), gradients(outcome, row.stock.name, 4)) <= FP32.gradient
    losses_near_stock(outcome, row, 1e-3 if {"--bf16", "--fp16"} & set(flags.split()) else FP32.later)
    as_predicted(outcome, ours, 4, bool(row.moves))


@pytest.mark.parametrize("row", [BY_NAME["tied-v_half"].parameter()])
def test_a_v_half_holds_half_of_1f1b_and_two_micro_batches(trained: Trained, row: Row) -> None:
    """Every rank holds p / 2 + 2 micro-batches of two chunks each."""
    outcome, (of_1f1b,) = trained(row), row.others
    assert [report["peak_microbatches"] for report in outcome.reports(row.ours.name)] == [8] * 4
    assert [report["peak_microbatches"] for report in outcome.reports(of_1f1b.name)] == [6, 5, 4, 3]


@pytest.mark.parametrize("row", [row.parameter() for row in sized_rows()])
def test_a_v_half_is_flat_however_many_stages_there_are(trained: Trained, row: Row) -> None:
    """Every rank holds p / 2 + 2 micro-batches, and the modelled logits; the bits are those of 1F1B."""
    outcome, (of_1f1b,), case, stages = trained(row), row.others, row.ours.name, row.world
    alike(outcome, of_1f1b.name, case, stages)
    as_predicted(outcome, case, stages, moves=False)
    microbatches, algorithm = row.name.partition("-")[0].partition("_m")[2].split("_by_")
    # Counted in chunks, of which a rank has two.
    peaks = [report["peak_microbatches"] for report in outcome.reports(case)]
    assert peaks == [2 * min(int(microbatches), stages // 2 + 2)] * stages
    logits = {shard_held(outcome, case, rank) for rank in range(stages)}
    assert logits == {shard_modelled(algorithm, stages=stages, micro_batch=1)}
    losses_near_stock(outcome, row, FP32.later)
