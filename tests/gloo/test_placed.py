"""A training whose stages are placed as a V equals stock Megatron's, weight by weight, and so do the checkpoints of
both.

"Stock" runs with no patch of ours in Megatron's scheduler, by its own loop for one stage per rank. Without dropout, whose
numbers depend on the rank that draws them, and without clipping, whose norm adds up the same numbers in the order of
the ranks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from bpipe.build import ScheduleConfig, build
from bpipe.record.report.report import report_of
from bpipe.schedule.action import Action, Kind
from bpipe.schedule.families.unit_grid import place
from bpipe.schedule.files.text import write_csv
from bpipe.schedule.schedule import Schedule
from tests.gloo.conftest import BPIPE, ROOT, Case, Outcome, asked_for
from tests.gloo.test_fused_gradients import DEFERRED
from tests.gloo.test_parallelism import EXPERTS, FP16, LLAMA, OVERLAPS, PLAIN_ATTENTION
from tests.gloo.test_schedules import GROWS
from tests.support.torch_schedules import as_csv, torch_schedule

ALIKE = (
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--clip-grad",
    "0",
    "--num-layers",
    "8",
    "--global-batch-size",
    "12",
)
BY_LAYER = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
# A resumed run goes on where another length of the training would have been.
RESUMED = ("--override-opt-param-scheduler",)


def whole(schedule: Schedule) -> Schedule:
    """The same with backwards that are not split."""
    orders = [
        [
            Action(one.stage, Kind.BACKWARD if one.kind is Kind.BACKWARD_INPUT else one.kind, one.microbatch)
            for slot in row
            for one in slot.computations
            if one.kind is not Kind.BACKWARD_WEIGHT
        ]
        for row in schedule.ranks
    ]
    return place(schedule.name, schedule.num_microbatches, schedule.layout, orders)


def eager(schedule: Schedule) -> Schedule:
    """The same, but the first stage computes all its forwards first, so that its rank holds more than the others."""
    orders = [[one for slot in row for one in slot.computations] for row in schedule.ranks]
    orders[0].sort(key=lambda one: (one.stage, one.kind) != (0, Kind.FORWARD))
    return place("eager", schedule.num_microbatches, schedule.layout, orders)


def written(folder: Path) -> Path:
    """Schedules by name, ranks and micro-batches; with eight micro-batches by name alone."""
    (folder / "eager.csv").write_text(write_csv(eager(build(ScheduleConfig("v-min", 4, 8, num_chunks=2)))))
    (folder / "dual_pipe_v.csv").write_text(as_csv(torch_schedule("ScheduleDualPipeV", 4, 8, 2)))
    (folder / "dual_pipe_v_8.csv").write_text(as_csv(torch_schedule("ScheduleDualPipeV", 8, 16, 2)))
    for name, chunks in (
        ("v_half", 2),
        ("v_min", 2),
        ("zb_v", 2),
        ("grouped_interleaved", 2),
        ("zb_h1", 1),
        ("1f1b", 1),
    ):
        for ranks, microbatches in ((4, 6), (4, 3), (2, 3), (2, 6)):
            schedule = build(ScheduleConfig(name.replace("_", "-"), ranks, microbatches, num_chunks=chunks))
            (folder / f"{name}_{ranks}_{microbatches}.csv").write_text(write_csv(schedule))
            (folder / f"{name}_whole_{ranks}_{microbatches}.csv").write_text(write_csv(whole(schedule)))
    return folder


def of_file(name: str) -> tuple[str, str]:
    return "--bpipe-schedule", f"{{schedules}}/{name}.csv"


# One row a feature, of four stages: stock's flags, the schedule's number of micro-batches, and flags of ours only.
ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "fewer_than_stages": (("--global-batch-size", "6"), 3, ()),
    "untied": (LLAMA, 6, ()),
    "per_token_loss_of_a_v": (("--calculate-per-token-loss",), 6, ()),
    "evaluation_of_a_v": (("--eval-interval", "1", "--eval-iters", "2"), 6, ()),
    "uneven_ends": (
        ("--num-layers", "12", "--decoder-first-pipeline-num-layers", "2", "--decoder-last-pipeline-num-layers", "2"),
        6,
        (),
    ),
    "account_for_both_ends": (
        ("--num-layers", "14", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        6,
        (),
    ),
    "layout_of_a_v": (
        ("--num-layers", "9", "--pipeline-model-parallel-layout", "Et|tt|ttt|tttL"),
        6,
        ("--pipeline-model-parallel-layout", "Et|tt|t|t|t|t|t|tL"),
    ),
    "experts_in_a_v": (EXPERTS, 6, ()),
    "predictions_in_a_v": (("--mtp-num-layers", "2", "--position-embedding-type", "rope"), 6, ()),
    "untied_predictions": (("--mtp-num-layers", "2", *LLAMA), 6, ()),
    "recomputed_v": (
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        6,
        (),
    ),
    "selective_v": (("--recompute-granularity", "selective"), 6, ()),
    "timed_in_a_v": (("--timing-log-level", "2"), 6, ()),
    "tokens_of_a_file": (
        (
            *("--data-path", "{schedules}/corpus_text_document", "--tokenizer-type", "ByteLevelTokenizer"),
            # Megatron looks for samples in an empty part for ever.
            *("--vocab-size", "512", "--split", "6,3,2", "--eval-interval", "2", "--eval-iters", "1"),
        ),
        6,
        (),
    ),
    # Its model comes from a function of the script's own, which Megatron builds chunks by in another place.
    "script_of_ones_own": (("--script", "plain_script.py"), 6, ()),
    "fp16_in_a_v": (FP16, 6, ()),
    "balanced_v": ((), 6, (*BPIPE, "--bpipe-report", "{folder}/balanced_v")),
}
# Two stages, and two ranks in another dimension.
WIDE_ROWS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "tensor_in_a_v": (("--tensor-model-parallel-size", "2"), 6, ()),
    "sequence_in_a_v": (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 6, ()),
    "data_in_a_v": ((), 3, ()),
    "data_in_the_other_order": (("--use-tp-pp-dp-mapping",), 3, ()),
    "overlaps_in_a_v": ((*OVERLAPS, "--ddp-bucket-size", "20000"), 3, ()),
    "unaligned_in_a_v": ((*OVERLAPS, "--no-align-grad-reduce", "--no-align-param-gather"), 3, ()),
    "context_in_a_v": (("--context-parallel-size", "2", *PLAIN_ATTENTION), 6, ()),
    "experts_on_two_ranks": ((*EXPERTS, "--expert-model-parallel-size", "2"), 3, ()),
}
SCHEDULES = ("v_half", "v_min", "v_half_whole")
# By what else a row is trained: ZB-V, and not as a V, in halves and whole.
OTHERS = ("grouped_interleaved", "zb_h1", "1f1b")
MORE = {
    **dict.fromkeys(("fewer_than_stages", "balanced_v"), ("zb_v",)),
    **dict.fromkeys(("tokens_of_a_file", "script_of_ones_own", "timed_in_a_v"), OTHERS),
}


def by_schedule(rows: Iterable[str]) -> list[tuple[str, str]]:
    return [(row, schedule) for row in rows for schedule in (*SCHEDULES, *MORE.get(row, ()))]


# Of four stages and eight micro-batches: families by name, a schedule of torch's own, and one that leaves something to
# balance.
MEASURED = ("--bpipe-min-bytes", "1024", "--bpipe-report", "{folder}/")
EIGHT = ("--global-batch-size", "16")
FAMILIES: dict[str, tuple[str, ...]] = {
    "v-half": ("--bpipe-schedule", "v-half"),
    "v-half_whole": ("--bpipe-schedule", "v-half", "--bpipe-keep-weights-halves", "none"),
    "v-min": ("--bpipe-schedule", "v-min"),
    "v-min_whole": ("--bpipe-schedule", "v-min", "--bpipe-keep-weights-halves", "none"),
    "zb-v": ("--bpipe-schedule", "zb-v"),
    "zb-v_whole": ("--bpipe-schedule", "zb-v", "--bpipe-keep-weights-halves", "none"),
    "zb-v_balanced": ("--bpipe-schedule", "zb-v", *BPIPE),
    "dual_pipe_v": of_file("dual_pipe_v"),
    "eager_balanced": (*of_file("eager"), *BPIPE, "--bpipe-transport", "peer"),
    "eager_balanced_gloo": (*of_file("eager"), *BPIPE, "--bpipe-transport", "gloo"),
}
FOUR, TWO = (("--pipeline-model-parallel-size", size) for size in "42")

# Each trains from the stock run's first checkpoint, and goes on from where the other stopped.
FROM_STOCK = {
    "tied": (FOUR, 4, 6, ()),
    "bf16_from_stock": ((*FOUR, "--bf16"), 4, 6, ()),
    "sharded": ((*TWO, *BY_LAYER, "--bf16"), 2, 3, ()),
    # Each copy of a tied weight of one tensor: both would be updated in one memory.
    "sharded_loaded_in_parallel": ((*TWO, *BY_LAYER), 2, 3, ("--ckpt-fully-parallel-load",)),
    "all_reduced": ((*TWO, "--use-tp-pp-dp-mapping"), 2, 3, ("--ckpt-fully-parallel-load",)),
}
ALWAYS = ("tied",)
Placed = Callable[..., Outcome]


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = written(tmp_path_factory.mktemp("schedules"))
    if request.config.getoption("--slow"):
        corpus, prefix = str(folder / "corpus.jsonl"), str(folder / "corpus")
        make = ("make_corpus.py", "--output", corpus, "--max-bytes", "100000")
        count = (
            "preprocess_data.py",
            "--input",
            corpus,
            "--output-prefix",
            prefix,
            "--tokenizer-type",
            "ByteLevelTokenizer",
            "--append-eod",
        )
        for script, *arguments in (make, count):
            subprocess.run([sys.executable, str(ROOT / "scripts/data" / script), *arguments], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def run_placed(run_cases: Callable[..., Outcome], schedules: Path) -> Placed:
    def run(cases: list[Case], timeout_s: float, worker: str = "named_worker.py", world: int = 4) -> Outcome:
        placed = [
            Case(case.name, [each.replace("{schedules}", str(schedules)) for each in case.arguments]) for case in cases
        ]
        return run_cases(world, placed, timeout_s=timeout_s, worker=worker)

    return run


def weights(outcome: Outcome, case: str, world: int) -> dict[str, str]:
    """Of the whole model; what several ranks have is equal on all."""
    found: dict[str, str] = {}
    for rank in range(world):
        for name, digest in outcome.record(case, rank)["weights"].items():
            assert found.setdefault(name, digest) == digest, f"{case}: copies of {name} differ"
    return found


def alike(outcome: Outcome, stock: str, ours: str, world: int = 4) -> None:
    """Every loss and every weight; the norm of the gradients is not among what is the same."""

    def losses(case: str) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in step.items() if name != "grad_norm"}
            for step in outcome.record(case, world - 1)["iterations"]
        ]

    assert losses(ours) == losses(stock)
    assert not all(step["skipped"] for step in losses(stock)), "weights that never change are equal anyway"
    assert len({step["lm loss"] for step in losses(stock)}) == len(losses(stock)) > 0, (
        "losses that do not change are equal anyway"
    )
    assert weights(outcome, ours, world) == weights(outcome, stock, world)


def only_slow(name: str) -> Any:
    return pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow)


@pytest.fixture(scope="module")
def from_stock(run_placed: Placed, request: pytest.FixtureRequest) -> Outcome:
    cases = []
    wanted = asked_for(request, "name")
    for name, (flags, ranks, microbatches, more) in FROM_STOCK.items():
        if (name,) not in wanted:
            continue
        stock, ours = (*ALIKE, *flags), (*ALIKE, *flags, *of_file(f"v_half_{ranks}_{microbatches}"), *more)
        first, second = (("--train-iters", "2", *RESUMED), ("--train-iters", "4", *RESUMED))
        for kind, its, others in (("stock", stock, "ours"), ("ours", ours, "stock")):
            begun = (
                "--load",
                f"{{folder}}/{name}_begun",
                *first,
                "--save",
                f"{{folder}}/{name}_{kind}",
                "--save-interval",
                "2",
            )
            cases.append(Case(f"{name}_{kind}", (*its, *begun)))
            cases.append(Case(f"{name}_{kind}_on", (*its, "--load", f"{{folder}}/{name}_{others}", *second)))
        begin = Case(
            f"{name}_begun",
            (*stock, "--train-iters", "1", "--save", f"{{folder}}/{name}_begun", "--save-interval", "1"),
        )
        cases[-4:] = [begin, cases[-4], cases[-2], cases[-3], cases[-1]]
    return run_placed(cases, 1500)


@pytest.mark.timeout(1560)
@pytest.mark.parametrize("name", [only_slow(name) for name in FROM_STOCK])
def test_a_v_goes_on_from_stocks_checkpoint_and_stock_from_a_vs(from_stock: Outcome, name: str) -> None:
    """The optimizer's state with it, or the second pair would not be equal."""
    alike(from_stock, f"{name}_stock", f"{name}_ours")
    alike(from_stock, f"{name}_stock_on", f"{name}_ours_on")


@pytest.mark.timeout(1560)
@pytest.mark.parametrize("name", ["tied"])
def test_a_tied_weight_is_saved_once(from_stock: Outcome, name: str) -> None:
    """And a V's checkpoint holds what stock's holds, by the same names in the same shapes."""
    from torch.distributed.checkpoint import FileSystemReader

    def held(kind: str) -> dict[str, tuple[int, ...] | None]:
        reader = FileSystemReader(from_stock.folder / f"{name}_{kind}/iter_0000002")
        entries = reader.read_metadata().state_dict_metadata
        return {name: tuple(entry.size) if hasattr(entry, "size") else None for name, entry in entries.items()}

    assert held("ours") == held("stock")
    assert not any("output_layer" in name for name in held("ours"))


def trained(
    rows: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]],
    pipeline: tuple[str, ...],
    run: Placed,
    wanted: set[tuple[Any, ...]],
) -> Outcome:
    cases = []
    for name, (flags, microbatches, more) in rows.items():
        of_row = [schedule for row, schedule in by_schedule([name]) if (row, schedule) in wanted]
        if of_row:
            cases.append(Case(name, (*ALIKE, *pipeline, *flags)))
        for schedule in of_row:
            ours = of_file(f"{schedule}_{pipeline[1]}_{microbatches}")
            cases.append(Case(f"{name}_{schedule}", (*ALIKE, *pipeline, *flags, *more, *ours)))
    return run(cases, 2400)


@pytest.fixture(scope="module")
def four(run_placed: Placed, request: pytest.FixtureRequest) -> Outcome:
    return trained(ROWS, FOUR, run_placed, asked_for(request, "row", "schedule"))


@pytest.fixture(scope="module")
def wide(run_placed: Placed, request: pytest.FixtureRequest) -> Outcome:
    return trained(WIDE_ROWS, TWO, run_placed, asked_for(request, "row", "schedule"))


@pytest.mark.slow
@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), by_schedule(ROWS))
def test_a_v_trains_as_stock_does(four: Outcome, row: str, schedule: str) -> None:
    alike(four, row, f"{row}_{schedule}")
    skipped = [step["skipped"] for step in four.record(f"{row}_{schedule}", 3)["iterations"]]
    assert any(skipped) is ("--fp16" in ROWS[row][0]), "a step whose gradients overflow is skipped"


@pytest.mark.slow
@pytest.mark.timeout(2460)
@pytest.mark.parametrize(("row", "schedule"), by_schedule(WIDE_ROWS))
def test_another_dimension_beside_a_v_changes_nothing(wide: Outcome, row: str, schedule: str) -> None:
    alike(wide, row, f"{row}_{schedule}")


PEER = (*BPIPE, "--bpipe-transport", "peer")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
GROUPED = ("--bpipe-schedule", "grouped-interleaved", "--bpipe-group", "4", *CHUNKS)
EIGHT_RANKS: dict[str, tuple[str, ...]] = {
    "1f1b": ("--bpipe-executor",),
    "1f1b_balanced": ("--bpipe-executor", *PEER),
    "interleaved": ("--bpipe-executor", *CHUNKS),
    "interleaved_balanced": ("--bpipe-executor", *CHUNKS, *PEER),
    "1f1b-split": ("--bpipe-schedule", "1f1b-split"),
    "1f1b-split_balanced": ("--bpipe-schedule", "1f1b-split", "--bpipe-delay", "1", *PEER),
    "zb-h1": ("--bpipe-schedule", "zb-h1"),
    "v-half": ("--bpipe-schedule", "v-half"),
    "v-min": ("--bpipe-schedule", "v-min"),
    "zb-v": ("--bpipe-schedule", "zb-v"),
    "dual_pipe_v": of_file("dual_pipe_v_8"),
    "grouped": GROUPED,
    "grouped_balanced": (*GROUPED, *PEER),
}


def measured(name: str, flags: tuple[str, ...]) -> Case:
    return Case(name, (*flags, *MEASURED[:-1], f"{MEASURED[-1]}{name}"))


def as_predicted(outcome: Outcome, name: str, world: int, moves: bool) -> None:
    """What each rank held is what its schedule predicted, to the byte, in its own report and in the run's."""
    reports = outcome.reports(name)
    assert len(reports) == world
    for report in reports:
        assert report["peak_microbatches"] == report["predicted_microbatches"], f"rank {report['rank']}"
        assert report["peak_bytes"] == report["predicted_bytes"] > 0, f"rank {report['rank']}"
    run = report_of(outcome.report_folder(name)).comparison
    assert [stage.measured_bytes for stage in run.stages] == [stage.predicted_bytes for stage in run.stages]
    assert any(report["evictions"] for report in reports) is moves, (
        "what was to be moved was not, or the other way round"
    )


@pytest.fixture(scope="module")
def eight_ranks(run_placed: Placed, request: pytest.FixtureRequest) -> Outcome:
    wanted = asked_for(request, "name")
    common = (
        *ALIKE,
        "--num-layers",
        "16",
        "--pipeline-model-parallel-size",
        "8",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "16",
    )
    cases = [measured(name, (*common, *flags)) for name, flags in EIGHT_RANKS.items() if (name,) in wanted]
    return run_placed([Case("stock", common), *cases], 1500, world=8)


@pytest.mark.slow
@pytest.mark.timeout(1560)
@pytest.mark.parametrize("name", EIGHT_RANKS)
def test_eight_stages_train_as_stock_does(eight_ranks: Outcome, name: str) -> None:
    alike(eight_ranks, "stock", name, world=8)
    as_predicted(eight_ranks, name, 8, moves=name.endswith("balanced"))


@pytest.fixture(scope="module")
def named(run_placed: Placed, request: pytest.FixtureRequest) -> Outcome:
    common = (*ALIKE, *FOUR, *EIGHT)
    cases = [
        measured(name, (*common, *ours)) for name, ours in FAMILIES.items() if (name,) in asked_for(request, "name")
    ]
    return run_placed([Case("stock", common), *cases], 900)


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_v_by_name_or_from_elsewhere_trains_as_stock_does(named: Outcome, name: str) -> None:
    alike(named, "stock", name)
    # A uniform V leaves nothing to balance.
    as_predicted(named, name, 4, moves=name.startswith("eager"))


# The same numbers for one micro-batch of one stage, whoever computes it, and when.
SEEDED = ("--seeded", "--attention-dropout", "0.1", "--hidden-dropout", "0.1")


@pytest.fixture(scope="module")
def seeded(run_placed: Placed) -> Outcome:
    common = (*ALIKE, *FOUR, *EIGHT)
    cases = [Case(name, (*common, *SEEDED, *flags)) for name, flags in DRAWN.items()]
    return run_placed([Case("stock", (*common, *CHUNKS, *SEEDED)), Case("quiet", common), *cases], 400)


DRAWN = {
    **{name: FAMILIES[name] for name in ("zb-v", "v-half")},
    "grouped_balanced": ("--bpipe-schedule", "grouped-interleaved", *CHUNKS, *PEER),
}


@pytest.mark.slow
@pytest.mark.timeout(460)
@pytest.mark.parametrize("name", DRAWN)
def test_dropout_drawn_by_stage_is_stocks_interleaved_one(seeded: Outcome, name: str) -> None:
    """Of chunks as large: beside the order in which ranks draw, nothing about a V has to do with dropout."""
    alike(seeded, "stock", name)
    assert weights(seeded, "stock", 4) != weights(seeded, "quiet", 4), "nothing was dropped"


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_batch_that_grows_in_a_v(run_placed: Placed) -> None:
    """By name: a file has one number of micro-batches."""
    *alike_but_for_the_batch, _, _ = ALIKE
    common = (*alike_but_for_the_batch, *FOUR, *GROWS)
    outcome = run_placed([Case("grows", common), measured("grows_v-half", (*common, *FAMILIES["v-half"]))], 300)
    alike(outcome, "grows", "grows_v-half")
    assert set(re.findall(r"global batch size: +(\d+)", outcome.logs[3])) == {"8", "16"}


@pytest.fixture(scope="module")
def deferred(run_placed: Placed) -> Outcome:
    common = (*ALIKE, *FOUR, *EIGHT, *DEFERRED)
    cases = [Case("deferred", common), *(Case(name, (*common, *FAMILIES[name])) for name in ("v-half", "zb-v"))]
    return run_placed(cases, 600, worker="named_fused_worker.py")


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", ["v-half", "zb-v"])
def test_the_output_layers_deferred_gradients_in_a_v(deferred: Outcome, name: str) -> None:
    """Put off to the end of an iteration and added up inside their product, on the rank that has the embedding, too."""
    alike(deferred, "deferred", name)
