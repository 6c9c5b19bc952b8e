"""Training in slices of sequences has stock Megatron's losses to rounding, and the same bits with any schedule.

Weights are not compared with stock's, because Adam makes a full step of a gradient that is only a rounding error.
Dropout is off: each slice draws its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gloo.compare import same
from tests.gloo.conftest import Case, Outcome, asked_for
from tests.gloo.flags import BPIPE, EVALUATED, FULL, LLAMA, QUIET, SEQUENCE, TENSOR

pytestmark = pytest.mark.timeout(1500)

# Relative tolerances of losses and of gradient norms over 3 iterations in 32 bits.
LOSS, NORM = 1e-6, 2e-5

CORE = "--recompute-granularity selective --recompute-modules core_attn"
# Slices of 4 micro-batches fill the pipeline and leave a steady phase.
BATCH = f"--global-batch-size 8 {QUIET}"
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --kv-channels 16 --rope-type rope --position-embedding-type rope --normalization RMSNorm "
    "--spec tests.gloo.layers attending_to_latents"
)
FURTHER = "--mtp-num-layers 2"
V2 = "--num-layers 8 --num-virtual-stages-per-pipeline-rank 2"
TWO = "--num-layers 4 --pipeline-model-parallel-size 2"
SLICES = "--bpipe-slices 4"
UNEVEN = "--bpipe-slice-lengths 24,18,12,10"

# One row per feature, on 4 ranks: stock Megatron's flags, and below ours with slices.
MORE = {
    "listed": UNEVEN,
    "equal_work": f"--bpipe-slice-lengths work {BPIPE}",
    "further_tokens": BPIPE,
    "shards": "--bpipe-vocabulary 1",
    "tied_shards": f"--bpipe-vocabulary 2 {UNEVEN} {BPIPE}",
    "shards_of_tensor_parallel_ranks": "--bpipe-vocabulary 2",
}
ROWS: dict[str, str] = {
    "gpt": f"{BATCH} {EVALUATED}",
    "llama": f"{BATCH} {LLAMA}",
    "evaluated": f"{BATCH} {LLAMA} {CORE} {EVALUATED}",
    "interleaved": f"{BATCH} {LLAMA} {V2}",
    # Compared with whole micro-batches under the same schedule, whose stages are placed differently from stock's.
    "v_half": f"{BATCH} {LLAMA} {V2} --bpipe-schedule v-half",
    "listed": f"{BATCH} {LLAMA}",
    "equal_work": f"{BATCH} {LLAMA} {CORE} --seq-length 256 --max-position-embeddings 256",
    "uneven": f"{BATCH} {LLAMA} --seq-length 63",
    "further_tokens": f"{BATCH} {LLAMA} {CORE} {FURTHER}",
    "further_tokens_in_a_v": f"{BATCH} {LLAMA} {V2} {FURTHER} --bpipe-schedule v-half",
    "further_tokens_of_tensor_parallel_ranks": f"{BATCH} {LLAMA} {TWO} {FURTHER} {SEQUENCE}",
    "latents_of_tensor_parallel_ranks": f"{BATCH} {LATENT} {TWO} {SEQUENCE}",
    "shards": f"{BATCH} {LLAMA} {EVALUATED}",
    "tied_shards": BATCH,
    "shards_of_tensor_parallel_ranks": f"{BATCH} {LLAMA} {TWO} {SEQUENCE} --calculate-per-token-loss",
    "replicas": f"{BATCH} {LLAMA} {TWO} --use-distributed-optimizer --overlap-grad-reduce",
    "tensor_parallel": f"{BATCH} {LLAMA} {TWO} {TENSOR}",
    "sequence_parallel": f"{BATCH} {LLAMA} {TWO} {SEQUENCE}",
}

# Only with --slow, because one worker starts all rows of a file. tests/unit/scheduling/check_slices.py compares what a
# layer computes in slices in one process.
LONG_TAIL = set(
    "v_half uneven sequence_parallel "
    "listed replicas interleaved further_tokens_in_a_v tied_shards shards_of_tensor_parallel_ranks tensor_parallel llama "
    "equal_work evaluated further_tokens further_tokens_of_tensor_parallel_ranks latents_of_tensor_parallel_ranks".split()
)


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> Outcome:
    selected = {name for (name,) in asked_for(request, "name")} or set(ROWS)
    cases = []
    for name in (name for name in ROWS if name in selected):
        cases += [Case(name, ROWS[name]), Case(f"{name}_sliced", f"{ROWS[name]} {SLICES} {MORE.get(name, '')}")]
    return run_cases(4, cases, 1200)


def _losses(outcome: Outcome, case: str) -> list[dict[str, float]]:
    """Return what the rank with the losses logged of each iteration."""
    ranks = range(len(outcome.codes))
    iterations = [outcome.record(case, rank)["iterations"] for rank in ranks]
    logged = next(record for record in iterations if "lm loss" in record[0])
    return [{name: float.fromhex(value) for name, value in row.items() if isinstance(value, str)} for row in logged]


def close(outcome: Outcome, stock: str, sliced: str, loss: float = LOSS, norm: float = NORM) -> None:
    """Check that losses and gradient norms of every iteration are equal to rounding."""
    pairs = list(zip(_losses(outcome, stock), _losses(outcome, sliced), strict=True))
    assert pairs
    for place, (expected, actual) in enumerate(pairs):
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
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
    narrow = "--bf16 --no-masked-softmax-fusion"
    cases = {"wide": "", "whole": narrow, "sliced": f"{narrow} {SLICES} {BPIPE}"}
    return run_cases(4, [Case(name, f"{BATCH} {LLAMA} {more}") for name, more in cases.items()], 400)


@pytest.mark.slow
def test_sixteen_bits_of_slices_are_as_near_to_thirty_two_as_the_wholes(sixteen_bits: Outcome) -> None:
    wide = [iteration["lm loss"] for iteration in _losses(sixteen_bits, "wide")]
    off = {}
    for name in ("whole", "sliced"):
        losses = [iteration["lm loss"] for iteration in _losses(sixteen_bits, name)]
        off[name] = max(abs(loss - exact) / exact for loss, exact in zip(losses, wide, strict=True))
    assert 0 < off["sliced"] <= 2 * off["whole"], off


@pytest.mark.parametrize("name", ["gpt", pytest.param("evaluated", marks=pytest.mark.slow), "shards"])
def test_evaluation_in_slices_finds_the_same_loss(rows: Outcome, name: str) -> None:
    for rank in range(4):
        stock, sliced = (rows.record(case, rank)["evaluations"] for case in (name, f"{name}_sliced"))
        assert len(stock) == len(sliced)
        for whole, cut in zip(stock, sliced, strict=True):
            assert whole.keys() == cut.keys()
            for name, value in whole.items():
                assert abs(float.fromhex(cut[name]) - float.fromhex(value)) <= LOSS * abs(float.fromhex(value))


# Groups of cases that must agree in every bit; the first case is the reference of its group.
SAME: dict[str, dict[str, str]] = {
    "one_stage": {
        "1f1b": SLICES,
        "all_forwards_first": f"{SLICES} --bpipe-schedule gpipe",
        "split": f"{SLICES} --bpipe-schedule zb-h1",
        "balanced": f"{SLICES} {BPIPE}",
        "split_balanced": f"{SLICES} --bpipe-schedule 1f1b-split --bpipe-delay 1 {BPIPE}",
        "recomputed": f"{SLICES} {FULL}",
        "recomputed_balanced": f"{SLICES} {CORE} {BPIPE}",
        "host": f"{SLICES} {CORE} {BPIPE} --bpipe-hosts host --bpipe-bound 3",
    },
    "chunks": {
        "interleaved": f"{SLICES} {V2}",
        "interleaved_balanced": f"{SLICES} {V2} {BPIPE}",
        "grouped": f"{SLICES} {V2} --bpipe-schedule grouped-interleaved",
        "grouped_balanced": f"{SLICES} {V2} --bpipe-schedule grouped-interleaved {BPIPE}",
    },
    "shards": {
        "1f1b": f"{SLICES} --bpipe-vocabulary 2",
        "balanced": f"{SLICES} --bpipe-vocabulary 2 {BPIPE}",
        "split_balanced": f"{SLICES} --bpipe-vocabulary 2 --bpipe-schedule 1f1b-split {BPIPE}",
    },
}


@pytest.fixture(scope="module")
def alike(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> dict[str, Outcome]:
    selected = asked_for(request, "group", "name") or {(group, name) for group, cases in SAME.items() for name in cases}
    outcomes = {}
    for group in (group for group in SAME if any(group == needed for needed, _ in selected)):
        first, *others = SAME[group]
        names = [first, *(name for name in others if (group, name) in selected)]
        outcomes[group] = run_cases(4, [Case(name, f"{BATCH} {LLAMA} {SAME[group][name]}") for name in names], 900)
    return outcomes


SAME_ALWAYS = {("one_stage", "balanced"), ("shards", "split_balanced")}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        pytest.param(group, name, marks=() if (group, name) in SAME_ALWAYS else pytest.mark.slow)
        for group, cases in SAME.items()
        for name in list(cases)[1:]
    ],
)
def test_schedules_and_balancing_of_slices_agree_in_every_bit(alike: dict[str, Outcome], group: str, name: str) -> None:
    same(alike[group], next(iter(SAME[group])), name, 4)
    printed = alike[group].said(name)
    assert (" evicting 0 -> " in printed) is ("balanced" in name or name == "host")
    assert "little memory is freed" not in printed


OF_TWO_PARTS = f"{BATCH} {LLAMA} --lr-decay-iters 4 --override-opt-param-scheduler"
RESUMED = {
    "straight": "--train-iters 4",
    "whole_first": "--train-iters 2 --save {folder}/whole --save-interval 2",
    "sliced_then": f"--train-iters 4 --load {{folder}}/whole {SLICES}",
    "sliced_first": f"--train-iters 2 --save {{folder}}/sliced --save-interval 2 {SLICES} {BPIPE}",
    "whole_then": "--train-iters 4 --load {folder}/sliced",
}


@pytest.fixture(scope="module")
def resumed(run_cases: Callable[..., Outcome]) -> Outcome:
    return run_cases(4, [Case(name, f"{OF_TWO_PARTS} {flags}") for name, flags in RESUMED.items()], 600)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliced_then", "whole_then"])
def test_slices_are_switched_on_and_off_between_saving_and_resuming(resumed: Outcome, name: str) -> None:
    straight, then = _losses(resumed, "straight")[2:], _losses(resumed, name)
    assert len(straight) == len(then) == 2
    for expected, actual in zip(straight, then, strict=True):
        assert abs(actual["lm loss"] - expected["lm loss"]) <= 5e-6 * expected["lm loss"]


def test_what_cannot_be_cut_ends_the_run_with_its_reasons(run_cases: Callable[..., Outcome]) -> None:
    flags = f"{LLAMA} --num-layers 2 {SLICES} {FURTHER} --mtp-use-repeated-layer"
    done = run_cases(2, [Case("further", flags)], 120)
    assert 0 not in done.codes
    message = "a layer keeps the keys of one pass, but a repeated layer runs once for each predicted token; drop --mtp-use-repeated"
    assert f"--bpipe-slices 4: {message}" in "".join(done.logs)


@pytest.fixture(scope="module")
def of_upstream(run_cases: Callable[..., Outcome]) -> Outcome:
    """Train by a script that calls Megatron as Megatron-LM's own does, and does not know of slices."""
    common = f"--named {BATCH} --num-layers 4 --script upstream_script.py"
    return run_cases(4, [Case("stock", common), Case("sliced", f"{common} {SLICES} {BPIPE}")], 300)


def test_a_script_that_never_heard_of_slices_trains_in_them(of_upstream: Outcome) -> None:
    close(of_upstream, "stock", "sliced")


# Eight layers with weights drawn by name. Gradients are not clipped, because the norm's sum over ranks is rounded
# differently from one rank's.
ALIKE = f"--named {BATCH} {LLAMA} --train-iters 5 --num-layers 8 --clip-grad 1000"
ON_ONE_RANK: dict[str, str] = {
    "whole": "",
    "even": SLICES,
    "uneven": f"{SLICES} {UNEVEN}",
}
ON_SEVERAL: dict[str, tuple[str, str]] = {
    "even": ("even", SLICES),
    "even_balanced": ("even", f"{SLICES} {BPIPE}"),
    "even_split_balanced": ("even", f"{SLICES} --bpipe-schedule 1f1b-split --bpipe-delay 1 {BPIPE}"),
    "uneven_balanced": ("uneven", f"{SLICES} {UNEVEN} {BPIPE}"),
}


@pytest.fixture(scope="module")
def on_one_rank(run_cases: Callable[..., Outcome]) -> Outcome:
    flags = f"{ALIKE} --pipeline-model-parallel-size 1"
    cases = [Case(name, f"{flags} {more}") for name, more in ON_ONE_RANK.items()]
    return run_cases(1, cases, 600)


@pytest.fixture(scope="module")
def on_several(request: pytest.FixtureRequest, run_cases: Callable[..., Outcome]) -> dict[int, Outcome]:
    selected = asked_for(request, "ranks", "name")
    done = {}
    for ranks in sorted({ranks for ranks, _ in selected}):
        names = [name for name in ON_SEVERAL if (ranks, name) in selected]
        cases = [Case(name, f"{ALIKE} {ON_SEVERAL[name][1]}") for name in names]
        done[ranks] = run_cases(ranks, cases, 1200)
    return done


@pytest.mark.parametrize("name", ["even", "uneven"])
def test_one_rank_trains_slices_as_stock_trains_the_whole(on_one_rank: Outcome, name: str) -> None:
    close(on_one_rank, "whole", name)
    whole, sliced = (on_one_rank.record(case, 0)["weights"] for case in ("whole", name))
    assert whole.keys() == sliced.keys()
    assert whole != sliced, "nothing was cut: sums in slices are rounded otherwise"


SEVERAL_ALWAYS = {(4, "uneven_balanced")}


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(ranks, name, marks=() if (ranks, name) in SEVERAL_ALWAYS else pytest.mark.slow)
        for ranks in (2, 4, 8)
        for name in ON_SEVERAL
    ],
)
def test_several_ranks_agree_with_one_in_every_bit(
    on_one_rank: Outcome, on_several: dict[int, Outcome], ranks: int, name: str
) -> None:
    """Compare the losses of 5 iterations, and every weight after them."""
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
