"""The vocabulary in shards as candidates of the search: those that the trainer has, the first rows those of
simulating all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.bounds import Bounds, last_load, lower_bound_s
from bpipe.plan.candidates import describe
from bpipe.plan.front import find_front
from bpipe.plan.predict import costs_of
from bpipe.plan.search import every_setup, search
from bpipe.plan.shards import stands_still
from bpipe.plan.space import VOCABULARIES, Space
from bpipe.plan.timing import steady_timing
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.memory import least_bytes, least_shared_bytes, peak_bytes
from bpipe.predict.model import gpt
from bpipe.predict.warm_up import least_warm_bytes
from bpipe.schedule.families.families import FAMILIES, SEARCHED
from bpipe.schedule.layout import Vocabulary

# Two layers per rank and a vocabulary of many: the last rank computes several times as long as the others.
WIDE = replace(gpt("wide", 8, 1024, 16), vocabulary=256_000)
SMALL = Space(
    WIDE,
    parse_cluster("h100-80g:1x4"),
    16,
    1024,
    recompute=("none",),
    schedules=("1f1b", "interleaved-1f1b", "zb-h1", "v-half", "grouped-interleaved", "chimera"),
    max_micro_batch=2,
    max_chunks=2,
    vocabulary_parallel=VOCABULARIES,
)


def setups_of(space: Space) -> list[Setup]:
    return list(every_setup(space, Bounds(), Counter()))


def with_memory(space: Space, num_bytes: int) -> Space:
    device = replace(space.cluster.device, memory_bytes=num_bytes)
    return replace(space, cluster=replace(space.cluster, device=device))


def test_every_schedule_is_tried_with_all_shards_that_the_trainer_has() -> None:
    """With tensor parallelism before Blackwell there is one queue, in which algorithm 2 and shards of the embedding
    are refused."""
    found = Counter(
        (setup.schedule, setup.tensor > 1, setup.vocabulary.value, setup.input_shards) for setup in setups_of(SMALL)
    )
    sorts = {(schedule, one_queue): set[tuple[str, bool]]() for schedule, one_queue, *_ in found}
    for schedule, one_queue, algorithm, inputs in found:
        sorts[schedule, one_queue].add((algorithm, inputs))
    whole, both = {("none", False)}, {(name, inputs) for name in ("1", "2") for inputs in (False, True)}
    assert sorts["1f1b", False] == {*whole, *both, ("interlaced", False), ("interlaced", True)}
    assert sorts["zb-h1", False] == sorts["v-half", False] == sorts["grouped-interleaved", False] == {*whole, *both}
    assert sorts["1f1b", True] == {*whole, ("1", False), ("interlaced", False)}
    assert sorts["chimera", False] == whole
    blackwell = setups_of(replace(SMALL, cluster=parse_cluster("b200-180g:1x4"), schedules=("zb-h1",)))
    assert {setup.vocabulary.value for setup in blackwell if setup.tensor == 2} == {"none", "1", "2"}
    assert not any(setup.is_sharded for setup in setups_of(SMALL) if setup.pipeline == 1)


def test_what_would_stand_still_in_one_queue_is_no_row() -> None:
    """As the trainer refuses it: of groups of as many micro-batches as ranks, sends ahead of their receivers hold
    each other up."""
    space = replace(
        SMALL, cluster=parse_cluster("h100-80g:1x8"), schedules=("grouped-interleaved",), vocabulary_parallel=("1",)
    )
    found = search(space, num_rows=1000)
    setups = [row.prediction.setup for row in found.rows]
    assert 0 < found.cuts["queues"] <= sum(stands_still(setup) for setup in setups_of(space))
    assert not any(stands_still(setup) for setup in setups)
    of_two = {(setup.pipeline, setup.group_size) for setup in setups if setup.tensor == 2}
    assert (4, 2) in of_two
    assert (4, 4) not in of_two
    assert any(setup.group_size == setup.pipeline for setup in setups if setup.tensor == 1)


def test_where_nobody_chose_shards_are_tried_where_they_promise_something() -> None:
    small = replace(SMALL, vocabulary_parallel=None)
    setups = setups_of(small)
    whole = [setup for setup in setups if not setup.is_sharded]
    assert whole == setups_of(replace(SMALL, vocabulary_parallel=("none",)))
    every = [setup for setup in setups_of(SMALL) if setup.is_sharded]
    wholes = {setup: replace(setup, vocabulary=Vocabulary.WHOLE, input_shards=False) for setup in every}
    promising = {one for one in every if last_load(wholes[one]) > 1 and lower_bound_s(one) < lower_bound_s(wholes[one])}
    assert {setup for setup in setups if setup.is_sharded} == promising
    assert promising
    only = setups_of(replace(SMALL, vocabulary_parallel=("1",)))
    assert {setup.vocabulary.value for setup in only} == {"1"}


@pytest.mark.parametrize("schedule", [name for name in SEARCHED if FAMILIES[name].sharded is not None])
def test_bounds_of_shards_hold(schedule: str) -> None:
    space = replace(
        SMALL,
        schedules=(schedule,),
        cluster=parse_cluster("h100-80g:1x8"),
        global_batch=24,
        vocabulary_parallel=VOCABULARIES[1:],
    )
    bounds = Bounds()
    for setup in setups_of(space)[::5]:
        seconds, needs = steady_timing(setup, costs_of(setup)).iteration_s, peak_bytes(setup)
        assert bounds.seconds(setup) == lower_bound_s(setup) <= seconds * (1 + 1e-9), describe(setup)
        assert max(least_bytes(setup), least_warm_bytes(setup)) <= needs, describe(setup)
        if setup.balance is not None:
            assert least_shared_bytes(setup) <= needs, describe(setup)


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_first_rows_are_those_of_simulating_all(share: float) -> None:
    """With memory for all, and for some: balanced ones where the same without balancing does not fit."""
    space = with_memory(SMALL, int(share * SMALL.cluster.device.memory_bytes))
    limit = space.cluster.device.memory_bytes
    found = search(space, num_rows=12)
    fitting = [setup for setup in setups_of(space) if peak_bytes(setup) <= limit]
    fitting = [setup for setup in fitting if not stands_still(setup)]
    fitting = [setup for setup in fitting if setup.balance is None or peak_bytes(replace(setup, balance=None)) > limit]
    assert len(fitting) > 30
    times = sorted(steady_timing(setup, costs_of(setup)).iteration_s for setup in fitting)
    assert [row.prediction.timing.iteration_s for row in found.rows] == pytest.approx(times[:12], rel=1e-12)
    assert any(row.prediction.setup.is_sharded for row in found.rows)
    assert found.num_sharded == sum(setup.is_sharded for setup in setups_of(space))


def test_the_front_takes_them_too() -> None:
    space = replace(SMALL, schedules=("1f1b", "zb-h1"), vocabulary_parallel=None)
    points = find_front(space).points
    every = [
        (peak_bytes(setup), steady_timing(setup, costs_of(setup)).iteration_s)
        for setup in setups_of(space)
        if not stands_still(setup)
    ]
    assert any(point.prediction.setup.is_sharded for point in points)
    for point in points:
        assert not any(
            peak <= point.peak_bytes and seconds < point.iteration_s * (1 - 1e-12) for peak, seconds in every
        )


def test_flags_of_a_row_say_its_shards() -> None:
    rows = search(replace(SMALL, vocabulary_parallel=("1", "2")), num_rows=40).rows
    setups = [row.prediction.setup for row in rows]
    assert {setup.input_shards for setup in setups} == {False, True}
    for setup in setups:
        flags = megatron_flags(setup)
        assert flags[flags.index("--bpipe-vocabulary") + 1] == setup.vocabulary.value
        assert ("--bpipe-vocabulary-input" in flags) == setup.input_shards
        read = read_command(flags).options
        assert read["vocabulary_parallel"] == setup.vocabulary.value
        assert bool(read.get("input_shards")) == setup.input_shards
        assert f"vocabulary {setup.vocabulary.value}" in describe(setup)
