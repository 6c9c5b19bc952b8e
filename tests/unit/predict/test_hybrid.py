"""Hybrid models: parameters as published, FLOPs as Megatron counts them, what layers of one part save and take, and
what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.predict.activations import after_input_bytes, stage_bytes, stage_saved
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.flops import layer_parameters, training_flops
from bpipe.predict.layer_variants import Experts, Hybrid, LayerKind, Routing
from bpipe.predict.layers.layer import every_seconds, layer_bytes, layer_saved, layer_seconds
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.memory import predict_memory, working_bytes
from bpipe.predict.model import Model, gpt
from bpipe.predict.sizes import total
from bpipe.predict.states import stage_parameters
from bpipe.predict.training import Fp8
from tests.support.predicted import num_parameters
from tests.unit.predict.published import NEMOTRON_3_NANO, NEMOTRON_H_8B, NEMOTRON_NANO_9B

MAMBA, ATTENTION, MLP = (LayerKind(symbol=symbol) for symbol in "M*-")


def setup_of(model: Model, p: int = 4, t: int = 1, **changes: Any) -> Setup:
    layers = split_layers(model.num_layers, p, allow_uneven=True)
    assert layers is not None
    choices = {"recompute": "none", **changes}
    return Setup(model, parse_cluster("h100-80g:2x8"), t, p, 1, 64, model.sequence, layers, **choices)


@pytest.mark.parametrize(
    ("model", "billions"),
    [(NEMOTRON_H_8B, 8.101), (NEMOTRON_NANO_9B, 8.888), (NEMOTRON_3_NANO, 31.578)],
    ids=lambda value: getattr(value, "name", None),
)
def test_as_many_parameters_as_published(model: Model, billions: float) -> None:
    assert num_parameters(model) / 1e9 == pytest.approx(billions, abs=0.003)


def test_a_mamba_layers_parameters_by_hand() -> None:
    """Shape by shape, as Nemotron-H 8B's safetensors have them: 8192 through states, 8 groups of 128."""
    convolved = 8192 + 2 * 8 * 128
    matrices = (8192 + convolved + 128) * 4096 + 4096 * 8192
    small = convolved * 4 + convolved + 3 * 128 + 8192
    assert layer_parameters(NEMOTRON_H_8B, MAMBA) == (matrices, small, 4096, 0)
    assert layer_parameters(NEMOTRON_H_8B, ATTENTION) == (4096 * (2 * 4096 + 2 * 1024), 0, 4096, 0)
    assert layer_parameters(NEMOTRON_H_8B, MLP) == (2 * 4096 * 21504, 0, 4096, 0)


@pytest.mark.usefixtures("megatron_patterns")
@pytest.mark.parametrize("model", [NEMOTRON_H_8B, NEMOTRON_NANO_9B, NEMOTRON_3_NANO], ids=lambda model: model.name)
def test_flops_are_megatrons(
    model: Model, megatron_flops: Callable[..., float], megatron_args: Callable[[Any], Any]
) -> None:
    """By default Megatron takes states to be twice as wide as the hidden size; Nemotron Nano 9B's are 2.29 times."""
    hybrid = model.hybrid
    assert hybrid is not None
    args = megatron_args(setup_of(model, p=1))
    args.hybrid_layer_pattern = hybrid.pattern
    args.mamba_state_dim, args.mamba_head_dim = hybrid.state_dim, hybrid.head_dim
    args.mamba_num_groups, args.mamba_num_heads = hybrid.num_groups, hybrid.num_heads
    for name in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim"):
        setattr(args, f"linear_{name}", None)
    assert training_flops(model, 64, model.sequence, args.padded_vocab_size) == pytest.approx(
        megatron_flops(args, 64), rel=1e-12
    )


# GPT's sizes, whole and with attention and MLP as layers of their own.
WHOLE = replace(gpt("whole", 4, 512, 8, 1000, 256), linear_bias=False)
APART = replace(WHOLE, name="apart", num_layers=8, hybrid=Hybrid("*-" * 4, 16))


@pytest.mark.parametrize(
    "more",
    [
        {"fp8": Fp8()},
        *(
            {"kernels": kernels, "recompute": recompute, "attention": "unfused"}
            for kernels in ("gpu", "cpu")
            for recompute in ("none", "selective", "selective:core_attn+mlp+layernorm")
        ),
    ],
    ids=str,
)
def test_attention_and_mlp_apart_are_a_layer(more: dict[str, Any]) -> None:
    """In parameters, FLOPs, seconds, and bytes: of weights, saved, and between the halves of a backward."""
    whole, apart = setup_of(WHOLE, 2, 2, **more), setup_of(APART, 2, 2, **more)
    assert num_parameters(WHOLE) == num_parameters(APART)
    assert training_flops(WHOLE, 4, 256, 1000) == training_flops(APART, 4, 256, 1000)
    assert stage_parameters(whole) == stage_parameters(apart)
    assert stage_bytes(whole) == stage_bytes(apart)
    assert after_input_bytes(whole) == after_input_bytes(apart)
    assert [row.weights_bytes for row in predict_memory(whole)] == [row.weights_bytes for row in predict_memory(apart)]
    for ours, theirs in zip(predict_costs(apart).stages, predict_costs(whole).stages, strict=True):
        assert (ours.forward_s, ours.backward_s, ours.weight_s) == pytest.approx(
            (theirs.forward_s, theirs.backward_s, theirs.weight_s)
        )


def test_stages_have_their_own_layers() -> None:
    setup = setup_of(NEMOTRON_H_8B)
    kinds = [{kind: number for kind, _, number in layers} for layers in setup.stage_layers]
    assert kinds[:2] == [{MAMBA: 6, MLP: 6, ATTENTION: 1}] * 2
    assert tuple(total(stage_saved(setup, stage)) for stage in range(4)) == stage_bytes(setup)
    seconds = {kind: layer_seconds(setup, kind) for kind in (MAMBA, ATTENTION, MLP)}
    assert predict_costs(setup).stages[1].forward_s == pytest.approx(
        6 * seconds[MAMBA][0] + 6 * seconds[MLP][0] + seconds[ATTENTION][0], rel=1e-12
    )
    assert sum(every_seconds(setup, MAMBA)[2:]) == pytest.approx(seconds[MAMBA][1])
    assert layer_bytes(setup) == total(layer_saved(setup, None, MAMBA))
    assert working_bytes(replace(setup, recompute="full")) > working_bytes(setup)


def test_a_mamba_layer_takes_its_scan_besides_its_matrices() -> None:
    """A state twice as large has more to multiply and write, and hardly wider matrices."""
    model = NEMOTRON_H_8B
    assert model.hybrid is not None
    wide = replace(model, hybrid=replace(model.hybrid, state_dim=256))
    plain, wider = (layer_seconds(setup_of(variant), MAMBA) for variant in (model, wide))
    assert 1.02 < wider[0] / plain[0] < 1.6
    assert 2 < plain[1] / plain[0] < 4


def test_experts_alone() -> None:
    setup = setup_of(NEMOTRON_3_NANO, routing=Routing(4))
    kind = LayerKind(True, None, "E")
    assert kind in {kind for kind, *_ in setup.stage_layers[0]}
    assert layer_parameters(NEMOTRON_3_NANO, kind).experts == 128 * 2 * 2688 * 1856
    assert predict_memory(setup)[0].weights_bytes > 0
    assert layer_seconds(setup, kind)[0] > 0


@pytest.mark.parametrize(
    ("pattern", "changes", "message"),
    [
        ("MGM", {}, "gated delta nets"),
        ("M+", {}, "latent attention"),
        ("MD", {}, "sparse attention"),
        ("M*/M", {}, "prediction of further tokens"),
        ("MX", {}, "'X', which is not a layer: known layers are M"),
        ("", {}, "has 0 layers, but must have 1"),
        ("M", {"state_dim": 0}, "state_dim of Mamba layers is 0, but must be at least 1"),
        ("M", {"num_groups": 3}, "the 3 groups of Mamba layers do not divide their 16 heads"),
    ],
)
def test_unknown_patterns_are_refused(pattern: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hybrid(pattern, 16, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid": Hybrid("*-", 16)}, "the pattern has 2 layers, not 8"),
        ({"hybrid": Hybrid("*E" * 4, 16)}, "give both or neither"),
        ({"experts": Experts(8, 2, 512)}, "give both or neither"),
        ({"no_positions": True}, "learned positions and no positions exclude each other"),
    ],
)
def test_contradicting_hybrid_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(APART, **changes)


def test_mamba_layers_are_not_divided_by_context_or_groups() -> None:
    model = replace(APART, hybrid=Hybrid("M*M-M*M-", 16))
    with pytest.raises(ValueError, match="choose kernels gpu"):
        setup_of(model, kernels="cpu", attention="unfused")
    with pytest.raises(ValueError, match="context parallel 1, not 2"):
        setup_of(model, 4, 2, context=2)
    with pytest.raises(ValueError, match="does not divide 16 heads and 2 groups"):
        setup_of(replace(model, hybrid=Hybrid("M*M-M*M-", 16, num_groups=2)), 4, 4)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_layers_are_megatrons_own() -> None:
    """Parameters of every kind, Mamba's by Megatron's `MambaMixer`."""
    program = Path(__file__).with_name("check_hybrid.py")
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=220, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "10 models, 0 differences"
