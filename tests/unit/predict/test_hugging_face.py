"""Models of Hugging Face's files: as many parameters as their authors say, what differs from LLaMA, and what is
refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.options import setup_from
from bpipe.plan.standings import BEHIND_ATTENTION, GATED_GELU, needs_of_setup
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.hugging_face import find_model
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.attention import core_seconds
from bpipe.predict.layers.layer import layer_seconds
from bpipe.predict.layout import Setup
from bpipe.predict.model import Model
from bpipe.predict.parameters import num_active_parameters, num_parameters
from bpipe.predict.sizes import Rates
from bpipe.predict.states import rank_parameters

NAMES = tuple(
    (
        "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
    ).split()
)

# As their config.json on the hub has them, and the parameters that their authors count, in billions. Nemotron-4: its
# two reports, of which the first says 12.5 without embeddings and 3.1 in them, the second 331.6 and 9.4.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...], float]] = {
    "Nemotron-4 15B": ({"model_type": "nemotron", "hidden_act": "relu2"}, (32, 6144, 48, 8, 128, 24576, 256000), 15.6),
    "Nemotron-4 340B": (
        {"model_type": "nemotron", "hidden_act": "relu2"},
        (96, 18432, 96, 8, 192, 73728, 256000),
        341.0,
    ),
    "Nemotron-Mini-4B": ({"model_type": "nemotron", "hidden_act": "relu2"}, (32, 3072, 24, 8, 128, 9216, 256000), 4.19),
    "Gemma 7B": ({"model_type": "gemma", "hidden_act": "gelu"}, (28, 3072, 16, 16, 256, 24576, 256000), 8.54),
    "Gemma 2B": ({"model_type": "gemma", "hidden_act": "gelu"}, (18, 2048, 8, 1, 256, 16384, 256000), 2.51),
    "Qwen2.5-72B": ({"model_type": "qwen2", "hidden_act": "silu"}, (80, 8192, 64, 8, 128, 29568, 152064), 72.7),
    "Qwen2.5-0.5B": ({"model_type": "qwen2", "tie_word_embeddings": True}, (24, 896, 14, 2, 64, 4864, 151936), 0.494),
    "Qwen3-32B": ({"model_type": "qwen3", "hidden_act": "silu"}, (64, 5120, 64, 8, 128, 25600, 151936), 32.8),
    "Mistral-7B": ({"model_type": "mistral", "hidden_act": "silu"}, (32, 4096, 32, 8, 128, 14336, 32000), 7.24),
    "Llama-3.1-8B": ({"model_type": "llama", "hidden_act": "silu"}, (32, 4096, 32, 8, 128, 14336, 128256), 8.03),
}


# With experts, latent attention or windows: as their config.json on the hub have them, and billions of all parameters
# and of a token's. Of Gemma 3 and LLaMA 4 without what sees, which has 0.4 and 0.9.
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": 1536,
}
KNOWN: dict[str, tuple[dict[str, Any], tuple[int | None, ...], float, float]] = {
    "Mixtral 8x7B": (
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        (32, 4096, 32, 8, None, 14336, 32000),
        46.7,
        12.9,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
        (24, 2048, 16, 16, None, 5632, 151936),
        14.3,
        2.7,
    ),
    "Qwen3-30B-A3B": (
        {"model_type": "qwen3_moe", "moe_intermediate_size": 768, **QWEN_MOE},
        (48, 2048, 32, 4, 128, 6144, 151936),
        30.5,
        3.3,
    ),
    "Qwen3-235B-A22B": (
        {"model_type": "qwen3_moe", "moe_intermediate_size": 1536, **QWEN_MOE},
        (94, 4096, 64, 4, 128, 12288, 151936),
        235.0,
        22.0,
    ),
    "DeepSeek-V2": (
        {
            "model_type": "deepseek_v2",
            "n_routed_experts": 160,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            **DEEPSEEK,
        },
        (60, 5120, 128, 128, None, 12288, 102400),
        236.0,
        21.0,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            **DEEPSEEK,
        },
        (61, 7168, 128, 128, None, 18432, 129280),
        671.0,
        37.0,
    ),
    "Llama-4-Scout": (
        {
            "model_type": "llama4_text",
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 8192,
        },
        (48, 5120, 40, 8, 128, 8192, 202048),
        109.0 - 0.9,
        17.0,
    ),
    "Llama-4-Maverick": (
        {
            "model_type": "llama4_text",
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8192,
        },
        (48, 5120, 40, 8, 128, 8192, 202048),
        400.0,
        17.0,
    ),
    "Kimi-K2": (
        {
            "model_type": "kimi_k2",
            "architectures": ["DeepseekV3ForCausalLM"],
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **DEEPSEEK,
        },
        (61, 7168, 64, 64, None, 18432, 163840),
        1026.0,
        32.6,
    ),
    "GLM-4.5": (
        {
            "model_type": "glm4_moe",
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "attention_bias": True,
            "use_qk_norm": True,
        },
        (92, 5120, 96, 8, 128, 12288, 151552),
        353.0,
        32.0,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax",
            "architectures": ["MiniMaxM2ForCausalLM"],
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "use_qk_norm": True,
        },
        (62, 3072, 48, 8, 128, 1536, 200064),
        229.0,
        10.0,
    ),
    "Gemma-2-9B": (
        {
            "model_type": "gemma2",
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        (42, 3584, 16, 8, 256, 14336, 256000),
        9.24,
        9.24,
    ),
    "Gemma-2-27B": (
        {
            "model_type": "gemma2",
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        (46, 4608, 32, 16, 128, 36864, 256000),
        27.2,
        27.2,
    ),
    "Gemma-3-27B": (
        {"model_type": "gemma3_text", "sliding_window": 1024},
        (62, 5376, 32, 16, 128, 21504, 262208),
        27.0,
        27.0,
    ),
}


def known(folder: Path, name: str, **changes: Any) -> Model:
    kind, sizes, *_ = KNOWN[name]
    given = {key: size for key, size in zip(NAMES, sizes, strict=True) if size is not None}
    return find_model(written(folder, {**kind, **given, "max_position_embeddings": 4096, **changes}))


@pytest.mark.parametrize("name", KNOWN)
def test_all_of_them_and_those_of_a_token(name: str, tmp_path: Path) -> None:
    """Publishers differ in whether a token's are said with both embeddings."""
    model = known(tmp_path, name)
    *_, every, active = KNOWN[name]
    assert num_parameters(model) / 1e9 == pytest.approx(every, rel=0.005)
    embedding = model.vocabulary * model.hidden_size / 1e9
    assert active - embedding - 0.5 < num_active_parameters(model) / 1e9 < active + 2 * embedding + 0.5


NEMOTRON_H = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "mlp_hidden_act": "relu2",
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("sizes", "pattern", "own", "billions"),
    [
        (
            (52, 4096, 32, 8, 128, 21504, 131072),
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            {"mamba_num_heads": 128},
            8.1,
        ),
        (
            (52, 2688, 32, 2, 128, 1856, 131072),
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            {
                "mamba_num_heads": 64,
                "n_routed_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 1856,
                "moe_shared_expert_intermediate_size": 3712,
                "n_shared_experts": 1,
            },
            31.6,
        ),
    ],
    ids=["Nemotron-H 8B", "Nemotron 3 Nano 30B"],
)
def test_layers_that_are_one_part_alone(
    sizes: tuple[int, ...], pattern: str, own: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    config = {**NEMOTRON_H, **dict(zip(NAMES, sizes, strict=True)), "hybrid_override_pattern": pattern, **own}
    model = find_model(written(tmp_path, config))
    assert num_parameters(model) / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.no_positions
    assert model.hybrid is not None
    assert model.hybrid.pattern == pattern


def test_chunks_of_attention_are_refused_where_they_matter(tmp_path: Path) -> None:
    model = known(tmp_path, "Llama-4-Scout")
    assert setup_of(model).sequence == 4096
    with pytest.raises(ValueError, match=r"attends within chunks of 8192 tokens, .*: give --seq 8192 or less"):
        setup_of(model, sequence=16384)


@pytest.mark.parametrize("name", KNOWN)
def test_a_launch_says_the_same_of_layers(name: str, tmp_path: Path) -> None:
    """There and back through Megatron's flags: experts, latent attention, windows, and how tokens come to experts."""
    model = known(tmp_path, name)
    routing = Routing(2, 1, "flex", 1.25, True) if model.experts else Routing()
    values = {
        "model": model,
        "cluster": parse_cluster("h100-80g:1x8"),
        "tensor": 2,
        "pipeline": 2,
        "micro_batch": 1,
        "global_batch": 16,
    }
    layers = (model.num_layers // 2, model.num_layers - model.num_layers // 2)
    mine = Setup(**values, sequence=4096, layers=layers, routing=routing)
    options = read_command(megatron_flags(mine)).options
    assert (options.get("experts"), options.get("latent"), options.get("window")) == (
        model.experts,
        model.latent,
        model.window,
    )
    assert options.get("routing", Routing()) == routing
    assert options["qk_layernorm"] is model.qk_norm
    back = setup_from(
        [*megatron_flags(mine), "--vocab-size", str(model.vocabulary)], mine.cluster, model.vocabulary, "gpu"
    )
    assert [back.model.kind(layer) for layer in range(model.num_layers)] == [
        model.kind(layer) for layer in range(model.num_layers)
    ]
    like = replace(model, gated_gelu=False, post_norms=False, capped_attention=False, capped_logits=False)
    assert rank_parameters(back) == rank_parameters(replace(mine, model=like))
    assert layer_seconds(back) == layer_seconds(replace(mine, model=like))
    assert (BEHIND_ATTENTION in needs_of_setup(mine)) == model.post_norms


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
    return Setup(
        model=model, cluster=parse_cluster("h100-80g:8"), layers=(model.num_layers // p,) * p, **{**values, **changes}
    )


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
    assert (GATED_GELU in needs_of_setup(mine)) == (name == "Gemma 7B")
    options = read_command(said).options
    model = mine.model
    assert (options["squared_relu"], options["add_qkv_bias"], options["qk_layernorm"]) == (
        model.squared_relu,
        model.qkv_bias,
        model.qk_norm,
    )


def test_windows_make_attention_shorter(tmp_path: Path) -> None:
    """Of 4096 tokens a window of 2048 leaves three quarters of the causal half."""
    model = model_of(tmp_path, "Mistral-7B", sliding_window=2048)
    with pytest.raises(ValueError, match="windows and capped attention are modelled with attention flash only"):
        setup_of(model, attention="unfused")
    mine, rates = setup_of(model), Rates.of(setup_of(model))
    assert core_seconds(mine, rates, 2048)[0] == pytest.approx(0.75 * core_seconds(mine, rates)[0])
    assert layer_seconds(mine)[0] < layer_seconds(setup_of(replace(model, window=None)))[0]
    assert layer_seconds(setup_of(model, sequence=2048)) == layer_seconds(
        setup_of(replace(model, window=None), sequence=2048)
    )
    # Qwen's files name one, and do not use it.
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
        ({"attention_bias": True}, "biases in only one of the two"),
    ],
)
def test_what_is_not_modelled_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = written(tmp_path, config_of("Llama-3.1-8B", **changes))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        find_model(path)


def test_a_plan_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its activations by flags, too."""
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
