"""Training in slices of sequences: losses of stock Megatron's to rounding, and the same bits whatever the schedule and
the balancing.

Weights are not compared with stock's: Adam makes a step of a rounding error where a gradient is nothing else. Dropout
is off: a slice draws its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bpipe.balance.pairs import allocated_bytes
from bpipe.build import orders_of
from bpipe.ir.memory import StageMemory, peak_of_order
from bpipe.models.memory import memory_of_setup
from bpipe.plan.budget import Devices, predicted_devices, smallest_bytes, within
from bpipe.plan.fit import budget_text
from bpipe.plan.options import setup_from
from megatron.scheduling.cpu import ARGUMENTS
from tests.gloo.conftest import BPIPE, TINY, Case, Outcome, asked_for
from tests.gloo.test_training import same

pytestmark = pytest.mark.timeout(1500)

# Of losses, and of gradient norms, over 3 iterations in 32 bits.
LOSS, NORM = 1e-6, 2e-5

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--group-query-attention"),
    *("--num-query-groups", "2", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
)
CORE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BATCH = ("--global-batch-size", "16", *NO_DROPOUT)
V2 = ("--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2")
TWO = ("--num-layers", "4", "--pipeline-model-parallel-size", "2")
SLICES = ("--bpipe-slices", "4")

# One row a feature, on 4 ranks: what stock Megatron trains, and then with slices.
MORE = {
    "listed": ("--bpipe-slice-lengths", "24,18,12,10"),
    "equal_work": ("--bpipe-slice-lengths", "work", *BPIPE),
}
ROWS: dict[str, tuple[str, ...]] = {
    "gpt": BATCH,
    "llama": (*BATCH, *LLAMA),
    "windows": (*BATCH, *LLAMA, "--window-size", "15,0"),
    "core_recomputed": (*BATCH, *CORE),
    "fully_recomputed": (*BATCH, *LLAMA, *FULL),
    "per_token": (*BATCH, *LLAMA, "--calculate-per-token-loss"),
    "evaluated": (*BATCH, *LLAMA, *CORE, "--eval-iters", "2", "--eval-interval", "2"),
    "interleaved": (*BATCH, *LLAMA, *V2),
    # Compared with whole micro-batches by the same schedule, whose stages are elsewhere than stock's.
    "v_half": (*BATCH, *LLAMA, *V2, "--bpipe-schedule", "v-half"),
    "listed": (*BATCH, *LLAMA),
    "equal_work": (*BATCH, *LLAMA, *CORE, "--seq-length", "256", "--max-position-embeddings", "256"),
    "uneven": (*BATCH, *LLAMA, "--seq-length", "63"),
    "experts": (
        *(*BATCH, "--num-layers", "8", "--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01"),
        *("--moe-z-loss-coeff", "0.001", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
    ),
    "replicas": (*BATCH, *LLAMA, *TWO, "--use-distributed-optimizer", "--overlap-grad-reduce"),
    "tensor_parallel": (*BATCH, *LLAMA, *TWO, "--tensor-model-parallel-size", "2"),
    "sequence_parallel": (*BATCH, *LLAMA, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
}


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> Outcome:
    wanted = {name for (name,) in asked_for(request, "name")} or set(ROWS)
    cases = []
    for name in (name for name in ROWS if name in wanted):
        cases += [Case(name, ROWS[name]), Case(f"{name}_sliced", (*ROWS[name], *SLICES, *MORE.get(name, ())))]
    return run_cases(4, cases, 1200)


def _losses(outcome: Outcome, case: str) -> list[dict[str, float]]:
    """What the rank that knows said of each iteration."""
    ranks = range(len(outcome.codes))
    said = [outcome.record(case, rank)["iterations"] for rank in ranks]
    known = next(one for one in said if "lm loss" in one[0])
    return [{name: float.fromhex(value) for name, value in row.items() if isinstance(value, str)} for row in known]


def close(outcome: Outcome, stock: str, sliced: str, loss: float = LOSS, norm: float = NORM) -> None:
    """Losses and gradient norms of every iteration are equal to rounding."""
    pairs = list(zip(_losses(outcome, stock), _losses(outcome, sliced), strict=True))
    assert pairs
    for place, (expected, found) in enumerate(pairs):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            allowed = norm if name == "grad_norm" else loss
            assert abs(value - expected[name]) <= allowed * abs(expected[name]), (
                f"iteration {place}: {name} {value} for {expected[name]}"
            )


@pytest.mark.parametrize("name", ROWS)
def test_slices_train_what_stock_megatron_trains(rows: Outcome, name: str) -> None:
    close(rows, name, f"{name}_sliced")


def test_evaluation_in_slices_finds_the_same_loss(rows: Outcome) -> None:
    for rank in range(4):
        stock, sliced = (rows.record(name, rank)["evaluations"] for name in ("evaluated", "evaluated_sliced"))
        assert len(stock) == len(sliced)
        for one, other in zip(stock, sliced, strict=True):
            assert one.keys() == other.keys()
            for name, value in one.items():
                assert abs(float.fromhex(other[name]) - float.fromhex(value)) <= LOSS * abs(float.fromhex(value))


# Groups of cases that must agree in every bit: the first is what the others are compared with.
SAME: dict[str, dict[str, Sequence[str]]] = {
    "one_stage": {
        "1f1b": SLICES,
        "all_forwards_first": (*SLICES, "--bpipe-schedule", "gpipe"),
        "split": (*SLICES, "--bpipe-schedule", "zb-h1"),
        "balanced": (*SLICES, *BPIPE),
        "split_balanced": (*SLICES, "--bpipe-schedule", "1f1b-split", "--bpipe-delay", "1", *BPIPE),
        "recomputed": (*SLICES, *FULL),
        "recomputed_balanced": (*SLICES, *CORE, *BPIPE),
        "host": (*SLICES, *CORE, *BPIPE, "--bpipe-hosts", "host", "--bpipe-bound", "3"),
    },
    "chunks": {
        "interleaved": (*SLICES, *V2),
        "interleaved_balanced": (*SLICES, *V2, *BPIPE),
        "grouped": (*SLICES, *V2, "--bpipe-schedule", "grouped-interleaved"),
        "grouped_balanced": (*SLICES, *V2, "--bpipe-schedule", "grouped-interleaved", *BPIPE),
    },
}


@pytest.fixture(scope="module")
def alike(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> dict[str, Outcome]:
    wanted = {group for (group, _) in asked_for(request, "group", "name")} or set(SAME)
    return {
        group: run_cases(4, [Case(name, (*BATCH, *LLAMA, *more)) for name, more in SAME[group].items()], 900)
        for group in SAME
        if group in wanted
    }


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, cases in SAME.items() for name in list(cases)[1:]]
)
def test_schedules_and_balancing_of_slices_agree_in_every_bit(alike: dict[str, Outcome], group: str, name: str) -> None:
    same(alike[group], next(iter(SAME[group])), name, 4)
    said = alike[group].logs[0].partition(f"=== {name}\n")[2].partition("\n===")[0]
    assert (" evicting 0 -> " in said) is ("balanced" in name or name == "host")
    assert "little memory is freed" not in said


# With attention computed again all slices save as much, and none keeps scores.
PEAKS: dict[str, Sequence[str]] = {
    "peaks_whole": ("--bpipe-executor",),
    "peaks_2": ("--bpipe-slices", "2"),
    "peaks_4": SLICES,
    "peaks_4_balanced": (*SLICES, *BPIPE),
    "peaks_4_split": (*SLICES, "--bpipe-schedule", "zb-h1"),
}
# 64 tokens of 2 sequences in 2 groups of 16 channels, keys and values, in 4 bytes.
KEYS_BYTES = 64 * 2 * 2 * 16 * 2 * 4


@pytest.fixture(scope="module")
def peaks(run_cases: Callable[..., Outcome]) -> Outcome:
    report = ("--bpipe-report", "{folder}/CASE", "--bpipe-min-bytes", "1")
    cases = []
    for name, more in PEAKS.items():
        cases.append(Case(name, (*BATCH, *LLAMA, *CORE, *more, *(word.replace("CASE", name) for word in report))))
    return run_cases(4, cases, 900)


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_what_the_schedule_says(peaks: Outcome, name: str) -> None:
    """Micro-batches, bytes of activations, and bytes of kept keys with their gradients."""
    slices = 1 if name == "peaks_whole" else int(name.split("_")[1])
    for rank, report in enumerate(peaks.reports(name)):
        assert report["num_microbatches"] == 8
        assert report["peak_microbatches"] == report["predicted_microbatches"], f"rank {rank}"
        assert abs(report["peak_bytes"] - report["predicted_bytes"]) <= 0.02 * report["predicted_bytes"], f"rank {rank}"
        if slices == 1:
            assert "keys_bytes" not in report
            continue
        assert report["keys_bytes"] == report["predicted_keys_bytes"]
        # Slices of 2 or 3 micro-batches are under way at once, with 4 slices, and of up to 4 with 2; and of one there
        # are gradients.
        under_way, left = divmod(report["keys_bytes"], KEYS_BYTES)
        assert left == 0
        assert 3 <= under_way <= (5 if slices == 2 else 4)


def test_slices_hold_as_little_as_is_promised(peaks: Outcome) -> None:
    """(p + k - 1) / k micro-batches on the first rank, and balanced still less."""
    first = {name: peaks.reports(name)[0] for name in PEAKS}
    counts = {name: report["peak_microbatches"] for name, report in first.items()}
    assert counts == {"peaks_whole": 4, "peaks_2": 5, "peaks_4": 7, "peaks_4_balanced": 6, "peaks_4_split": 7}
    assert first["peaks_4"]["peak_bytes"] < first["peaks_2"]["peak_bytes"] < first["peaks_whole"]["peak_bytes"]
    assert first["peaks_4_balanced"]["peak_bytes"] < first["peaks_4"]["peak_bytes"]


# What is saved depends on: groups of heads, attention computed again, uneven slices, halves, chunks, precision, and how
# many ranks divide a layer.
BYTES: dict[str, Sequence[str]] = {
    "bytes_gpt": (*BATCH, *SLICES),
    "bytes_llama": (*BATCH, *LLAMA, *SLICES),
    "bytes_full": (*BATCH, *LLAMA, *FULL, *SLICES),
    "bytes_listed": (*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-slice-lengths", "24,18,12,10"),
    "bytes_work": (*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-slice-lengths", "work"),
    "bytes_split": (*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-schedule", "zb-h1"),
    "bytes_grouped": (*BATCH, *LLAMA, *V2, *CORE, *SLICES, "--bpipe-schedule", "grouped-interleaved"),
    "bytes_16": (*BATCH, *LLAMA, *CORE, *SLICES, "--bf16", "--no-masked-softmax-fusion"),
    "bytes_divided": (*BATCH, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel", *SLICES),
}


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> Outcome:
    wanted = {name for (name,) in asked_for(request, "name")} or set(BYTES)
    cases = []
    for name in (name for name in BYTES if name in wanted):
        cases.append(Case(name, (*BYTES[name], "--bpipe-report", f"{{folder}}/{name}", "--bpipe-min-bytes", "1")))
    return run_cases(4, cases, 900)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_as_predicted(held: Outcome, name: str) -> None:
    """By `bpipe simulate`, before anything was measured: activations, and kept keys with their gradients."""
    stages = ("--num-layers", "4", "--pipeline-model-parallel-size", "4")
    setup = setup_from([*ARGUMENTS, *TINY, *stages, *BYTES[name]], "h100-80g:1x4", 128, "cpu")
    memory, orders = memory_of_setup(setup), list(orders_of(setup.program()))
    nothing = tuple(StageMemory(0, 0, 0) for _ in memory.stages)
    # The first of the ranks that divide a stage: others save no masks of tokens that are theirs.
    reports = {report["stage"]: report for report in reversed(held.reports(name))}
    assert len(reports) == setup.pipeline
    for rank, order in enumerate(orders):
        assert reports[rank]["peak_bytes"] == peak_of_order(order, replace(memory, kept=())), f"rank {rank}"
        assert reports[rank]["keys_bytes"] == peak_of_order(order, replace(memory, stages=nothing)), f"rank {rank}"


def _resumed(*more: str) -> tuple[str, ...]:
    return (*BATCH, *LLAMA, "--lr-decay-iters", "4", "--override-opt-param-scheduler", *more)


RESUMED = {
    "straight": _resumed("--train-iters", "4"),
    "whole_first": _resumed("--train-iters", "2", "--save", "{folder}/whole", "--save-interval", "2"),
    "sliced_then": _resumed("--train-iters", "4", "--load", "{folder}/whole", *SLICES),
    "sliced_first": _resumed(
        "--train-iters", "2", "--save", "{folder}/sliced", "--save-interval", "2", *SLICES, *BPIPE
    ),
    "whole_then": _resumed("--train-iters", "4", "--load", "{folder}/sliced"),
}


@pytest.fixture(scope="module")
def resumed(run_cases: Callable[..., Outcome]) -> Outcome:
    return run_cases(4, [Case(name, arguments) for name, arguments in RESUMED.items()], 600)


@pytest.mark.parametrize("name", ["sliced_then", "whole_then"])
def test_slices_are_switched_on_and_off_between_saving_and_resuming(resumed: Outcome, name: str) -> None:
    straight, then = _losses(resumed, "straight")[2:], _losses(resumed, name)
    assert len(straight) == len(then) == 2
    for expected, found in zip(straight, then, strict=True):
        assert abs(found["lm loss"] - expected["lm loss"]) <= 5e-6 * expected["lm loss"]


def test_what_cannot_be_cut_ends_the_run_with_its_reasons(run_cases: Callable[..., Outcome]) -> None:
    done = run_cases(2, [Case("further", (*LLAMA, "--num-layers", "2", *SLICES, "--mtp-num-layers", "1"))], 120)
    assert 0 not in done.codes
    assert "--bpipe-slices 4: further tokens are behind a slice's end; drop --mtp-num-layers" in "".join(done.logs)


@pytest.fixture(scope="module")
def of_upstream(run_cases: Callable[..., Outcome]) -> Outcome:
    """By a script that gives Megatron what Megatron-LM's own does, and has never heard of slices."""
    common = (*BATCH, "--num-layers", "4", "--script", "upstream_script.py")
    return run_cases(
        4, [Case("stock", common), Case("sliced", (*common, *SLICES, *BPIPE))], 300, worker="named_worker.py"
    )


def test_a_script_that_never_heard_of_slices_trains_in_them(of_upstream: Outcome) -> None:
    close(of_upstream, "stock", "sliced")


@pytest.fixture(scope="module")
def eight(run_cases: Callable[..., Outcome]) -> Outcome:
    cases = {
        "stock": (),
        "sliced": SLICES,
        "balanced": (*SLICES, *BPIPE),
        "all_forwards_first": (*SLICES, "--bpipe-schedule", "gpipe"),
    }
    return run_cases(8, [Case(name, (*BATCH, *LLAMA, *more)) for name, more in cases.items()], 900)


@pytest.mark.slow
def test_eight_stages_train_slices_as_stock_trains_the_whole(eight: Outcome) -> None:
    close(eight, "stock", "sliced")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", "all_forwards_first"])
def test_eight_stages_agree_in_every_bit(eight: Outcome, name: str) -> None:
    same(eight, "sliced", name, 8)


# Within a budget in bytes: planned by prediction, or learned from the first iteration.
WITHIN: dict[str, Sequence[str]] = {
    "even": (*BATCH, *LLAMA, *CORE, *SLICES),
    # Host buffers of a pair have a reserve and the size of the largest slice: on 4 ranks nothing is gained by that.
    "listed": (
        *(*BATCH, *LLAMA, *CORE, *SLICES, "--bpipe-slice-lengths", "24,18,12,10"),
        *("--bpipe-hosts", "host"),
    ),
    "scores": (*BATCH, *SLICES),
    "chunks": (*BATCH, *LLAMA, *V2, *CORE, *SLICES, "--bpipe-schedule", "grouped-interleaved"),
}


def _devices(name: str, learns: bool) -> Devices:
    """What the trainer predicts, with budgets that nothing exceeds; or, but for rounding, what a CPU then measures,
    where nobody counts what comes and goes."""
    stages = ("--num-layers", "4", "--pipeline-model-parallel-size", "4")
    words = [*ARGUMENTS, *TINY, *stages, *WITHIN[name], "--bpipe-min-bytes", "1024", "--bpipe"]
    devices = predicted_devices(setup_from(words, "h100-80g:1x4", 128, "cpu"), [2**40], 1024)
    if not learns:
        return devices
    besides = replace(devices.besides, working_bytes=(0,) * 4, update_bytes=(0,) * 4)
    return replace(devices, besides=besides, moving=None)


def _budget(name: str, learns: bool) -> str:
    """In GiB: a third of the way from the smallest to what nothing has to leave for."""
    devices = _devices(name, learns)
    least, most = smallest_bytes(devices), max(devices.need_bytes(devices.schedule))
    return budget_text([least + (most - least) // 3])


@pytest.fixture(scope="module")
def budgeted(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> dict[str, Outcome]:
    found = {}
    for name in {name for (name, *_) in asked_for(request, "name", "learns")} or set(WITHIN):
        report, hosts = (
            ("--bpipe-report", "{folder}/CASE"),
            WITHIN[name].index("--bpipe-hosts") if name == "listed" else None,
        )
        plain = [*WITHIN[name][:hosts], *(word.replace("CASE", "plain") for word in report)]
        cases = [Case("plain", plain)]
        for case, asked in (("planned", _budget(name, False)), ("learned", f"auto:{_budget(name, True)}")):
            words = [*WITHIN[name], *BPIPE, "--bpipe-memory", asked, *(word.replace("CASE", case) for word in report)]
            cases.append(Case(case, words))
        found[name] = run_cases(4, cases, 600)
    return found


@pytest.mark.parametrize("learns", [False, True], ids=["planned", "learned"])
@pytest.mark.parametrize("name", WITHIN)
def test_slices_keep_a_budget_in_bytes_and_every_bit(budgeted: dict[str, Outcome], name: str, learns: bool) -> None:
    outcome, case = budgeted[name], "learned" if learns else "planned"
    same(outcome, "plain", case, 4)
    budget = round(float(_budget(name, learns)) * 2**30)
    devices = replace(_devices(name, learns), budget_bytes=(budget,) * 4)
    room = devices.activation_budget().room_bytes
    plain, held = outcome.reports("plain"), outcome.reports(case)
    assert any(own["peak_bytes"] + own["keys_bytes"] > room[rank] for rank, own in enumerate(plain))
    assert sum(report["evictions"] for report in held) > 0
    # What was measured by the rule, of what runs from the second iteration on: all of it, keys included, has room.
    fitted = within(devices)
    memory = replace(fitted.memory, kept=())
    for rank, report in enumerate(held):
        assert sum(allocated_bytes(fitted.schedule, rank, fitted.memory)) <= room[rank]
        assert report["keys_bytes"] == plain[rank]["keys_bytes"], "these stay"
        assert report["peak_bytes"] <= room[rank]
        planned = sum(allocated_bytes(fitted.schedule, rank, memory))
        if not learns:
            # Buffers of slices that differ are as large as those that left.
            assert report["peak_bytes"] == planned or (memory.reserved and report["peak_bytes"] < planned)
