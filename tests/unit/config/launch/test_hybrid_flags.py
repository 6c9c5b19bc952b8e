"""Launches of hybrid models, read and written: patterns and stages as in Megatron, refusals, and what a plan
searches."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bpipe.cli import main
from bpipe.config.launch.megatron_command import Reading, read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.options import setup_from
from bpipe.plan.space import CUTS, Space
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layer_variants import Experts, Hybrid
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model
from tests.support.predicted import enumerate_setups
from tests.unit.config.launch.test_megatron_command import setups
from tests.unit.predict.published import NEMOTRON_3_NANO, NEMOTRON_H_8B

SIZES = ["--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "128", "--vocab-size", "1000"]
STACK = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")


def read(*flags: str) -> Reading:
    return read_command([*SIZES, *flags])


@st.composite
def hybrids(draw: st.DrawFn) -> Setup:
    setup = draw(setups().filter(lambda setup: setup.context == 1))
    pattern = "".join(draw(st.text("M*-E", min_size=number, max_size=number)) for number in setup.layers)
    # The one pattern that Megatron cannot be given.
    assume(pattern != "--")
    hybrid = Hybrid(pattern, draw(st.sampled_from([8, 16])), 64, 32, draw(st.sampled_from([4, 8])))
    changes: dict[str, Any] = {"hybrid": hybrid, "experts": Experts(8, 2, 256) if "E" in pattern else None}
    changes |= {} if setup.model.gated else {"squared_relu": draw(st.booleans())}
    changes |= {} if setup.model.learned_positions else {"no_positions": draw(st.booleans())}
    parallel = setup.tensor > 1 and ("E" in pattern or setup.sequence_parallel)
    return replace(setup, model=replace(setup.model, **changes), sequence_parallel=parallel)


@settings(deadline=None, max_examples=100)
@given(hybrids())
def test_what_we_write_we_read(setup: Setup) -> None:
    """The flags name the expert tensor parallelism, which a setup may leave at its default."""
    flags = megatron_flags(setup)
    result = setup_from(flags, setup.cluster, 1000, "gpu")
    if setup.model.experts is not None:
        setup = replace(setup, routing=replace(setup.routing, expert_tensor=setup.expert_tensor))
    assert result == setup
    assert read_command([*flags, "--vocab-size", "1000"]).not_considered == ()


@pytest.mark.parametrize("model", [NEMOTRON_H_8B, NEMOTRON_3_NANO], ids=lambda model: model.name)
def test_published_models_come_back(model: Model) -> None:
    setup = Setup(model, parse_cluster("h100-80g:1x4"), 1, 4, 1, 8, 8192, (13,) * 4, "none")
    assert replace(setup_from(megatron_flags(setup), setup.cluster, 131072, "gpu").model, name=model.name) == model


def test_what_megatron_takes_for_granted() -> None:
    """The old flag and stack, a number of layers that the pattern overrides, and heads for twice the hidden size."""
    words = ("--hybrid-override-pattern", "M-M*", "--is-hybrid-model", "--num-layers", "8", "--mamba-head-dim", "128")
    result = read(
        *words,
        "--spec",
        "megatron.core.models.mamba.mamba_layer_specs",
        "mamba_stack_spec",
        "--position-embedding-type",
        "none",
    )
    assert result.options["hybrid"] == Hybrid("M-M*", 8, 128, 128, 8)
    assert result.options["num_layers"] == 4
    assert result.options["no_positions"] is True
    assert any("has 4 layers, and Megatron uses those instead of --num-layers 8" in note for note in result.notes)


SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs"
# Flags, and a part of the message; the last row is for argparse before Python 3.13.
REFUSED = rf"""
--hybrid-layer-pattern M*/M/M: --hybrid-layer-pattern M*/M/M: the pattern has '/': prediction of further tokens (/)
--hybrid-layer-pattern MG: gated delta nets
--hybrid-layer-pattern M --hybrid-override-pattern M: exclude each other
--hybrid-layer-pattern M* {SPEC} hybrid_inference_stack_spec: of a custom specification
--num-layers 2 {SPEC} hybrid_stack_spec: of a custom specification
--num-layers 2 --is-hybrid-model: --is-hybrid-model does not say which layers the model has
--hybrid-layer-pattern M* --transformer-impl inference_optimized: for inference
--hybrid-layer-pattern M*M* --num-virtual-stages-per-pipeline-rank 2: stages begin where it has a |
--hybrid-layer-pattern M|* --decoder-first-pipeline-num-layers 1 --pipeline-model-parallel-size 2: drop the other flags
--hybrid-layer-pattern M|*|M --pipeline-model-parallel-size 2: has 3 stages, not a multiple of
--hybrid-layer-pattern M||* --pipeline-model-parallel-size 3: stage 1 has no layer
--hybrid-layer-pattern M*M --pipeline-model-parallel-size 2: cannot be divided evenly over
--hybrid-layer-pattern M* --num-experts 8: no layer of --hybrid-layer-pattern has experts (E)
--hybrid-layer-pattern M* --mamba-head-dim 48: --mamba-head-dim 48 does not divide
--hybrid-layer-pattern M* --disable-mamba-mem-eff-path: kernels of Mamba layers that keep more
--hybrid-layer-pattern=--: two MLPs alone cannot be given
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED[: -1 if sys.version_info >= (3, 13) else None])
def test_what_is_not_modelled_or_not_megatrons_is_refused(row: str) -> None:
    flags, _, message = row.partition(": ")
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*flags.split())


def test_no_cut_is_searched_that_mamba_layers_do_not_take() -> None:
    """The model has two groups of heads, and the sequence is long enough for context parallelism."""
    model = replace(NEMOTRON_H_8B, num_layers=4, hybrid=Hybrid("M*M-", 128, num_groups=2), sequence=65536)
    space = Space(
        model, parse_cluster("h100-80g:1x8"), 64, 65536, max_micro_batch=1, schedules=("1f1b",), contexts=(1, 2, 4)
    )
    cuts: Counter[str] = Counter()
    assert {(setup.tensor, setup.context) for setup in enumerate_setups(space, cuts)} == {(1, 1), (2, 1)}
    assert cuts["mamba"] > 0
    assert set(cuts) <= set(CUTS)


def test_simulate_and_plan_of_a_launch(capsys: pytest.CaptureFixture[str]) -> None:
    launch = [
        "--",
        *SIZES,
        *"--pipeline-model-parallel-size 2 --bf16 --hybrid-layer-pattern M-M*|M-M- --spec".split(),
        *STACK,
    ]

    def output(command: str) -> str:
        assert main([*command.split(), "--cluster", "h100-80g:1x2", *launch]) == 0
        return capsys.readouterr().out

    assert json.loads(output("simulate --format json"))["configuration"]["pattern"] == "M-M*|M-M-"
    assert "--hybrid-layer-pattern" in output("plan --rows 1 --emit-args 1 --gbs 8")
    rows = output("plan --rows 50 --schedule interleaved-1f1b --gbs 8")
    assert "--hybrid-layer-pattern 'M-|M*|M-|M-'" in rows
    assert "--num-layers-per-virtual-pipeline-stage" not in rows
    assert json.loads(output("simulate --schedule zb-v --format json"))["configuration"]["pattern"] == "M-|M*|M-|M-"
