"""Slices in a search: which are tried, their lower bounds, and the rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bpipe.balance.config import named_balance
from bpipe.cli import main
from bpipe.plan.bounds import Bounds
from bpipe.plan.budget import within_budget
from bpipe.plan.candidates import describe
from bpipe.plan.predict import costs_of, simulation_of, steady_timing, whole_timing
from bpipe.plan.space import Space
from bpipe.predict.activations import activations
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.memory import least_bytes, least_shared_bytes, least_warm_bytes, peak_bytes
from bpipe.predict.model import PRESETS, llama
from bpipe.predict.profile import Entry, Profile
from bpipe.schedule.families.families import FAMILIES
from tests.support.predicted import every_setup, lower_bound_s

MODEL = llama("long", 16, 4096, 32, 8, 14336, 32000, 65536)
SPACE = Space(
    MODEL,
    parse_cluster("h100-80g:2x8"),
    8,
    65536,
    recompute=("selective", "full"),
    schedules=("1f1b", "interleaved-1f1b", "grouped-interleaved", "v-half", "chimera"),
    tensors=(4,),
    pipelines=(4,),
    max_micro_batch=1,
    max_chunks=2,
    slices=(1, 2, 4),
)


@pytest.fixture(scope="module")
def every() -> list[Setup]:
    return list(every_setup(SPACE))


def test_slices_are_tried_where_sequences_can_be_cut() -> None:
    def slices(space: Space) -> set[int]:
        return {setup.slices for setup in every_setup(space)}

    assert slices(SPACE) == {1, 2, 4}
    assert slices(replace(SPACE, slices=(2,))) == {2}
    assert slices(replace(SPACE, contexts=(2,), pipelines=(2,))) == {1}
    assert slices(replace(SPACE, pipelines=(1,), schedules=("1f1b",))) == {1}
    assert slices(replace(SPACE, schedules=("chimera",))) == {1}
    assert slices(replace(SPACE, profile=Profile("p.json", (Entry(forward_s=1.0),)))) == {1}
    assert slices(replace(SPACE, others=(("--sft", ""),))) == {1}
    # 65536 tokens are fewer than 40000 units of 4.
    assert slices(replace(SPACE, slices=(1, 40000))) == {1}
    with pytest.raises(ValueError, match="--slices 0: give numbers from 1 on"):
        replace(SPACE, slices=(0,))


def test_bounds_are_no_more_than_what_is_simulated(every: list[Setup]) -> None:
    bounds, near = Bounds(), []
    for setup in every:
        if setup.slices == 1:
            continue
        bound, seconds = bounds.seconds(setup), steady_timing(setup, costs_of(setup)).iteration_s
        assert bound == lower_bound_s(setup)
        assert bound <= seconds * (1 + 1e-9), describe(setup)
        near.append(bound / seconds)
    assert sorted(near)[len(near) // 2] > 0.75


def test_memory_bounds_are_no_more_than_what_is_held(every: list[Setup]) -> None:
    for setup in every:
        if setup.slices > 1:
            peak = peak_bytes(setup)
            assert least_bytes(setup) <= peak
            assert least_warm_bytes(setup) <= peak, describe(setup)
            if setup.balance is not None:
                assert least_shared_bytes(setup) <= peak


@pytest.mark.parametrize("balance", ["none", "bpipe"])
@pytest.mark.parametrize(
    ("p", "slices"), [(4, 4), (4, 8), *(pytest.param(8, slices, marks=pytest.mark.slow) for slices in (2, 8))]
)
@pytest.mark.parametrize("schedule", [name for name, family in FAMILIES.items() if family.takes_slices and family.fill])
def test_few_micro_batches_tell_of_all(schedule: str, p: int, slices: int, balance: str) -> None:
    """As many slices as ranks fill a pipeline. The micro-batches simulated are those and two more, without which 1F1B
    had one host buffer too few. Shorter orders of a family that moves actions back and forth differ slightly."""
    chunks = FAMILIES[schedule].min_chunks
    setup = Setup(
        *(replace(PRESETS["gpt3-13b"], num_layers=2 * p * chunks), parse_cluster(f"a100-80g:1x{p}"), 1, p, 1, 24, 8192),
        layers=(2,) * p * chunks,
        schedule=schedule,
        num_chunks=chunks,
        balance=named_balance(balance),
        slices=slices,
    )
    whole, steady = whole_timing(simulation_of(setup)), steady_timing(setup, costs_of(setup))
    assert steady.iteration_s == pytest.approx(whole.iteration_s, rel=1e-6)
    if p == 4 or (slices == 8 and balance == "none"):
        assert steady.simulated < 24
    few = activations(setup)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("bpipe.predict.activations._num_filling", lambda setup: setup.num_microbatches)
        many = activations(setup)
    # A rank that is not the fullest may need one host buffer more or fewer.
    assert max(map(sum, few)) == pytest.approx(max(map(sum, many)), rel=0.004)
    for (own, _), (own_of_many, _) in zip(few, many, strict=True):
        assert own == pytest.approx(own_of_many, rel=0.004)


def test_the_command_tries_them_on_long_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", "llama3-8b", "--cluster", "h100-80g:8", "--tp", "2", "--pp", "4", "--gbs", "8"]
    plan += ["--recompute", "full", "--max-micro-batch", "1", "--schedule", "1f1b", "--vocabulary", "none"]
    plan += ["--rows", "4", "--format", "json"]

    def rows(*more: str) -> list[dict[str, object]]:
        assert main([*plan, *more]) == 0
        return [row["configuration"] for row in json.loads(capsys.readouterr().out)["rows"]]

    assert {row.get("slices", 1) for row in rows("--seq", "8192")} == {1, 2, 4, 8}
    assert {row.get("slices", 1) for row in rows("--seq", "8192", "--slices", "1")} == {1}
    assert {row.get("slices", 1) for row in rows("--seq", "2048")} == {1}
    assert {row.get("slices", 1) for row in rows("--seq", "2048", "--slices", "2")} == {2}


def test_a_plan_for_all_micro_batches_is_timed_by_all_where_fewer_do_not_fit() -> None:
    """A search within 72 GiB ended with the trainer's error: a plan for 64 micro-batches in slices does not fit the
    order of the first 24, which was used to time it."""
    setup = Setup(
        PRESETS["llama3-70b"],
        parse_cluster("h100-80g:4x8"),
        4,
        8,
        1,
        64,
        8192,
        (5,) * 16,
        "none",
        schedule="interleaved-1f1b",
        num_chunks=2,
        balance=EVENLY,
        slices=2,
    )
    balanced, _ = within_budget(setup, (72 * GIB,))
    assert steady_timing(balanced, costs_of(balanced)).simulated == balanced.num_microbatches
