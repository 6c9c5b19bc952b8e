"""Models of Hugging Face's files: as many parameters as their authors say, what differs from LLaMA, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.models.cluster import parse_cluster
from bpipe.models.compute import core_seconds, layer_seconds
from bpipe.models.hugging_face import find_model
from bpipe.models.layout import Setup
from bpipe.models.model import Model
from bpipe.models.parameters import num_parameters
from bpipe.models.rates import Rates
from bpipe.models.saved import layer_bytes
from bpipe.plan.megatron_command import read_command
from bpipe.plan.megatron_flags import megatron_flags
from bpipe.plan.standings import GATED_GELU, needs_of

NAMES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")

# As their config.json on the hub has them, and the parameters that their authors count, in billions. Nemotron-4: its two reports, of which
# the first says 12.5 without embeddings and 3.1 in them, the second 331.6 and 9.4.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...], float]] = {
    "Nemotron-4 15B": ({"model_type": "nemotron", "hidden_act": "relu2"}, (32, 6144, 48, 8, 128, 24576, 256000), 15.6),
    "Nemotron-4 340B": ({"model_type": "nemotron", "hidden_act": "relu2"}, (96, 18432, 96, 8, 192, 73728, 256000), 341.0),
    "Nemotron-Mini-4B": ({"model_type": "nemotron", "hidden_act": "relu2"}, (32, 3072, 24, 8, 128, 9216, 256000), 4.19),
    "Gemma 7B": ({"model_type": "gemma", "hidden_act": "gelu"}, (28, 3072, 16, 16, 256, 24576, 256000), 8.54),
    "Gemma 2B": ({"model_type": "gemma", "hidden_act": "gelu"}, (18, 2048, 8, 1, 256, 16384, 256000), 2.51),
    "Qwen2.5-72B": ({"model_type": "qwen2", "hidden_act": "silu"}, (80, 8192, 64, 8, 128, 29568, 152064), 72.7),
    "Qwen2.5-0.5B": ({"model_type": "qwen2", "tie_word_embeddings": True}, (24, 896, 14, 2, 64, 4864, 151936), 0.494),
    "Qwen3-32B": ({"model_type": "qwen3", "hidden_act": "silu"}, (64, 5120, 64, 8, 128, 25600, 151936), 32.8),
    "Mistral-7B": ({"model_type": "mistral", "hidden_act": "silu"}, (32, 4096, 32, 8, 128, 14336, 32000), 7.24),
    "Llama-3.1-8B": ({"model_type": "llama", "hidden_act": "silu"}, (32, 4096, 32, 8, 128, 14336, 128256), 8.03),
}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    kind, sizes, _ = PUBLISHED[name]
    return {**kind, **dict(zip(NAMES, sizes, strict=True)), "max_position_embeddings": 4096, **changes}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def model_of(folder: Path, name: str, **changes: Any) -> Model:
    return replace(find_model(written(folder, config_of(name, **changes))), name="custom")


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_its_authors_say(name: str, tmp_path: Path) -> None:
    assert num_parameters(model_of(tmp_path, name)) / 1e9 == pytest.approx(PUBLISHED[name][2], rel=0.003)


def test_to_the_last_parameter(tmp_path: Path) -> None:
    """What transformers count of these two, biases and norms of heads included."""
    assert num_parameters(model_of(tmp_path, "Qwen2.5-0.5B")) == 494_032_768
    assert num_parameters(model_of(tmp_path, "Llama-3.1-8B")) == 8_030_261_248


def setup_of(model: Model, **changes: Any) -> Setup:
    p = 4
    values = {"tensor": 2, "pipeline": p, "micro_batch": 1, "global_batch": 16, "sequence": 4096}
    return Setup(model=model, cluster=parse_cluster("h100-80g:8"), layers=(model.num_layers // p,) * p, **{**values, **changes})


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("Nemotron-4 15B", ["--squared-relu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"]),
        ("Qwen2.5-72B", ["--swiglu", "--add-qkv-bias", "--disable-bias-linear"]),
        ("Qwen3-32B", ["--swiglu", "--qk-layernorm"]),
        ("Gemma 7B", ["--swiglu"]),
    ],
)
def test_the_flags_say_which_model_it_is(name: str, flags: list[str], tmp_path: Path) -> None:
    """A launch of Qwen trained without biases, and without its norms."""
    mine = setup_of(model_of(tmp_path, name))
    said = megatron_flags(mine)
    switches = {"--squared-relu", "--swiglu", "--add-qkv-bias", "--qk-layernorm"}
    assert set(flags) <= set(said)
    assert switches & set(said) == switches & set(flags)
    assert (GATED_GELU in needs_of(mine)) == (name == "Gemma 7B")
    options = read_command(said).options
    model = mine.model
    assert (options["squared_relu"], options["add_qkv_bias"], options["qk_layernorm"]) == (
        model.squared_relu,
        model.qkv_bias,
        model.qk_norm,
    )


def test_tied_where_its_kind_ties(tmp_path: Path) -> None:
    """Gemma's file leaves it out, and its class ties."""
    for name, tied in (("Gemma 7B", True), ("Mistral-7B", False), ("Nemotron-4 15B", False)):
        assert model_of(tmp_path, name).tied_embedding is tied
        assert model_of(tmp_path, name, tie_word_embeddings=not tied).tied_embedding is not tied


def test_norms_of_heads_hold_their_inputs_and_take_time(tmp_path: Path) -> None:
    model = model_of(tmp_path, "Qwen3-32B")
    mine, without = (setup_of(one) for one in (model, replace(model, qk_norm=False)))
    # 64 heads and 8 groups of 128 in 16 bit, over two ranks.
    assert layer_bytes(mine) - layer_bytes(without) == 2 * 4096 * (64 + 8) * 128 // 2
    assert all(one > other for one, other in zip(layer_seconds(mine), layer_seconds(without), strict=True))
    assert layer_seconds(mine)[0] < 1.05 * layer_seconds(without)[0]
    with pytest.raises(ValueError, match="kernels of a CPU"):
        setup_of(model, kernels="cpu", attention="unfused")


def test_windows_make_attention_shorter(tmp_path: Path) -> None:
    """Of 4096 tokens a window of 2048 leaves three quarters of the causal half."""
    model = model_of(tmp_path, "Mistral-7B", sliding_window=2048)
    with pytest.raises(ValueError, match="windows and capped attention are modelled with attention flash alone"):
        setup_of(model, attention="unfused")
    mine, rates = setup_of(model), Rates.of(setup_of(model))
    assert core_seconds(mine, rates, 2048)[0] == pytest.approx(0.75 * core_seconds(mine, rates)[0])
    assert layer_seconds(mine)[0] < layer_seconds(setup_of(replace(model, window=None)))[0]
    assert layer_seconds(setup_of(model, sequence=2048)) == layer_seconds(setup_of(replace(model, window=None), sequence=2048))
    # Qwen's files name one, and do not use it.
    assert model_of(tmp_path, "Qwen2.5-72B", sliding_window=2048, use_sliding_window=False).window is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts is 8: mixtures of experts are not modelled"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not modelled, only .*: mixtures of experts"),
        ({"model_type": "deepseek_v3"}, "latent attention"),
        ({"model_type": "gemma2"}, "capped logits"),
        ({"model_type": "gemma3_text"}, "norms behind attention"),
        ({"model_type": "llama4"}, "mixtures of experts"),
        ({"model_type": "mamba"}, "give the sizes as flags"),
        ({"model_type": ["llama"]}, "is not modelled"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not modelled in a llama, only silu, swish"),
        ({"attention_bias": True}, "biases of one of the two alone"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, config_of("Llama-3.1-8B", **changes))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        find_model(path)


def test_all_biases_are_megatrons(tmp_path: Path) -> None:
    assert model_of(tmp_path, "Llama-3.1-8B", attention_bias=True, mlp_bias=True).linear_bias


def test_a_plan_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its activations by flags, too."""
    path = written(tmp_path, config_of("Nemotron-4 15B"))
    rest = ["--cluster", "h100-80g:8", "--tensor", "8", "--pipeline", "1", "--global-batch", "8", "--format", "json"]
    assert main(["simulate", "--model", path, *rest]) == 0
    by_file = json.loads(capsys.readouterr().out)
    sizes = [
        "--num-layers",
        "32",
        "--hidden-size",
        "6144",
        "--num-attention-heads",
        "48",
        "--num-query-groups",
        "8",
        "--kv-channels",
        "128",
    ]
    sizes += [
        "--ffn-hidden-size",
        "24576",
        "--vocabulary",
        "256000",
        "--sequence",
        "4096",
        "--squared-relu",
        "--disable-bias-linear",
        "--rotary",
    ]
    assert main(["simulate", *sizes, "--untie-embeddings-and-output-weights", "--no-dropout", *rest]) == 0
    by_flags = json.loads(capsys.readouterr().out)
    assert (by_file["iteration_time_s"], by_file["stages"]) == (by_flags["iteration_time_s"], by_flags["stages"])
    assert main(["simulate", *sizes, "--swiglu", *rest]) == 2
    assert "a SwiGLU is no squared ReLU" in capsys.readouterr().err
