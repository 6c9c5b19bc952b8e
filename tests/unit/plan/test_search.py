"""The search: its first rows are about as fast as those of simulating everything, it drops what does not fit, and it
says when balancing does not help."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from bpipe.balance.config import named_balance
from bpipe.build import ScheduleConfig, build
from bpipe.cli import main
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.bounds import Bounder, Bounds
from bpipe.plan.budget import within_budget_or_none
from bpipe.plan.candidates import describe
from bpipe.plan.explain import remarks, verdict
from bpipe.plan.predict import costs_of, predict, simulation_of, steady_timing, whole_timing
from bpipe.plan.search import INDISTINCT, Judge, Members, Outcome, search
from bpipe.plan.space import CUTS, Space, divisors, enumerate_branches, num_grids, usual_contexts
from bpipe.predict.activations import activations, after_input_bytes, held_by, held_within, moves_anything, stage_bytes
from bpipe.predict.cluster import GIB, parse_cluster
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.memory import (
    least_sharded_bytes,
    least_shared_bytes,
    least_warm_bytes,
    peak_bytes,
    predict_memory,
    rank_states,
)
from bpipe.predict.model import PRESETS, gpt
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.families.family import Family
from bpipe.schedule.hosts import HOST, PAIR, POOL
from bpipe.schedule.layout import Vocabulary
from bpipe.schedule.program import Exchange
from tests.support.predicted import enumerate_setups, every_setup, lower_bound_s
from tests.unit.predict.published import MIXTRAL_8X7B

A100 = parse_cluster("a100-80g:4x8")
UNFUSED = Space(PRESETS["gpt3-96b"], A100, 128, 2048, "unfused", precision="fp16")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return search(UNFUSED)


def test_the_papers_case_gains_and_says_why(outcome: Outcome) -> None:
    """Kim et al. 2023: t=4, p=8, b=2 with recomputed attention is the fastest of 96B on 32 A100s, and fits only
    balanced."""
    best = outcome.rows[0]
    setup = best.setup
    assert (setup.tensor, setup.pipeline, setup.micro_batch, setup.recompute, setup.balance) == (
        4,
        8,
        2,
        "selective",
        EVENLY,
    )
    assert "fits only with balancing: without it, the fullest rank needs 81.4 of 79.2 GiB" in remarks(best)
    assert verdict(outcome).text.startswith("Balancing gains 1.")
    assert outcome.plain is not None
    assert not any("only with balancing" in remark for remark in remarks(outcome.plain))


@pytest.mark.slow
def test_the_first_rows_are_those_of_simulating_everything(outcome: Outcome) -> None:
    """Compared with predicting the 40 setups of the smallest lower bounds."""
    fitting = [fitted for setup in enumerate_setups(UNFUSED) if (fitted := as_it_fits(setup)) is not None]
    unbalanced = {key(setup) for setup in fitting if setup.balance is None}
    candidates = [setup for setup in fitting if setup.balance is None or key(setup) not in unbalanced]
    quick = sorted(candidates, key=lambda setup: lower_bound_s(setup))[:40]
    times = sorted(predict(setup).timing.iteration_s for setup in quick)
    assert [row.iteration_s for row in outcome.rows] == pytest.approx(times[:10])
    assert outcome.num_simulated < 30


def test_several_kinds_of_hosts_are_compared_in_one_search() -> None:
    """Its rows are the fastest of what searches of each kind find, each with its flag."""
    space = replace(UNFUSED, schedules=("1f1b",), pipelines=(1, 2, 4, 8, 16), max_micro_batch=2)
    kinds = [(PAIR,), (HOST,)]
    rows = [row for hosts in kinds for row in search(replace(space, hosts=hosts), num_rows=6).rows]
    merged = {row.setup: row.iteration_s for row in rows}
    both = search(replace(space, hosts=(PAIR, HOST)), num_rows=6)
    assert [row.iteration_s for row in both.rows] == sorted(merged.values())[:6]
    setups = [row.setup for row in both.rows]
    assert {setup.hosts for setup in setups if setup.balance is not None} == {PAIR, HOST}
    assert ["--bpipe-hosts" in megatron_flags(setup) for setup in setups] == [setup.hosts == HOST for setup in setups]
    assert len(list(enumerate_setups(replace(space, hosts=(PAIR, HOST))))) < 2 * len(list(enumerate_setups(space)))


def as_it_fits(setup: Setup) -> Setup | None:
    """Return the setup, balanced by a budget if even shares do not fit; None if nothing does."""
    if all(rank.fits for rank in predict_memory(setup)):
        return setup
    limit = setup.cluster.device.memory_bytes
    can_be_enough = setup.balance is not None and least_shared_bytes(setup) <= limit and moves_anything(setup)
    return within_budget_or_none(setup, (limit,)) if can_be_enough else None


def key(setup: Setup) -> tuple[object, ...]:
    return setup.tensor, setup.pipeline, setup.micro_batch, setup.recompute, setup.schedule, setup.num_chunks


def test_the_bound_is_below_the_time_and_the_state_below_the_peak() -> None:
    for setup in list(enumerate_setups(UNFUSED))[::97]:
        assert lower_bound_s(setup) <= steady_timing(setup, costs_of(setup)).iteration_s * (1 + 1e-9)
        assert max(rank_states(setup)) <= max(rank.peak_bytes for rank in predict_memory(setup))


def drawn_space(number: int) -> Space:
    """A small random space that varies what bounds depend on: experts, slices, shards, recomputed layers, hosts."""
    draw = random.Random(number)
    layers, experts = draw.choice((7, 16, 24)), draw.random() < 0.3
    model = MIXTRAL_8X7B if experts else PRESETS[draw.choice(("gpt3-13b", "llama3-8b"))]
    model = replace(model, num_layers=layers, vocabulary=draw.choice((32000, 256000)))
    cluster = parse_cluster(draw.choice(("h100-80g:1x8", "a100-40g:2x4", "b200-180g:2x4")))
    small = replace(cluster.device, memory_bytes=draw.choice((20, 40, 80)) * GIB)
    return Space(
        model,
        replace(cluster, device=small),
        draw.choice((16, 24, 60)),
        draw.choice((4096, 8192)),
        recompute=draw.choice((("none", "full"), ("none", "full:block"), ("selective", "full:uniform:2"))),
        schedules=tuple(dict.fromkeys(("1f1b", *draw.sample(SEARCHED, 4)))),
        max_micro_batch=2,
        max_chunks=3,
        vocabulary_parallel=None if draw.random() < 0.5 else ("none", "1", "2"),
        hosts=draw.choice(((PAIR,), (PAIR, POOL), (HOST,))),
        slices=draw.choice(((1,), (1, 2))),
    )


MANY = [*range(4), *(pytest.param(number, marks=pytest.mark.slow) for number in range(4, 300))]


@pytest.mark.parametrize("number", MANY)
def test_no_member_of_a_branch_is_below_its_bounds(number: int) -> None:
    """A wrong bound would drop the best row."""
    space = drawn_space(number)
    draw, members, bounder = random.Random(number), Members(space, Bounds(), Counter()), Bounder(space)
    branches = list(enumerate_branches(space, Counter()))
    for branch in draw.sample(branches, min(6, len(branches))):
        bound = bounder.of(branch)
        setups = list(filter(None, map(members.taken, members.covered(branch))))
        for setup in draw.sample(setups, min(5, len(setups))):
            seconds, needs = steady_timing(setup, costs_of(setup)).iteration_s, peak_bytes(setup)
            assert bound.seconds <= lower_bound_s(setup) * (1 + 1e-9), describe(setup)
            assert bound.bytes_within(seconds) <= needs, describe(setup)
            if setup.is_sharded:
                assert least_sharded_bytes(setup, rank_states(setup)) <= needs, describe(setup)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", MANY)
def test_no_row_of_the_quick_search_is_clearly_slower_than_that_of_asking_everything(number: int) -> None:
    space = drawn_space(number)
    space = replace(space, recompute=space.recompute[:1], schedules=space.schedules[:3], max_chunks=2)
    result = search(space, num_rows=3)
    best: list[float] = []
    bounds = Bounds(space.profile)
    by_bound = sorted(((bounds.seconds(setup), setup) for setup in every_setup(space)), key=lambda pair: pair[0])
    for bound_s, setup in by_bound:
        if len(best) == 3 and bound_s >= best[-1]:
            break
        fitted = Judge(space, Counter()).fitting(setup)
        if fitted is not None:
            best = sorted([*best, steady_timing(fitted, costs_of(fitted)).iteration_s])[:3]
    times = [row.iteration_s for row in result.rows]
    assert len(times) == len(best)
    for seconds, least_s in zip(times, best, strict=True):
        assert least_s * (1 - 1e-6) <= seconds <= INDISTINCT * least_s


@pytest.mark.parametrize("number", MANY[:40])
def test_a_search_that_ends_early_says_what_nothing_else_is_faster_than(number: int) -> None:
    space = drawn_space(number)
    space = replace(space, recompute=space.recompute[:1], schedules=space.schedules[:3], max_chunks=2)
    best, early = search(space, num_rows=1).rows, search(space, num_rows=1, most_s=0)
    assert len(early.rows) == len(best)
    if best:
        found_s = early.rows[0].iteration_s / INDISTINCT
        assert best[0].iteration_s >= min(found_s, early.unseen_s or found_s) * (1 - 1e-6)
        assert early.num_simulated <= 2, "one of the space, and what Megatron does alone"


@pytest.mark.parametrize("number", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 400))])
def test_with_shards_no_rank_holds_less_than_without(number: int) -> None:
    """The search drops what is too large even without shards."""
    draw = random.Random(number)
    family = FAMILIES[draw.choice([name for name in SEARCHED if FAMILIES[name].sharded is not None])]
    chunks = draw.choice([count for count in (1, 2, 3, 4) if family.min_chunks <= count <= (family.max_chunks or 4)])
    p = draw.choice((2, 3, 4, 6, 8, 12, 16))
    groups = (p, 2 * p, max(1, p // 2), max(1, p // 4)) if family.name == "grouped-interleaved" else (None,)
    sharded = ScheduleConfig(
        family.name,
        p,
        draw.randint(1, 4 * p),
        num_chunks=chunks,
        group_size=draw.choice(groups),
        vocabulary=draw.choice((Vocabulary.ONE, Vocabulary.TWO)),
        input_shards=draw.random() < 0.5,
    )
    whole = replace(sharded, vocabulary=Vocabulary.WHOLE, input_shards=False)
    saved = [draw.randint(1, 100) for _ in range(p * chunks)]
    after_input = [draw.randint(0, size) for size in saved]
    for less, more in zip(held_within(whole), held_within(sharded), strict=True):
        assert less.num_bytes(saved, after_input) <= more.num_bytes(saved, after_input)


@pytest.mark.slow
def test_bounds_of_many_are_those_of_each_alone_to_the_bit() -> None:
    """Parts that setups share are computed once. The spaces differ in times, experts and schedules."""
    slow = replace(A100, factor=1.25)
    mixtral = Space(MIXTRAL_8X7B, slow, 64, 4096, max_micro_batch=2, max_chunks=2, schedules=("1f1b", "zb-v"))
    for space in (UNFUSED, SMALL, mixtral):
        bounds, setups = Bounds(), list(enumerate_setups(space))
        for setup in setups[:: max(1, len(setups) // 400)]:
            assert bounds.seconds(setup) == lower_bound_s(setup), describe(setup)


@pytest.mark.parametrize("schedule", [name for name, family in FAMILIES.items() if family.warm_up is not None])
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_nothing_needs_less_than_what_its_warm_up_says(schedule: str, balance: str) -> None:
    """22 layers do not divide evenly, so stages differ; some ends have no layers."""
    model = gpt("odd", 22, 1024, 16)
    space = Space(
        model, parse_cluster("h100-80g:1x8"), 48, 1024, schedules=(schedule,), balances=(balance,), recompute=("none",)
    )
    setups = list(enumerate_setups(space))
    assert any(least_warm_bytes(setup) for setup in setups)
    for setup in setups[::3]:
        assert least_warm_bytes(setup) <= max(rank.peak_bytes for rank in predict_memory(setup)), describe(setup)


def test_the_papers_constraints() -> None:
    for setup in enumerate_setups(UNFUSED):
        assert setup.tensor * setup.pipeline * setup.data == 32
        assert 104 % setup.tensor == 0 == 8 % setup.tensor == 128 % (setup.micro_batch * setup.data)
        assert max(setup.layers) - min(setup.layers) <= 1


def test_405b_on_16384_gpus_fits_without_more_devices() -> None:
    """126 layers do not divide by 4, 8, 16 or 32, so it said `take more devices`, though Megatron takes stages of 7 and
    8 layers."""
    result = search(Space(PRESETS["llama3-405b"], parse_cluster("h100-80g:2048x8"), 2048, 8192), num_rows=3)
    assert result.num_fitting > 10
    best = result.rows[0].setup
    assert len(set(best.layers)) == 2
    # As NVIDIA does: 128 stages, the first with only the embedding and the last with only the output layer.
    assert best.layers == (0, *(1,) * 126, 0)
    assert megatron_flags(best)[megatron_flags(best).index("--pipeline-model-parallel-layout") + 1] == "E|(t|)*126L"
    # A rank with both ends would have no layer at all.
    assert not any(
        0 in setup.layers for setup in enumerate_setups(replace(result.space, schedules=("zb-v", "bitpipe")))
    )


SMALL = Space(
    gpt("small", 16, 8192, 64, sequence=4096), parse_cluster("a100-80g:8"), 32, 4096, recompute=("none", "selective"), max_chunks=4,
    max_micro_batch=2, schedules=SEARCHED,
)  # fmt: skip


@pytest.mark.slow
def test_the_first_rows_of_every_family_are_those_of_asking_everything() -> None:
    """Setups whose memory was never computed are slower than every row."""
    result = search(SMALL, num_rows=5)
    assert result.cuts["slower"] > 100
    fitting = []
    for setup in enumerate_setups(SMALL):
        if max(rank_states(setup)) > SMALL.cluster.device.memory_bytes:
            continue
        if setup.balance is None or not all(rank.fits for rank in predict_memory(replace(setup, balance=None))):
            fitting += [fitted for fitted in [as_it_fits(setup)] if fitted is not None]
    quick = sorted(fitting, key=lower_bound_s)
    times: list[float] = []
    for setup in quick:
        if len(times) >= 5 and lower_bound_s(setup) >= sorted(times)[4]:
            break
        times.append(predict(setup).timing.iteration_s)
    assert [row.iteration_s for row in result.rows] == pytest.approx(sorted(times)[:5])
    assert {standing.schedule for standing in result.families} == set(SEARCHED)
    for standing in result.families:
        if standing.fastest is not None:
            assert standing.fastest.setup.schedule == standing.schedule


def test_what_balancing_moves_is_asked_of_the_pass() -> None:
    def moves(schedule: str, pipeline: int, chunks: int = 1) -> bool:
        layers = (2,) * pipeline * chunks
        model = gpt("small", sum(layers), 1024, 16)
        return moves_anything(
            Setup(
                model,
                parse_cluster(f"a100-80g:{pipeline}"),
                1,
                pipeline,
                1,
                24,
                1024,
                layers,
                schedule=schedule,
                num_chunks=chunks,
            )
        )

    assert not moves("1f1b", 1)
    assert [moves("1f1b", p) for p in (2, 3, 4)] == [False, False, True]
    assert [moves("interleaved-1f1b", p, 2) for p in (2, 3, 4)] == [False, True, True]
    assert [moves("grouped-interleaved", p, 2) for p in (2, 3, 4)] == [False, False, True]
    assert not any(moves(name, 4, 2) for name in ("zb-v", "v-half", "v-min"))
    assert not moves("zb-h1", 4)
    assert not moves("gpipe", 4)


def sizes_of(family: Family) -> list[tuple[int, int, int | None, int]]:
    """Return (ranks, chunks, group, delay) to try for a family that runs on our executor."""
    counts = family.chunks(4)
    groups = (None, 3, 4, 5) if family.takes_groups else (None,)
    delays = (0, 2) if family.takes_delay else (0,)
    return [(4, chunks, group, delay) for chunks in {*counts[:1], *counts[-1:]} for group in groups for delay in delays]


OURS = [
    (name, *sizes)
    for name, family in FAMILIES.items()
    if family.exchange is Exchange.POSTED and family.num_pipes == 1
    for sizes in sizes_of(family)
]


@pytest.mark.parametrize(("schedule", "p", "chunks", "group", "delay"), OURS)
@pytest.mark.parametrize("balance", ["none", "bpipe"])
def test_the_steady_phase_of_our_executors_schedules_is_continued(
    schedule: str, p: int, chunks: int, group: int | None, delay: int, balance: str
) -> None:
    """Whole groups are continued, whatever is left over; the micro-batches that fill the pipeline tell what is held."""
    setup = Setup(
        model=replace(PRESETS["gpt3-13b"], num_layers=2 * p * chunks),
        cluster=parse_cluster(f"a100-80g:1x{p}"),
        tensor=1,
        pipeline=p,
        micro_batch=1,
        global_batch=289,
        sequence=2048,
        layers=(2,) * p * chunks,
        schedule=schedule,
        num_chunks=chunks,
        group_size=group,
        delay=delay,
        balance=named_balance(balance),
    )
    whole, steady = whole_timing(simulation_of(setup)), steady_timing(setup, costs_of(setup))
    assert steady.simulated < 289
    assert steady.iteration_s == pytest.approx(whole.iteration_s, rel=1e-6)
    assert steady.bubble_of_makespan == pytest.approx(whole.bubble_of_makespan, rel=1e-5)
    saved, between = stage_bytes(setup), after_input_bytes(setup)
    for few, many in zip(activations(setup), held_by(build(setup.program())), strict=True):
        assert all(a >= b for a, b in zip(few, many.num_bytes(saved, between), strict=True))


def test_nothing_fits_is_said_with_the_least() -> None:
    result = search(Space(PRESETS["llama3-405b"], parse_cluster("a100-80g:8"), 16, 8192))
    assert result.rows == ()
    kind, text = verdict(result)
    assert kind == "nothing-fits"
    assert text.startswith(
        "Nothing fits, with balancing or without: weights, gradients and optimizer state alone need at least 8"
    )
    assert "of 79.2 GiB of a device (t=8 p=1 d=1): use more devices (p is at most" in text
    assert f"{result.cuts['branches']} {CUTS['branches']}" in text
    # Weights fit here, but what one micro-batch saves does not, even if everything is recomputed.
    long = search(Space(PRESETS["llama3-8b"], parse_cluster("a100-80g:2"), 16, 2**20, recompute=("full",)))
    assert verdict(long).text.startswith(
        "Nothing fits, with balancing or without: the least is t=2 p=1 d=1 b=1 recompute full"
    )
    assert "a shorter sequence" in verdict(long).text
    tried = search(
        Space(
            PRESETS["gpt3-96b"],
            parse_cluster("a100-80g:3x8"),
            24,
            8192,
            "unfused",
            recompute=("none",),
            balances=("none",),
        )
    )
    assert verdict(tried).text.startswith("Nothing fits, without balancing (the other was not searched)")
    assert "allow --recompute full too or allow --balance bpipe too" in verdict(tried).text


def test_the_budget_that_is_named_where_nothing_fits_fits() -> None:
    """The state alone, 48.4 GiB, was called the need of a configuration that takes 98.4, and the whole device the budget
    to ask for."""
    space = Space(PRESETS["gpt3-96b"], parse_cluster("a100-80g:4x8"), 128, 2048, "unfused", schedules=("1f1b",))

    def verdict_within(memory_gib: float) -> str:
        budget = replace(space, cluster=replace(space.cluster, budget_bytes=int(memory_gib * GIB)))
        return verdict(search(budget)).text

    assert "optimizer state alone need at least" in verdict_within(20)
    (named,) = re.findall(r"with --memory ([\d.]+) it fits\.", verdict_within(55))
    assert "Nothing fits" not in verdict_within(float(named))


def test_long_sequences_are_tried_in_parts() -> None:
    """Sequences of 32768 tokens or more, with at least 8192 for each device; shorter ones on request."""
    assert [usual_contexts(sequence, 32) for sequence in (8192, 32767, 32768, 131072)] == [
        (1,),
        (1,),
        (1, 2, 4),
        (1, 2, 4, 8, 16),
    ]
    cluster, model = parse_cluster("h100-80g:2x8"), PRESETS["llama3-8b"]
    space = Space(model, cluster, 16, 65536, schedules=("1f1b",), recompute=("none",), balances=("none",))
    plain, parts = search(space), search(replace(space, contexts=(1, 2, 3, 8)))
    assert parts.rows[0].iteration_s < plain.rows[0].iteration_s
    # Of t = 1, 2, 4, 8 all fit 16 devices with 2 parts and only two with 8; 3 divides nothing.
    assert num_grids(parts.space) == num_grids(space) + (4 + 3 + 2 + 1) + (2 + 1 + 1 + 1) + 4
    assert parts.cuts["context"] == 2 + 4
    best = parts.rows[0].setup
    assert f"t={best.tensor} c={best.context} p={best.pipeline}" in describe(best)
    flags = megatron_flags(best)
    context_flags = ["--context-parallel-size", str(best.context), "--cp-comm-type", "p2p"]
    assert flags[flags.index("--context-parallel-size") :][:4] == context_flags
    assert "c=2 by a2a" in describe(replace(best, context=2, cp_comm_type="a2a"))


def test_a_state_that_is_too_large_is_said_with_what_cut_the_rest() -> None:
    # There are only two layers, one for each rank.
    wide = gpt("wide", 2, 65536, 512, sequence=256)
    deepest = search(Space(wide, parse_cluster("a100-40g:4x2"), 4, 256, recompute=("full",)))
    text = verdict(deepest).text
    assert "use more devices (p is at most 2), or devices with more memory; bpipe fit tries" in text
    assert CUTS["ranks"] in text
    assert deepest.cuts["branches"] > 0


def test_no_configuration_names_what_cut_them_all() -> None:
    batch = search(Space(PRESETS["llama3-8b"], parse_cluster("h100-80g:8"), 7, 8192, schedules=("interleaved-1f1b",)))
    kind, text = verdict(batch)
    assert kind == "no-configuration"
    assert f"6 {CUTS['batch']}" in text
    assert CUTS["micro_batches"] in text
    few = search(Space(PRESETS["llama3-8b"], parse_cluster("h100-80g:2"), 8, 8192, balances=("bpipe",)))
    assert CUTS["pairs"] in verdict(few).text


def test_a_batch_with_a_huge_prime_is_answered() -> None:
    """All divisors were tried one by one: a batch of 10^9 + 7 took minutes, and one of 10^12 never ended.

    The test's time-out is the limit.
    """
    assert divisors(360) == [number for number in range(1, 361) if 360 % number == 0]
    assert divisors(1) == [1]
    assert divisors(49) == [1, 7, 49]
    for batch in (1_000_000_007, 1_000_000_000_039, 65536):
        result = search(
            Space(PRESETS["llama3-8b"], parse_cluster("h100-80g:8"), batch, 8192, schedules=("1f1b", "gpipe")),
            num_rows=1,
        )
        assert result.rows[0].setup.num_microbatches >= 65536 // 8 // 64


def test_experts_are_spread_over_every_number_of_devices() -> None:
    """A model without experts gets no such setups."""
    space = Space(
        MIXTRAL_8X7B,
        parse_cluster("h100-80g:4x8"),
        256,
        4096,
        schedules=("1f1b",),
        max_micro_batch=1,
        balances=("none",),
    )
    setups = list(enumerate_setups(space))
    assert {setup.routing.expert for setup in setups} == {1, 2, 4, 8}
    assert {setup.expert_tensor for setup in setups} == {1}
    assert all(setup.tensor * setup.data % setup.routing.expert == 0 for setup in setups)
    assert {setup.routing.expert for setup in enumerate_setups(replace(space, expert=4))} == {4}
    dense = list(enumerate_setups(replace(space, model=replace(MIXTRAL_8X7B, experts=None))))
    assert {setup.routing for setup in dense} == {Routing()}
    ways = sum(sum(setup.tensor * setup.data % ep == 0 for ep in (1, 2, 4, 8)) for setup in dense)
    assert len(setups) == ways
    best = search(space, num_rows=1).rows[0]
    assert best.fits
    assert f"ep={best.setup.routing.expert}" in describe(best.setup)
    cuts: Counter[str] = Counter()
    assert not list(enumerate_setups(replace(space, schedules=("chimera",)), cuts))
    assert cuts["experts"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "3"], "--tp 3 does not divide the devices of a node: choose from 1, 2, 4, 8"),
        (["--pp", "4", "3"], "--pp 3 does not divide the devices of the cluster: choose from 1, 2, 4, 8, 16"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt3-13b", "--cluster", "a100-80g:2x8", "--gbs", "32", *flags]) == 2
    assert message in capsys.readouterr().err
