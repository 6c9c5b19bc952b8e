"""Printed plans, shrunk to what a CPU trains, start in the trainer with their schedule, cut, balancing and shards."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.options import setup_from
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.training import Switches
from tests.gloo.conftest import Case, Outcome
from tests.unit.plan.test_printed_rows import DEVICES, MODELS, of_all_rows, output_of, rows_of


def shrunk(setup: Setup) -> Setup:
    """Shrink a setup for a CPU: a small model in 32 bits, a layer per stage, at most four ranks, and smaller groups."""
    pipeline = min(setup.pipeline, 4)
    num_stages = pipeline * setup.num_chunks
    group = None if setup.group_size is None else max(1, setup.group_size * pipeline // setup.pipeline)
    model = replace(
        setup.model,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=128,
        vocabulary=128,
        num_layers=num_stages,
    )
    return replace(
        setup,
        model=model,
        cluster=parse_cluster(f"a100-80g:{pipeline}"),
        tensor=1,
        context=1,
        pipeline=pipeline,
        group_size=group,
        micro_batch=1,
        global_batch=2 * pipeline,
        sequence=64,
        layers=(1,) * num_stages,
        recompute="none",
        attention="unfused",
        kernels="cpu",
        precision="fp32",
        sequence_parallel=True,
        switches=Switches(),
    )


def start(run_cases: Callable[..., Outcome], world: int, cases: Sequence[Case]) -> None:
    done = run_cases(world, cases, 500.0)
    for case in cases:
        assert len(done.record(case.name, 0)["iterations"]) == 3, case.flags


def printed(model: str, device: str, capsys: pytest.CaptureFixture[str]) -> list[Setup]:
    """Return the setups in the choices and rows that `bpipe plan` prints for a model on a device."""
    _, text = output_of(["plan", "--model", model, "--cluster", device, "--gbs", "128", "--rows", "3"], capsys)
    choices = [[*of_all_rows(text), *shlex.split(flags)] for flags in re.findall(r"^\w+: (--.*)$", text, re.MULTILINE)]
    launches = [*choices, *(row.flags for row in rows_of(text))]
    return [setup_from(flags, device, PRESETS[model].vocabulary, "gpu") for flags in launches]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_is_printed_of_every_model_on_every_device_starts_in_the_trainer(
    run_cases: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [(model, device) for model in MODELS for device in DEVICES]
    answered = [setups for model, device in pairs if (setups := printed(model, device, capsys))]
    assert len(answered) >= 20
    # Many are equal after shrinking.
    unique_setups = dict.fromkeys(shrunk(setup) for setups in answered for setup in setups)
    for world in sorted({setup.pipeline for setup in unique_setups}):
        flags = [shlex.join(megatron_flags(setup)) for setup in unique_setups if setup.pipeline == world]
        start(run_cases, world, [Case(f"row{number}", words) for number, words in enumerate(flags)])
