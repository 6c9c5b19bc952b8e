"""Every plan is compared with stock Megatron: its fastest setup with its free flags, taken unless ours is clearly
faster."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from bpipe.balance.config import BalanceConfig
from bpipe.cli import main
from bpipe.plan.candidates import CLEARLY, is_level
from bpipe.plan.explain import answer_of, plainest_of_ours
from bpipe.plan.predict import Candidate, predict
from bpipe.plan.refusals import runs_ours
from bpipe.plan.search import Outcome, search
from bpipe.plan.space import Space, with_free_switches
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.memory import predict_memory
from bpipe.predict.model import PRESETS
from bpipe.predict.training import Switches
from bpipe.schedule.families.families import DEFAULTS
from tests.support.predicted import enumerate_setups
from tests.unit.plan.test_refused import SPACE

FREE = Switches(overlap_grad_reduce=True, overlap_param_gather=True, tp_comm_overlap=True)
PLAN = ["plan", "--cluster", "a100-80g:8", "--num-layers", "16", "--hidden-size", "4096", "--num-attention-heads", "32"]
PLAN += ["--seq", "2048", "--vocab-size", "51200", "--gbs", "16", "--max-micro-batch", "2", "--max-chunks", "2"]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return search(with_free_switches(SPACE), 60)


def test_stock_is_the_fastest_of_megatron_alone_with_free_flags(outcome: Outcome) -> None:
    alone = replace(SPACE, schedules=DEFAULTS, balances=("none",), vocabulary_parallel=("none",), switches=FREE)
    fitting = [setup for setup in enumerate_setups(alone) if all(rank.fits for rank in predict_memory(setup))]
    assert len(fitting) > 20
    assert outcome.stock is not None
    least_s = min(predict(setup).timing.iteration_s for setup in fitting)
    assert outcome.stock.iteration_s == pytest.approx(least_s, rel=1e-3)
    assert not runs_ours(outcome.stock.setup)


def test_ours_is_a_row_with_the_flags_that_it_may_have(outcome: Outcome) -> None:
    """It was predicted again with more flags, and so was faster than every row, itself included."""
    result = answer_of(outcome.stock, outcome.rows, outcome.space)
    assert result.row is not None
    ours = outcome.rows[result.row - 1]
    assert runs_ours(ours.setup)
    assert ours.setup.switches == FREE
    assert ours.setup in [choice.setup for choice in result.choices]
    first = next(row for row in outcome.rows if runs_ours(row.setup))
    assert is_level(outcome.rows[result.row - 1].iteration_s, first.iteration_s)


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["--balance", "bpipe"], marks=pytest.mark.slow),
        pytest.param(["--schedule", "v-half"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_plan_shows_stock(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Plans of our schedules, or of balanced rows alone, did not show what the user already has."""
    main([*PLAN, *more, "--format", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["stock"]["row"]["configuration"]["schedule"] in DEFAULTS
    choices = document["answer"]["choices"]
    assert "--bpipe" not in choices["stock"]["flags"]
    assert "--overlap-grad-reduce --overlap-param-gather" in choices["stock"]["flags"]
    assert document["answer"]["take"] in choices
    row = document["answer"]["row"]
    assert row is None or document["rows"][row - 1]["iteration_time_s"] == choices["bpipe"]["iteration_s"]


def drawn_space(number: int) -> Space:
    """Return a small random space, the same for the same number."""
    draw = random.Random(number)
    device = draw.choice(("a100-80g", "h100-80g", "b200-180g", "mi300x-192g"))
    heads, layers = draw.choice((16, 32)), draw.choice((8, 12, 16, 24))
    model = replace(
        PRESETS[draw.choice(("gpt3-13b", "llama3-8b"))],
        num_layers=layers,
        hidden_size=heads * 128,
        num_attention_heads=heads,
        num_query_groups=heads,
        ffn_hidden_size=heads * 512,
        vocabulary=draw.choice((32000, 128256)),
    )
    cluster = parse_cluster(f"{device}:{draw.choice(('4', '8', '2x8'))}")
    small = replace(cluster.device, memory_bytes=draw.choice((16, 24, 40, 79)) * GIB)
    switches = Switches(overlap_grad_reduce=draw.random() < 0.3, no_overlap_p2p_communication=draw.random() < 0.2)
    return Space(
        model,
        replace(cluster, device=small),
        draw.choice((32, 64)),
        draw.choice((2048, 4096)),
        recompute=("none", "selective", "full"),
        schedules=("1f1b", "interleaved-1f1b", "grouped-interleaved"),
        max_micro_batch=4,
        max_chunks=3,
        switches=switches,
        distributed_optimizer=draw.random() < 0.7,
    )


def every_switch(space: Space) -> list[Switches]:
    """Return every combination of stock's free flags."""
    variants = []
    names = ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "no_overlap_p2p_communication")
    for values in product((False, True), repeat=len(names)):
        changes = dict(zip(names, values, strict=True))
        if changes["overlap_param_gather"] and not (changes["overlap_grad_reduce"] and space.distributed_optimizer):
            continue
        variants.append(replace(space.switches, **changes))
    return variants


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 30))])
def test_the_answer_never_loses_to_a_stock_row_that_it_does_not_show(number: int) -> None:
    space = drawn_space(number)
    outcome = search(with_free_switches(space), 10)
    alone = replace(space, schedules=DEFAULTS, balances=("none",), vocabulary_parallel=("none",))
    rivals = [
        row.iteration_s for switches in every_switch(space) for row in search(replace(alone, switches=switches), 1).rows
    ]
    assert bool(rivals) is (outcome.stock is not None)
    if outcome.stock is not None:
        assert outcome.stock.iteration_s <= min(rivals) * (1 + 1e-9)
        taken = answer_of(outcome.stock, outcome.rows, space).taken
        assert taken is not None
        assert taken.iteration_s < CLEARLY * min(rivals)


SIZES = Setup(PRESETS["llama3-8b"], parse_cluster("h100-80g:8"), 2, 4, 1, 16, 8192, (8,) * 4, "none", "flash")
SLICED, BALANCED, SPLIT = (
    replace(SIZES, slices=2),
    replace(SIZES, balance=BalanceConfig()),
    replace(SIZES, balance=BalanceConfig(), schedule="1f1b-split"),
)


@pytest.mark.parametrize(
    ("rows", "place"),
    [
        # Slices are guarded: a row that is not, and about as fast, comes first.
        ([(SLICED, 1.0), (BALANCED, 1.04)], 1),
        ([(SLICED, 1.0), (BALANCED, 1.06)], 0),
        # Of rows about as fast, the one with fewer flags.
        ([(SPLIT, 1.0), (BALANCED, 1.009)], 1),
        ([(SPLIT, 1.0), (BALANCED, 1.02)], 0),
        ([(SIZES, 1.0), (SPLIT, 1.01), (BALANCED, 1.015)], 2),
    ],
)
def test_ours_is_what_is_supported_and_plain_where_level(rows: list[tuple[Setup, float]], place: int) -> None:
    """It was the first row, even if that needed more of the trainer to be a thousandth faster."""

    def row(setup: Setup, seconds: float) -> Candidate:
        prediction = predict(setup)
        return replace(prediction, timing=replace(prediction.timing, iteration_s=seconds))

    assert plainest_of_ours([row(*values) for values in rows], ()) == place
