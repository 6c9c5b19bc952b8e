"""Models from Hugging Face's files: parameters as their authors count them, what differs from LLaMA, and refusals by
name."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.options import setup_from
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.hugging_face import find_model
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.attention import core_seconds
from bpipe.predict.layers.layer import layer_seconds
from bpipe.predict.layout import Setup, split_layers
from bpipe.predict.model import Model
from bpipe.predict.sizes import Rates
from bpipe.predict.states import rank_parameters
from tests.support.predicted import num_parameters

NAMES = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size".split()
LINES = (Path(__file__).resolve().parents[2] / "data" / "hugging_face.csv").read_text().splitlines()
MODELS = {
    row["name"]: row for row in csv.DictReader((line for line in LINES if not line.startswith("#")), delimiter=";")
}
# Models whose launches give more than sizes and switches.
UNLIKE = [name for name, row in MODELS.items() if any(key in row["others"] for key in ("experts", "lora", "window"))]


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    row = MODELS[name]
    pairs = dict(pair.split("=", 1) for pair in row["others"].split())
    others = {
        key: json.loads(value) if re.match(r"[\d\[tfn]", value) and key != "model_type" else value
        for key, value in pairs.items()
    }
    sizes = {key: int(row[key]) for key in NAMES if row[key]}
    return {**others, **sizes, "max_position_embeddings": 4096, **changes}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def model_of(folder: Path, name: str, **changes: Any) -> Model:
    return replace(find_model(written(folder, config_of(name, **changes))), name="custom")


def setup_of(model: Model, **changes: Any) -> Setup:
    layers = split_layers(model.num_layers, 4, allow_uneven=True)
    assert layers is not None
    return Setup(model, parse_cluster("h100-80g:8"), 2, 4, 1, 16, **{"sequence": 4096, "layers": layers, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_as_many_parameters_as_its_authors_count(name: str, tmp_path: Path) -> None:
    rel = 0.005 if name in UNLIKE else 0.003
    assert num_parameters(model_of(tmp_path, name)) / 1e9 == pytest.approx(float(MODELS[name]["billions"]), rel=rel)


def test_parameters_are_exact(tmp_path: Path) -> None:
    """As transformers counts them, biases and norms of heads included."""
    assert num_parameters(model_of(tmp_path, "Qwen2.5-0.5B")) == 494_032_768
    assert num_parameters(model_of(tmp_path, "Llama-3.1-8B")) == 8_030_261_248


def test_chunks_of_attention_are_refused_where_they_matter(tmp_path: Path) -> None:
    model = model_of(tmp_path, "Llama-4-Scout")
    assert setup_of(model).sequence == 4096
    with pytest.raises(ValueError, match=r"attends within chunks of 8192 tokens, .*: give --seq 8192 or less"):
        setup_of(model, sequence=16384)


@pytest.mark.parametrize("name", UNLIKE)
def test_a_launch_says_the_same_of_layers(name: str, tmp_path: Path) -> None:
    """Through Megatron's flags and back: experts, latent attention, windows and routing."""
    model = model_of(tmp_path, name)
    routing = Routing(2, 1, "flex", 1.25, True) if model.experts else Routing()
    ours = setup_of(model, routing=routing)
    options = read_command(megatron_flags(ours)).options
    assert (options.get("experts"), options.get("latent"), options.get("window")) == (
        model.experts,
        model.latent,
        model.window,
    )
    assert options.get("routing", Routing()) == routing
    assert options["qk_layernorm"] is model.qk_norm
    reread = setup_from(
        [*megatron_flags(ours), "--vocab-size", str(model.vocabulary)], ours.cluster, model.vocabulary, "gpu"
    )
    assert [reread.model.kind(layer) for layer in range(model.num_layers)] == [
        model.kind(layer) for layer in range(model.num_layers)
    ]
    assert rank_parameters(reread) == rank_parameters(ours)
    assert layer_seconds(reread) == layer_seconds(ours)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("Nemotron-4 15B", ["--squared-relu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]),
        ("Qwen2.5-72B", ["--swiglu", "--add-qkv-bias", "--disable-bias-linear"]),
        ("Qwen3-32B", ["--swiglu", "--qk-layernorm"]),
    ],
)
def test_the_flags_say_which_model_it_is(name: str, flags: list[str], tmp_path: Path) -> None:
    """A launch of Qwen trained without its biases and norms."""
    ours = setup_of(model_of(tmp_path, name))
    words = megatron_flags(ours)
    switches = {"--squared-relu", "--swiglu", "--add-qkv-bias", "--qk-layernorm"}
    assert set(flags) <= set(words)
    assert switches & set(words) == switches & set(flags)
    options = read_command(words).options
    model = ours.model
    assert (options["squared_relu"], options["add_qkv_bias"], options["qk_layernorm"]) == (
        model.squared_relu,
        model.qkv_bias,
        model.qk_norm,
    )


def test_windows_make_attention_shorter(tmp_path: Path) -> None:
    """A window of 2048 in 4096 tokens leaves three quarters of causal attention."""
    model = model_of(tmp_path, "Mistral-7B", sliding_window=2048)
    with pytest.raises(ValueError, match="windows are modelled with attention flash only"):
        setup_of(model, attention="unfused")
    ours, rates = setup_of(model), Rates.of(setup_of(model))
    assert core_seconds(ours, rates, 2048)[0] == pytest.approx(0.75 * core_seconds(ours, rates)[0])
    assert layer_seconds(ours)[0] < layer_seconds(setup_of(replace(model, window=None)))[0]
    assert layer_seconds(setup_of(model, sequence=2048)) == layer_seconds(
        setup_of(replace(model, window=None), sequence=2048)
    )
    # Qwen's files name a window, but do not use it.
    assert model_of(tmp_path, "Qwen2.5-72B", sliding_window=2048, use_sliding_window=False).window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts is 8: experts are not modelled in a llama"),
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not modelled, only .*: attention sinks"),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [1]},
            "mlp_only_layers is .1.: single layers",
        ),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok"),
        ({"model_type": "llama4"}, "text_config"),
        ({"model_type": "mamba"}, "give the sizes as flags"),
        ({"model_type": ["llama"]}, "is not modelled"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not modelled in a llama, only silu, swish"),
        ({"attention_bias": True}, "biases in one of the two"),
    ],
)
def test_unmodelled_models_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, config_of("Llama-3.1-8B", **changes))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        find_model(path)


def test_a_file_and_flags_give_the_same_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for a model with squared ReLU, which has a flag."""
    path = written(tmp_path, config_of("Nemotron-4 15B"))
    rest = ["--cluster", "h100-80g:8", "--tp", "8", "--pp", "1", "--gbs", "8", "--format", "json"]
    assert main(["simulate", "--model", path, *rest]) == 0
    by_file = json.loads(capsys.readouterr().out)
    sizes = (
        "--num-layers 32 --hidden-size 6144 --num-attention-heads 48 --num-query-groups 8 --kv-channels 128"
    ).split()
    sizes += (
        "--ffn-hidden-size 24576 --vocab-size 256000 --seq 4096 --squared-relu --disable-bias-linear --rotary"
    ).split()
    assert main(["simulate", *sizes, "--untie-embeddings-and-output-weights", "--no-dropout", *rest]) == 0
    by_flags = json.loads(capsys.readouterr().out)
    assert (by_file["iteration_time_s"], by_file["stages"]) == (by_flags["iteration_time_s"], by_flags["stages"])
    assert main(["simulate", *sizes, "--swiglu", *rest]) == 2
    assert "SwiGLU and squared ReLU exclude each other" in capsys.readouterr().err
