"""FP8: what a layer keeps by hand, which copies of weights there are, what is faster and what is not, what is
refused, what is emitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.predict import predict
from bpipe.plan.standings import needs_of_setup
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.cluster_file import read_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.fp8 import Fp8
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.attention import core_seconds
from bpipe.predict.layers.ends import output_seconds
from bpipe.predict.layers.layer import layer_saved, layer_seconds
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.matmul import layer_products
from bpipe.predict.memory import predict_memory, state_bytes
from bpipe.predict.model import PRESETS
from bpipe.predict.parameters import layer_parameters
from bpipe.predict.rates import PRODUCT_EFFICIENCY, Rates
from bpipe.predict.saved_tensors import stage_bytes
from bpipe.predict.sizes import sent_bytes, total
from bpipe.predict.states import rank_parameters, stage_matrices, weight_bytes
from bpipe.predict.switches import Switches
from bpipe.predict.tensor_parallel import gather_s
from tests.unit.predict.published import DEEPSEEK_V3, MIXTRAL_8X7B

PLAIN = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 4, 8, 1, 128, 8192, (10,) * 8, recompute="none")
DELAYED = replace(PLAIN, fp8=Fp8())
B200 = parse_cluster("b200-180g:8x8")


def test_a_layer_keeps_what_enters_its_matrices_in_8_bit() -> None:
    """By hand, of a token: two norms' inputs in 16 bit; queries, keys and values; what attention gives, in 16 bit
    for itself and in 8 for the projection; the gated halves in 16 bit; what enters the four matrices in 8."""
    tokens, hidden, ffn, t = 8192, 8192, 28672, 4
    lse = 4 * 64 * tokens // t
    wide = tokens * (2 * 2 * hidden + 2 * (hidden + 2048) + 2 * hidden + 2 * 2 * ffn) // t
    assert total(layer_saved(DELAYED)) == wide + tokens * (2 * hidden + hidden + ffn) // t + lse
    assert total(layer_saved(PLAIN)) == wide + tokens * (2 * 2 * hidden + 2 * ffn) // t + lse
    # Blocks of 128 have a scale of four bytes, those of 32 one of a byte.
    blocks = [
        total(layer_saved(replace(DELAYED, cluster=B200, fp8=Fp8(recipe=recipe)))) for recipe in ("blockwise", "mxfp8")
    ]
    assert blocks == [wide + tokens * (3 * hidden + ffn) // t * 33 // 32 + lse] * 2
    # A recomputed layer's input is none of that, nor what passes between stages.
    assert stage_bytes(replace(DELAYED, recompute="full")) == stage_bytes(replace(PLAIN, recompute="full"))
    assert sent_bytes(DELAYED) == sent_bytes(PLAIN)


@pytest.mark.parametrize("model", [DEEPSEEK_V3, MIXTRAL_8X7B])
def test_experts_and_latent_attention_keep_less_too(model: Any) -> None:
    layers = tuple(model.num_layers // 8 + (stage < model.num_layers % 8) for stage in range(8))
    wide = Setup(model, parse_cluster("h100-80g:8x8"), 1, 8, 1, 64, 4096, layers, recompute="none", routing=Routing(8))
    low = replace(wide, fp8=Fp8())
    for kind, _ in model.kinds():
        names = {row.name for row in layer_saved(low, None, kind)}
        assert total(layer_saved(low, None, kind)) < total(layer_saved(wide, None, kind))
        assert "inputs of the matrices behind them, in FP8" in names
    matrices = sum(stage_matrices(low))
    down = 0 if model.latent is None else model.hidden_size * model.latent.down_size
    kinds = [(layer_parameters(model, kind), number) for kind, number in model.kinds()]
    assert matrices == sum(number * (one.matrices + down + one.experts // 8) for one, number in kinds)


def test_weights_are_there_in_8_bit_besides_or_alone() -> None:
    """Hopper multiplies one layout alone and keeps both; Blackwell multiplies any, but scales in blocks lie along
    the sum."""
    every = [rank_parameters(PLAIN)[0], stage_matrices(DELAYED)[0]]
    for cluster, fp8, wanted in (
        (PLAIN.cluster, None, 2 * every[0]),
        (PLAIN.cluster, Fp8(), 2 * every[0] + 2 * every[1]),
        (PLAIN.cluster, Fp8(param_gather=True), 2 * every[0]),
        (B200, Fp8(recipe="tensorwise"), 2 * every[0] + every[1]),
        (B200, Fp8(recipe="tensorwise", param_gather=True), 2 * every[0] - every[1]),
        (B200, Fp8(recipe="mxfp8"), 2 * every[0] + 2 * every[1] * 33 // 32),
        (B200, Fp8(recipe="mxfp8", param_gather=True), 2 * every[0] + every[1] // 16),
    ):
        setup = replace(PLAIN, cluster=cluster, fp8=fp8)
        assert weight_bytes(setup)[0] == wanted
        row = predict_memory(setup)[0]
        assert row.weights_bytes == wanted
        assert (row.gradients_bytes, row.optimizer_bytes) == (4 * every[0], predict_memory(PLAIN)[0].optimizer_bytes)
        assert state_bytes(setup) == max(one.state_bytes + one.overhead_bytes for one in predict_memory(setup))
    # Biases and norms are of no matrix.
    found = layer_parameters(PLAIN.model)
    assert every[1] == 10 * found.matrices // 4


def test_products_of_layers_are_faster_and_nothing_else_is() -> None:
    peak = DELAYED.cluster.device.fp8_flops_per_s
    assert peak == 1979e12 == DELAYED.peak_flops_per_s
    assert Rates.of(DELAYED).low == pytest.approx(peak * 0.734 * PRODUCT_EFFICIENCY)
    plain, delayed = layer_products(PLAIN), layer_products(DELAYED)
    for wide, low in zip(plain.entering + plain.returning, delayed.entering + delayed.returning, strict=True):
        assert low.weight_s < 0.56 * wide.weight_s
        # Results are written in 16 bit all the same.
        assert 0.5 * wide.forward_s < low.forward_s < 0.7 * wide.forward_s
    assert output_seconds(DELAYED) == output_seconds(PLAIN)
    assert core_seconds(DELAYED, Rates.of(DELAYED)) == core_seconds(PLAIN, Rates.of(PLAIN))
    times = [layer_seconds(replace(PLAIN, fp8=fp8)) for fp8 in (None, Fp8(recipe="tensorwise"), Fp8())]
    assert times[0][0] > times[1][0] > times[2][0], "tensorwise reads twice"
    assert times[0][1] > times[1][1] > times[2][1]
    assert gather_s(DELAYED, low=True) < 0.6 * gather_s(DELAYED) == 0.6 * gather_s(PLAIN)
    # MFU is of the peak of 8 bit: with less time it is less all the same.
    assert predict(DELAYED).timing.iteration_s < predict(PLAIN).timing.iteration_s
    assert predict(DELAYED).mfu < predict(PLAIN).mfu


def test_what_is_gathered_after_an_update() -> None:
    """Weights in 8 bit alone pass so, but for those in small blocks, which pass in 16; without, each is written anew
    once an iteration."""
    late = replace(PLAIN, cluster=B200, switches=Switches(overlap_grad_reduce=True))

    def update(fp8: Fp8 | None) -> float:
        return float(predict_costs(replace(late, fp8=fp8)).stages[1].optimizer_s)

    plain = update(None)
    assert update(Fp8(recipe="tensorwise", param_gather=True)) < plain < update(Fp8(recipe="tensorwise"))
    assert update(Fp8(recipe="mxfp8", param_gather=True)) == plain
    reductions = {
        float(predict_costs(replace(late, fp8=fp8)).stages[1].reduction_s)
        for fp8 in (None, Fp8(), Fp8(param_gather=True))
    }
    assert len(reductions) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster": parse_cluster("a100-80g:8x8")}, "a100-80g has no known FP8 support"),
        ({"fp8": Fp8(recipe="mxfp8")}, "h100-80g has no mxfp8, which came with Blackwell"),
        ({"precision": "fp32"}, "FP8 is for training in bf16 or fp16"),
        (
            {"fp8": Fp8(param_gather=True), "distributed_optimizer": False},
            "--fp8-param-gather is for the distributed optimizer",
        ),
        ({"schedule": "zb-h1"}, "zb-h1 splits backwards, whose memory in FP8 is not modelled"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(DELAYED, **changes)
    with pytest.raises(ValueError, match="unknown fp8 recipe 'custom'"):
        Fp8(recipe="custom")


def test_a_plan_says_that_the_trainer_checks_what_moves() -> None:
    plain = megatron_flags(replace(PLAIN, fp8=Fp8(recipe="tensorwise", param_gather=True)))
    assert plain[plain.index("--fp8-format") :][:5] == [
        "--fp8-format",
        "hybrid",
        "--fp8-recipe",
        "tensorwise",
        "--fp8-param-gather",
    ]
    assert any("--bpipe-verify" in need for need in needs_of_setup(replace(DELAYED, balance=EVENLY)))
    # Where nothing moves there is nothing to check.
    for other in (DELAYED, replace(DELAYED, schedule="gpipe"), replace(PLAIN, balance=EVENLY)):
        assert not any("--bpipe-verify" in need for need in needs_of_setup(other))


def test_commands_take_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["--model", "llama3-8b", "--cluster", "h100-80g:8", "--gbs", "32"]
    assert main(["simulate", *common, "--tp", "2", "--pp", "2", "--fp8-format", "hybrid", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_flops_per_s"] == 1979e12
    wanted = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": False}
    assert wanted.items() <= found["configuration"].items()
    assert main(["simulate", *common, "--pp", "4", "--fp8-format", "hybrid", "--balance", "bpipe"]) == 0
    assert "comes back unchanged (--bpipe-verify)" in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", *common, "--pp", "2", "--fp8-param-gather"]) == 2
    assert "give --fp8-format, too" in capsys.readouterr().err
    plan = ["plan", *common, "--fp8-format", "hybrid", "--max-micro-batch", "1", "--rows", "1"]
    assert main([*plan, "--format", "json"]) == 0
    families = {one["schedule"] for one in json.loads(capsys.readouterr().out)["families"]}
    assert "1f1b" in families
    assert not {"zb-h1", "zb-v", "v-half"} & families
    assert main([*plan, "--schedule", "zb-h1"]) == 2
    assert "zb-h1 splits backwards" in capsys.readouterr().err
    # A device of one's own.
    path = tmp_path / "cluster.toml"
    path.write_text('nodes = 1\ngpus_per_node = 8\n[device]\nlike = "a100-80g"\nfp8_tflops = 600\n')
    assert read_cluster(path).device.fp8_flops_per_s == 600e12
    assert (
        main(["simulate", *common[:2], "--cluster", str(path), *common[4:], "--pp", "2", "--fp8-format", "e4m3"]) == 0
    )
