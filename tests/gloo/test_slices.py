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
from bpipe.build import BalanceConfig, ScheduleConfig, build, orders_of
from bpipe.ir.host_buffers import host_memory_buffers
from bpipe.ir.memory import StageMemory, peak_of_order
from bpipe.models.activations import memory_of_setup
from bpipe.plan.budget import Devices, smallest_bytes, within
from bpipe.plan.fit import budget_text
from bpipe.plan.options import setup_from
from bpipe.plan.remedies import predicted_devices
from bpipe.record.read import read_run
from bpipe.transport.layout import ALIGNMENT_BYTES
from megatron.scheduling.cpu import ARGUMENTS
from tests.gloo.conftest import BPIPE, TINY, Case, Outcome, asked_for
from tests.gloo.test_training import same

pytestmark = pytest.mark.timeout(1500)

# Of losses, and of gradient norms, over 5 iterations in 32 bits.
LOSS, NORM = 1e-6, 2e-5

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
LLAMA = (
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--group-query-attention"),
    *("--num-query-groups", "2", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
)
CORE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
BATCH = ("--global-batch-size", "16", "--train-iters", "5", *NO_DROPOUT)
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "16", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--kv-channels", "16", "--rope-type", "rope"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--spec", "tests.gloo.layers", "attending_to_latents"),
)
FURTHER = ("--mtp-num-layers", "2")
V2 = ("--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2")
TWO = ("--num-layers", "4", "--pipeline-model-parallel-size", "2")
SLICES = ("--bpipe-slices", "4")
UNEVEN = ("--bpipe-slice-lengths", "24,18,12,10")

# One row a feature, on 4 ranks: what stock Megatron trains, and then with slices.
MORE = {
    "listed": UNEVEN,
    "equal_work": ("--bpipe-slice-lengths", "work", *BPIPE),
    "further_tokens": BPIPE,
    "shards": ("--bpipe-vocabulary", "1"),
    "tied_shards": ("--bpipe-vocabulary", "2", *UNEVEN, *BPIPE),
    "shards_of_tensor_parallel_ranks": ("--bpipe-vocabulary", "2"),
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
    "latents": (*BATCH, *LATENT),
    "latents_computed_again": (
        *(*BATCH, *LATENT, "--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj", "core_attn"),
    ),
    "further_tokens": (*BATCH, *LLAMA, *CORE, *FURTHER),
    "further_tokens_in_a_v": (*BATCH, *LLAMA, *V2, *FURTHER, "--bpipe-schedule", "v-half"),
    "further_tokens_of_tensor_parallel_ranks": (
        *(*BATCH, *LLAMA, *TWO, *FURTHER, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "latents_of_tensor_parallel_ranks": (
        *(*BATCH, *LATENT, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "further_tokens_by_token": (*BATCH, *LLAMA, *FULL, *FURTHER, "--calculate-per-token-loss"),
    "experts": (
        *(*BATCH, "--num-layers", "8", "--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01"),
        *("--moe-z-loss-coeff", "0.001", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
    ),
    "shards": (*BATCH, *LLAMA, "--eval-iters", "2", "--eval-interval", "2"),
    "tied_shards": BATCH,
    "shards_of_tensor_parallel_ranks": (
        *(*BATCH, *LLAMA, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "--calculate-per-token-loss",
    ),
    "replicas": (*BATCH, *LLAMA, *TWO, "--use-distributed-optimizer", "--overlap-grad-reduce"),
    "tensor_parallel": (*BATCH, *LLAMA, *TWO, "--tensor-model-parallel-size", "2"),
    "sequence_parallel": (*BATCH, *LLAMA, *TWO, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
}

# Other rows show these in part; run by --slow, for all rows of a file are started by one worker.
LONG_TAIL = {
    *("windows", "core_recomputed", "per_token", "listed", "latents_computed_again", "further_tokens_in_a_v"),
    *("further_tokens_of_tensor_parallel_ranks", "latents_of_tensor_parallel_ranks", "further_tokens_by_token"),
    *("tied_shards", "shards_of_tensor_parallel_ranks", "tensor_parallel"),
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG_TAIL else name for name in ROWS]
)
def test_slices_train_what_stock_megatron_trains(rows: Outcome, name: str) -> None:
    close(rows, name, f"{name}_sliced")


@pytest.fixture(scope="module")
def sixteen_bits(run_cases: Callable[..., Outcome]) -> Outcome:
    narrow = ("--bf16", "--no-masked-softmax-fusion")
    cases = {"wide": (), "whole": narrow, "sliced": (*narrow, *SLICES, *BPIPE)}
    return run_cases(4, [Case(name, (*BATCH, *LLAMA, *more)) for name, more in cases.items()], 400)


def test_sixteen_bits_of_slices_are_as_near_to_thirty_two_as_the_wholes(sixteen_bits: Outcome) -> None:
    wide = [one["lm loss"] for one in _losses(sixteen_bits, "wide")]
    off = {}
    for name in ("whole", "sliced"):
        losses = [one["lm loss"] for one in _losses(sixteen_bits, name)]
        off[name] = max(abs(found - exact) / exact for found, exact in zip(losses, wide, strict=True))
    assert 0 < off["sliced"] <= 2 * off["whole"], off


@pytest.mark.parametrize("name", ["evaluated", "shards"])
def test_evaluation_in_slices_finds_the_same_loss(rows: Outcome, name: str) -> None:
    for rank in range(4):
        stock, sliced = (rows.record(each, rank)["evaluations"] for each in (name, f"{name}_sliced"))
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
    "shards": {
        "1f1b": (*SLICES, "--bpipe-vocabulary", "2"),
        "balanced": (*SLICES, "--bpipe-vocabulary", "2", *BPIPE),
        "split_balanced": (*SLICES, "--bpipe-vocabulary", "2", "--bpipe-schedule", "1f1b-split", *BPIPE),
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


# With attention computed again all slices save as much, and none keeps scores; else later ones save more.
PEAKS: dict[str, Sequence[str]] = {
    "whole": (*CORE, "--bpipe-executor"),
    "2": (*CORE, "--bpipe-slices", "2"),
    "4": (*CORE, *SLICES),
    "4_balanced": (*CORE, *SLICES, *BPIPE),
    "4_split": (*CORE, *SLICES, "--bpipe-schedule", "zb-h1"),
    "4_host": (*CORE, *SLICES, *BPIPE, "--bpipe-hosts", "host", "--bpipe-bound", "3"),
    "4_chunks": (*CORE, *SLICES, *V2, *BPIPE),
    "4_further": (*CORE, *SLICES, *FURTHER, *BPIPE),
    "4_shards": (*CORE, *SLICES, "--bpipe-vocabulary", "1", *BPIPE),
    "4_uneven": (*CORE, *SLICES, *UNEVEN),
    "4_uneven_balanced": (*CORE, *SLICES, *UNEVEN, *BPIPE),
    "4_scores": SLICES,
    "4_scores_balanced": (*SLICES, *BPIPE),
}
# 64 tokens of 2 sequences in 2 groups of 16 channels, keys and values of one layer, in 4 bytes.
KEYS_BYTES = 64 * 2 * 2 * 16 * 2 * 4


@pytest.fixture(scope="module")
def peaks(run_cases: Callable[..., Outcome]) -> Outcome:
    report = ("--bpipe-report", "{folder}/CASE", "--bpipe-min-bytes", "1")
    cases = []
    for name, more in PEAKS.items():
        cases.append(Case(name, (*BATCH, *LLAMA, *more, *(word.replace("CASE", name) for word in report))))
    return run_cases(4, cases, 900)


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_what_the_schedule_says_in_bytes(peaks: Outcome, name: str) -> None:
    """Micro-batches, bytes of activations, and bytes of kept keys with their gradients.

    Once the last was an over-estimate by up to a third where slices differ: each was taken for the largest.
    """
    for report in peaks.reports(name):
        rank = report["rank"]
        assert report["num_microbatches"] == 8
        assert report["peak_microbatches"] == report["predicted_microbatches"], f"rank {rank}"
        assert report["peak_bytes"] == report["predicted_bytes"], f"rank {rank}"
        if name == "whole":
            assert "keys_bytes" not in report
            continue
        assert report["keys_bytes"] == report["predicted_keys_bytes"], f"rank {rank}"
        # Slices of 2 or 3 micro-batches are under way at once, with 4 slices, and of up to 4 with 2; and of one there
        # are gradients. The last rank has three layers where it predicts further tokens.
        layers = 3 if name == "4_further" and rank == 3 else 1
        under_way, left = divmod(report["keys_bytes"], layers * KEYS_BYTES)
        assert left == 0
        assert 3 <= under_way <= (5 if name == "2" else 6 if name == "4_chunks" else 4)


def test_host_memory_takes_what_the_schedule_says_in_bytes(peaks: Outcome) -> None:
    """So many host buffers as slices are away at once, each of what leaves with one: every storage of it takes whole
    ALIGNMENT_BYTES."""
    schedule = build(ScheduleConfig("1f1b", 4, 8, balance=BalanceConfig((3,), hosts="host"), slices=4))
    ranks = read_run(peaks.report_folder("4_host")).ranks
    assert [rank.place for rank in ranks] == [0, 1, 2, 3]
    for rank, report in zip(ranks, peaks.reports("4_host"), strict=True):
        buffers = len(set(host_memory_buffers(schedule, rank.place).values()))
        assert report["own_buffers"] == buffers > 1
        (moved_bytes,) = rank.iterations[max(rank.iterations)].moved_bytes.values()
        each, left = divmod(report["own_bytes"], buffers)
        assert left == each % ALIGNMENT_BYTES == 0
        assert moved_bytes <= each < 1.02 * moved_bytes


def test_slices_hold_as_little_as_is_promised(peaks: Outcome) -> None:
    """(p + k - 1) / k micro-batches on the first rank, and balanced still less."""
    counts = {"whole": 4, "2": 5, "4": 7, "4_balanced": 6, "4_split": 7, "4_host": 3}
    first = {name: peaks.reports(name)[0] for name in counts}
    assert {name: report["peak_microbatches"] for name, report in first.items()} == counts
    assert first["4"]["peak_bytes"] < first["2"]["peak_bytes"] < first["whole"]["peak_bytes"]
    assert first["4_host"]["peak_bytes"] < first["4_balanced"]["peak_bytes"] < first["4"]["peak_bytes"]


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
    wanted = (*LLAMA, "--num-layers", "2", *SLICES, *FURTHER, "--mtp-use-repeated-layer")
    done = run_cases(2, [Case("further", wanted)], 120)
    assert 0 not in done.codes
    said = "a layer keeps the keys of one pass, and this one runs once for each further token; drop --mtp-use-repeated"
    assert f"--bpipe-slices 4: {said}" in "".join(done.logs)


@pytest.fixture(scope="module")
def of_upstream(run_cases: Callable[..., Outcome]) -> Outcome:
    """By a script that gives Megatron what Megatron-LM's own does, and has never heard of slices."""
    common = (*BATCH, "--num-layers", "4", "--script", "upstream_script.py")
    return run_cases(
        4, [Case("stock", common), Case("sliced", (*common, *SLICES, *BPIPE))], 300, worker="named_worker.py"
    )


def test_a_script_that_never_heard_of_slices_trains_in_them(of_upstream: Outcome) -> None:
    close(of_upstream, "stock", "sliced")


# Eight layers, whose weights are drawn by name. No gradient is scaled: that would be by a norm, whose sum over ranks
# is rounded otherwise than one rank's.
ALIKE = (*BATCH, *LLAMA, "--num-layers", "8", "--clip-grad", "1000")
ON_ONE_RANK: dict[str, tuple[str, ...]] = {
    "whole": (),
    "even": SLICES,
    "uneven": (*SLICES, *UNEVEN),
}
ON_SEVERAL: dict[str, tuple[str, tuple[str, ...]]] = {
    "even": ("even", SLICES),
    "even_balanced": ("even", (*SLICES, *BPIPE)),
    "even_split_balanced": ("even", (*SLICES, "--bpipe-schedule", "1f1b-split", "--bpipe-delay", "1", *BPIPE)),
    "uneven_balanced": ("uneven", (*SLICES, *UNEVEN, *BPIPE)),
}


@pytest.fixture(scope="module")
def on_one_rank(run_cases: Callable[..., Outcome]) -> Outcome:
    one = (*ALIKE, "--pipeline-model-parallel-size", "1")
    cases = [Case(name, (*one, *more)) for name, more in ON_ONE_RANK.items()]
    return run_cases(1, cases, 600, worker="named_worker.py")


@pytest.fixture(scope="module")
def on_several(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> dict[int, Outcome]:
    wanted = asked_for(request, "ranks", "name")
    done = {}
    for ranks in sorted({ranks for ranks, _ in wanted}):
        names = [name for name in ON_SEVERAL if (ranks, name) in wanted]
        cases = [Case(name, (*ALIKE, *ON_SEVERAL[name][1])) for name in names]
        done[ranks] = run_cases(ranks, cases, 1200, worker="named_worker.py")
    return done


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_one_rank_trains_slices_as_stock_trains_the_whole(on_one_rank: Outcome, name: str) -> None:
    close(on_one_rank, "whole", name)
    whole, sliced = (on_one_rank.record(each, 0)["weights"] for each in ("whole", name))
    assert whole.keys() == sliced.keys()
    assert whole != sliced, "nothing was cut: sums in slices are rounded otherwise"


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ON_SEVERAL)
def test_several_ranks_agree_with_one_in_every_bit(
    on_one_rank: Outcome, on_several: dict[int, Outcome], ranks: int, name: str
) -> None:
    """Losses of 5 iterations, and every weight behind them."""
    alone, done = ON_SEVERAL[name][0], on_several[ranks]
    expected = on_one_rank.record(alone, 0)
    weights: dict[str, str] = {}
    for rank in range(ranks):
        weights |= done.record(name, rank)["weights"]
    assert weights == expected["weights"]
    losses, alone_losses = (
        [row["lm loss"] for row in rows]
        for rows in (done.record(name, ranks - 1)["iterations"], expected["iterations"])
    )
    assert losses == alone_losses
    assert len(set(losses)) == 5


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
