"""FP8: what a layer keeps by hand, which copies of weights there are, what is faster and what is not, what is
refused, what is emitted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.cluster_file import read_cluster
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.layer import layer_saved
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.parameters import layer_parameters
from bpipe.predict.sizes import total
from bpipe.predict.states import stage_matrices
from bpipe.predict.training import Fp8
from tests.unit.predict.published import DEEPSEEK_V3, MIXTRAL_8X7B

PLAIN = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 4, 8, 1, 128, 8192, (10,) * 8, recompute="none")
DELAYED = replace(PLAIN, fp8=Fp8())


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
