"""The vocabulary in shards as candidates of the search: those that the trainer has, the first rows those of
simulating all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from bpipe.generate.families import FAMILIES, SEARCHED
from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup
from bpipe.models.memory import least_bytes, least_shared_bytes, peak_bytes
from bpipe.models.model import gpt
from bpipe.models.warm_up import least_warm_bytes
from bpipe.plan.bounds import Bounds, lower_bound_s
from bpipe.plan.explain import describe
from bpipe.plan.predict import costs_of
from bpipe.plan.search import every_setup
from bpipe.plan.space import VOCABULARIES, Space
from bpipe.plan.timing import steady_timing

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
