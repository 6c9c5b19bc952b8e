"""A training by two pipes in opposite directions equals stock Megatron's, weight by weight, and so do the checkpoints
of both.

To Megatron two pipes over p ranks are pipelines of p/2 ranks in twice as many replicas, so "stock" has those sizes and
no patch of ours in its scheduler; its weights are the same bits with virtual stages and without. Without dropout, whose
numbers depend on the rank that draws them, and without clipping, whose norm adds up the same numbers in the order of
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bpipe.balance.config import BalanceConfig
from bpipe.build import ScheduleConfig, build
from bpipe.schedule.files.text import write_csv
from tests.gloo.conftest import BPIPE, Case, Outcome, asked_for
from tests.gloo.test_parallelism import EXPERTS, FP16, LLAMA, OVERLAPS, PLAIN_ATTENTION
from tests.gloo.test_placed import BY_LAYER, MEASURED, RESUMED, SEEDED, alike, as_predicted
from tests.gloo.test_schedules import GROWS

ALIKE = ("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0", "--num-layers", "8")
Run = Callable[..., Outcome]


def pipeline(ranks: int, chunks: int = 1) -> tuple[str, ...]:
    """Megatron's flags for so many ranks, and stages on each."""
    return (
        "--pipeline-model-parallel-size",
        str(ranks),
        *(("--num-virtual-stages-per-pipeline-rank", str(chunks)) if chunks > 1 else ()),
    )


def batch(microbatches: int) -> tuple[str, ...]:
    """Samples of so many micro-batches, of both pipes together."""
    return "--global-batch-size", str(2 * microbatches)


def chunks_of(schedule: str) -> int:
    """Of a family and, behind a hyphen, its chunks."""
    return int(schedule[-1]) if schedule[-1].isdigit() else 1


def by(schedule: str, ranks: int = 4) -> tuple[str, ...]:
    """The flags of the same."""
    chunks = chunks_of(schedule)
    return *pipeline(ranks, chunks), "--bpipe-schedule", schedule.removesuffix(f"-{chunks}")


# One row a feature: flags of both, the number of micro-batches, and the schedules that are compared with stock.
EVERY = ("chimera", "mixpipe", "bitpipe-2", "bitpipe-early-2")
ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "m8": (("--gradients",), 8, EVERY),
    "m4": ((), 4, EVERY),
    "m6": ((), 6, EVERY),
    "m16": ((), 16, EVERY),
    # Odd, so that a rank's last chunk serves the other pipe than its first, and with a turn at both ends.
    "three_chunks": (("--num-layers", "12", "--gradients"), 8, ("bitpipe-3",)),
    "evaluation": (("--eval-interval", "1", "--eval-iters", "2"), 8, ("chimera", "bitpipe-2")),
    "per_token_loss": (("--calculate-per-token-loss",), 8, ("chimera",)),
    "untied": (LLAMA, 8, ("chimera", "bitpipe-2")),
    "eager": (("--overlap-grad-reduce", "--ddp-bucket-size", "20000"), 8, EVERY),
    "overlaps": ((*OVERLAPS, "--ddp-bucket-size", "20000"), 8, ("chimera", "bitpipe-2")),
    "unaligned": ((*OVERLAPS, "--no-align-grad-reduce", "--no-align-param-gather"), 8, ("chimera",)),
    "bf16": (("--bf16",), 8, ("chimera",)),
    "fp16": (FP16, 8, ("chimera",)),
    "experts": (EXPERTS, 8, ("chimera",)),
    "predictions": (("--mtp-num-layers", "2", "--position-embedding-type", "rope"), 8, ("chimera",)),
    "recomputed": (
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        8,
        ("chimera",),
    ),
    "uneven_ends": (("--num-layers", "12", "--decoder-first-pipeline-num-layers", "2"), 8, ("chimera",)),
    # Drawn by stage, and of chunks as large, so stock has as many.
    "dropout": (SEEDED, 8, ("bitpipe-2",)),
    # The same stages on half as many ranks: stock's virtual ones.
    "layout": (("--num-layers", "9", "--pipeline-model-parallel-layout", "Et|tt|ttt|tttL"), 8, ("chimera",)),
    "grows": (GROWS, 0, ("chimera",)),
    # Its loss is one number, which Megatron logs of one replica: with an odd number of chunks the other one's.
    "script_of_ones_own": (("--script", "plain_script.py"), 8, ("bitpipe-2",)),
}
# Experts that the two ranks of a pair share.
SHARED_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "experts_of_a_pair": ((*EXPERTS, "--expert-model-parallel-size", "2", "--gradients"), 8, EVERY),
}
# Two ranks in another dimension.
CONTEXT = ("--context-parallel-size", "2", *PLAIN_ATTENTION)
WIDE_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "tensor": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 8, ("chimera", "bitpipe-2")),
    # Gradients are summed over four ranks, two of each pipe, and stock's ranks come in another order: to the bit where
    # that has no part.
    "context": ((*CONTEXT, "--exact-sums", "--gradients"), 8, ("chimera", "bitpipe-2")),
    "context_dropout": ((*CONTEXT, *SEEDED, "--exact-sums"), 8, ("bitpipe-2",)),
    "data": (("--exact-sums", "--gradients"), 16, ("chimera", "bitpipe-2", "bitpipe-early-2")),
}
# Pipelines of eight ranks, on eight processes and on sixteen.
DEEPER = ("--num-layers", "16")
EIGHT_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "experts_of_a_pair_of_eight": ((*SHARED_ROWS["experts_of_a_pair"][0], *DEEPER), 16, ("chimera", "bitpipe-2")),
}
SIXTEEN_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "tensor_of_eight": ((*WIDE_ROWS["tensor"][0], *DEEPER), 16, ("chimera", "bitpipe-2")),
    "data_of_eight": ((*WIDE_ROWS["data"][0], *DEEPER), 32, ("chimera", "bitpipe-2")),
}
# The same as they are, beside a stock with as many chunks: where a ring begins follows from a weight's place in its
# chunk's buffer.
ROUNDED_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "context_rounded": ((*CONTEXT, "--gradients"), 8, ("chimera",)),
    "data_rounded": (("--gradients",), 16, ("bitpipe-2",)),
    "data_overlaps": (OVERLAPS, 16, ("bitpipe-2",)),
}


def rows_of(rows: dict[str, Any], always: tuple[str, ...] = ()) -> list[Any]:
    return [
        pytest.param(row, schedule, marks=() if row in always else pytest.mark.slow)
        for row, (_, _, schedules) in rows.items()
        for schedule in schedules
    ]


def trained(
    rows: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]],
    run: Run,
    wanted: set[tuple[Any, ...]],
    world: int,
    ranks: int = 4,
) -> Outcome:
    """`world` processes, `ranks` of them a pipeline."""
    cases = []
    for name, (flags, microbatches, schedules) in rows.items():
        common = (*ALIKE, *(batch(microbatches) if microbatches else ()), *flags)
        of_row = [schedule for schedule in schedules if (name, schedule) in wanted]
        if of_row:
            chunks = (
                max(2 * chunks_of(schedule) for schedule in of_row)
                if "--seeded" in flags or name in ROUNDED_ROWS
                else 1
            )
            cases.append(Case(name, (*common, *pipeline(ranks // 2, chunks))))
        cases += [Case(f"{name}_{schedule}", (*common, *by(schedule, ranks))) for schedule in of_row]
    return run(world, cases, timeout_s=2400, worker="named_worker.py")


@pytest.fixture(scope="module")
def four(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(ROWS | SHARED_ROWS, run_cases, asked_for(request, "row", "schedule"), 4)


@pytest.fixture(scope="module")
def wide(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(WIDE_ROWS | ROUNDED_ROWS, run_cases, asked_for(request, "row", "schedule"), 8)


@pytest.fixture(scope="module")
def eight(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(EIGHT_ROWS, run_cases, asked_for(request, "row", "schedule"), 8, 8)


@pytest.fixture(scope="module")
def sixteen(run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    return trained(SIXTEEN_ROWS, run_cases, asked_for(request, "row", "schedule"), 16, 8)


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(ROWS, always=("three_chunks",)))
def test_two_pipes_train_as_stock_does(four: Outcome, row: str, schedule: str) -> None:
    ours = f"{row}_{schedule}"
    alike(four, row, ours)
    assert four.record(ours, 3)["evaluations"] == four.record(row, 3)["evaluations"]
    assert bool(four.record(row, 3)["evaluations"]) is (row == "evaluation")
    if "--gradients" in ROWS[row][0]:
        same_gradients(four, row, ours, 4)


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(SHARED_ROWS))
def test_experts_of_a_pair_add_up_tokens_of_both_pipes(four: Outcome, row: str, schedule: str) -> None:
    as_far_as_experts_allow(four, row, f"{row}_{schedule}", 4)


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(EIGHT_ROWS))
def test_experts_of_a_pair_of_eight_ranks_do_too(eight: Outcome, row: str, schedule: str) -> None:
    as_far_as_experts_allow(eight, row, f"{row}_{schedule}", 8)


def as_far_as_experts_allow(outcome: Outcome, row: str, ours: str, world: int) -> None:
    """Tokens of its own pipe come first, and in stock a chunk always serves the same: so experts' sums have other
    last bits."""

    def losses(case: str) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in step.items() if name != "grad_norm"}
            for step in outcome.record(case, world - 1)["iterations"]
        ]

    assert losses(ours)[0] == losses(row)[0]
    stock, found = gradients(outcome, row, world), gradients(outcome, ours, world)
    apart = {name for name, gradient in stock.items() if not torch.equal(found[name], gradient)}
    assert all("local_experts" in name for name in apart)
    assert furthest(found, stock) < 1e-6


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(WIDE_ROWS))
def test_another_dimension_beside_two_pipes_changes_nothing(wide: Outcome, row: str, schedule: str) -> None:
    same_as_stock(wide, row, schedule, 8, WIDE_ROWS[row][0])


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(SIXTEEN_ROWS))
def test_another_dimension_beside_two_pipes_over_eight_ranks_changes_nothing(
    sixteen: Outcome, row: str, schedule: str
) -> None:
    same_as_stock(sixteen, row, schedule, 16, SIXTEEN_ROWS[row][0])


def same_as_stock(outcome: Outcome, row: str, schedule: str, world: int, flags: tuple[str, ...]) -> None:
    alike(outcome, row, f"{row}_{schedule}", world)
    if "--gradients" in flags:
        same_gradients(outcome, row, f"{row}_{schedule}", world)


# Layers of chunks that serve the pipe that begins in their rank's half of the ranks.
ITS_OWN_PIPES = {"chimera": {0, 1, 2, 3}, "bitpipe-2": {0, 1, 6, 7}}


@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), rows_of(ROUNDED_ROWS))
def test_a_sum_of_four_differs_by_its_order(wide: Outcome, row: str, schedule: str) -> None:
    """A rank's chunks serve both pipes, and half of them read the samples of its pair, so half of the sums have another
    order.

    Of the others even the bits are stock's.
    """
    ours = f"{row}_{schedule}"
    losses = [[float.fromhex(step["lm loss"]) for step in wide.record(case, 7)["iterations"]] for case in (ours, row)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    if "--gradients" in ROUNDED_ROWS[row][0]:
        stock, found = gradients(wide, row, 8), gradients(wide, ours, 8)
        assert furthest(found, stock) < 1e-6
        layers = {layer: [name for name in stock if name.startswith(f"decoder.layers.{layer}.")] for layer in range(8)}
        equal = {
            layer for layer, names in layers.items() if all(torch.equal(found[name], stock[name]) for name in names)
        }
        assert equal == ITS_OWN_PIPES[schedule]


def gradients(outcome: Outcome, case: str, world: int) -> dict[str, torch.Tensor]:
    """Of the whole model, in the first iteration."""
    return {
        name: gradient
        for rank in range(world)
        for name, gradient in torch.load(outcome.folder / f"{case}.rank{rank}.gradients").items()
    }


def same_gradients(outcome: Outcome, stock: str, ours: str, world: int) -> None:
    wanted, found = gradients(outcome, stock, world), gradients(outcome, ours, world)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items()), (
        "gradients of the first iteration"
    )


def furthest(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """How far the weight's gradient that differs most is from what it should be, as a share of that."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - gradient).norm() / gradient.norm()) for name, gradient in wanted.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_are_those_of_one_process_over_the_same_samples(run_cases: Run) -> None:
    """And not where both pipes read the first one's: samples that nobody reads would show in no loss of a single
    run."""
    common = (*ALIKE, *batch(8), "--gradients", "--train-iters", "1")
    alone = run_cases(1, [Case("alone", (*common, *pipeline(1)))], timeout_s=200, worker="named_worker.py")
    cases = [
        Case("bitpipe", (*common, *by("bitpipe-2"))),
        Case("deaf", (*common, *by("bitpipe-2"), "--one-pipes-samples")),
    ]
    both = run_cases(4, cases, timeout_s=300, worker="named_worker.py")
    wanted = gradients(alone, "alone", 1)
    assert furthest(gradients(both, "bitpipe", 4), wanted) < 1e-6
    assert furthest(gradients(both, "deaf", 4), wanted) > 0.1


# Each trains from stock's first checkpoint, and goes on from where the other stopped.
FROM_STOCK: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tied": ((), ()),
    "sharded": ((*BY_LAYER, "--bf16"), ()),
    "sharded_loaded_in_parallel": (BY_LAYER, ("--ckpt-fully-parallel-load",)),
}


@pytest.fixture(scope="module")
def from_stock(run_cases: Run, request: pytest.FixtureRequest) -> Callable[[int], Outcome]:
    done: dict[int, Outcome] = {}

    def of(ranks: int) -> Outcome:
        if ranks not in done:
            names = {name for name, number in asked_for(request, "name", "ranks") if number == ranks}
            done[ranks] = run_cases(ranks, resumed(names, ranks), timeout_s=1500, worker="named_worker.py")
        return done[ranks]

    return of


def resumed(wanted: set[str], ranks: int) -> list[Case]:
    cases = []
    first, second = ("--train-iters", "2", *RESUMED), ("--train-iters", "4", *RESUMED)
    for name, (flags, more) in FROM_STOCK.items():
        if name not in wanted:
            continue
        common = (*ALIKE, "--num-layers", str(2 * ranks), *batch(2 * ranks), *flags)
        stock, ours = (*common, *pipeline(ranks // 2)), (*common, *more, *by("bitpipe-2", ranks))

        def saved(at: str, case: str = name) -> tuple[str, ...]:
            return "--save", f"{{folder}}/{case}_{at}", "--save-interval", "1"

        def loaded(at: str, case: str = name) -> tuple[str, ...]:
            return "--load", f"{{folder}}/{case}_{at}"

        cases += [
            Case(f"{name}_begun", (*stock, "--train-iters", "1", *saved("begun"))),
            Case(f"{name}_stock", (*stock, *first, *loaded("begun"), *saved("stock"))),
            Case(f"{name}_ours", (*ours, *first, *loaded("begun"), *saved("ours"))),
            Case(f"{name}_stock_on", (*stock, *second, *loaded("ours"))),
            Case(f"{name}_ours_on", (*ours, *second, *loaded("stock"))),
            Case(f"{name}_ours_resumed", (*ours, *second, *loaded("ours"))),
        ]
    return cases


@pytest.mark.slow
@pytest.mark.timeout(1560)
@pytest.mark.parametrize("name", FROM_STOCK)
@pytest.mark.parametrize("ranks", [4, 8])
def test_two_pipes_go_on_from_stocks_checkpoint_and_stock_from_theirs(
    from_stock: Callable[[int], Outcome], ranks: int, name: str
) -> None:
    """The optimizer's state with it, or the second pair would not be equal."""
    outcome = from_stock(ranks)
    alike(outcome, f"{name}_stock", f"{name}_ours", ranks)
    alike(outcome, f"{name}_stock_on", f"{name}_ours_on", ranks)
    alike(outcome, f"{name}_stock_on", f"{name}_ours_resumed", ranks)


# Of eight ranks: micro-batches and flags, by name and from a file. Of 8 micro-batches, one unit, the ranks in the
# middle hold most.
EIGHT_RANKS: dict[str, tuple[int, tuple[str, ...]]] = {
    "chimera": (8, by("chimera", 8)),
    "mixpipe": (8, by("mixpipe", 8)),
    "bitpipe": (8, by("bitpipe-2", 8)),
    "bitpipe-early": (8, by("bitpipe-early-2", 8)),
    "chimera_balanced": (8, (*by("chimera", 8), *BPIPE, "--bpipe-transport", "peer")),
    "chimera_balanced_gloo": (8, (*by("chimera", 8), *BPIPE, "--bpipe-transport", "gloo")),
    "from_a_file": (8, (*pipeline(8), "--bpipe-schedule", "{folder}/mine.csv", *BPIPE)),
    "chimera_m16": (16, by("chimera", 8)),
    "mixpipe_m16": (16, by("mixpipe", 8)),
    "mixpipe_m32_balanced": (32, (*by("mixpipe", 8), *BPIPE, "--bpipe-transport", "peer")),
    "bitpipe_m24": (24, by("bitpipe-2", 8)),
    "bitpipe_three_chunks": (8, (*by("bitpipe-3", 8), "--num-layers", "24")),
    "bitpipe_three_chunks_m32": (32, (*by("bitpipe-3", 8), "--num-layers", "24")),
    # Level as it is.
    "bitpipe-early_m32": (32, by("bitpipe-early-2", 8)),
}


def stock_of(name: str) -> tuple[str, tuple[str, ...]]:
    """The stock run that one of these is compared with, and what both are given."""
    microbatches, flags = EIGHT_RANKS[name]
    layers = flags[-1] if "--num-layers" in flags else "16"
    common = (*ALIKE, "--num-layers", layers, "--micro-batch-size", "1", "--global-batch-size", str(microbatches))
    return f"stock_{layers}_{microbatches}", common


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory, run_cases: Run, request: pytest.FixtureRequest) -> Outcome:
    file = tmp_path_factory.mktemp("two_pipes") / "mine.csv"
    file.write_text(write_csv(build(ScheduleConfig("chimera", 8, 8, balance=BalanceConfig()))))
    cases: dict[str, Case] = {}
    for name, (_, flags) in EIGHT_RANKS.items():
        if (name,) in asked_for(request, "name"):
            stock, common = stock_of(name)
            cases[stock] = Case(stock, (*common, *pipeline(4)))
            mine = [flag.replace("{folder}/mine.csv", str(file)) for flag in flags]
            cases[name] = Case(name, (*common, *mine, *MEASURED[:-1], f"{MEASURED[-1]}{name}"))
    return run_cases(8, list(cases.values()), timeout_s=2400, worker="named_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(2460)
@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_eight_ranks_train_as_stock_does_and_hold_what_is_predicted(eight_ranks: Outcome, name: str) -> None:
    alike(eight_ranks, stock_of(name)[0], name, world=8)
    as_predicted(eight_ranks, name, 8, moves=name == "from_a_file" or "balanced" in name)
    reports = eight_ranks.reports(name)
    assert [report["pipeline"] for report in reports] == [0] * 8
    assert sorted(report["stage"] for report in reports) == list(range(8))
