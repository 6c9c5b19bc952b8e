"""Rows of plans start in the trainer: shrunk to what a CPU trains, with the schedule, cut, balancing and shards of the
row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bpipe.launch.megatron_flags import megatron_flags
from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup
from bpipe.models.model import PRESETS
from bpipe.models.switches import Switches
from bpipe.plan.search import search
from bpipe.plan.space import Space
from tests.gloo.conftest import Case, Outcome

SHARE = {"gpt3-13b": "a100-80g:8", "llama3-8b": "h100-80g:4"}


def rows(model: str, device: str) -> list[Setup]:
    """The fastest row of each family, plain and balanced, of as many ranks as a test starts."""
    space = Space(
        PRESETS[model],
        parse_cluster(device),
        64,
        2048,
        schedules=("1f1b", "interleaved-1f1b", "grouped-interleaved", "v-half", "zb-h1"),
        max_micro_batch=1,
        max_chunks=2,
        pipelines=(4,),
        tensors=(1,),
        vocabulary_parallel=("none", "1"),
        distributed_optimizer=False,
    )
    best: dict[object, Setup] = {}
    for found in search(space, 200).rows:
        setup = found.prediction.setup
        best.setdefault((setup.schedule, setup.balance, setup.is_sharded), setup)
    return list(best.values())


def shrunk(setup: Setup) -> Setup:
    """A layer a stage, of a small model, in 32 bit, as a machine without a GPU trains it."""
    model = replace(
        setup.model,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=128,
        vocabulary=128,
        num_layers=setup.num_stages,
    )
    return replace(
        setup,
        model=model,
        cluster=parse_cluster(f"a100-80g:{setup.pipeline}"),
        global_batch=2 * setup.pipeline * setup.micro_batch,
        sequence=64,
        layers=(1,) * setup.num_stages,
        recompute="none",
        attention="unfused",
        kernels="cpu",
        precision="fp32",
        sequence_parallel=True,
        switches=Switches(),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", SHARE)
def test_rows_start_in_the_trainer(model: str, run_cases: Callable[..., Outcome]) -> None:
    found = rows(model, SHARE[model])
    assert {setup.is_sharded for setup in found} == {True, False}
    cases = [Case(f"row{number}", megatron_flags(shrunk(setup))) for number, setup in enumerate(found)]
    done = run_cases(4, cases, 500.0)
    for case in cases:
        assert len(done.record(case.name, 0)["iterations"]) == 3, " ".join(case.arguments)
