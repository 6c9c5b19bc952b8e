"""What predictions are made from: profiles, models, clusters.

In: text. Out: whether it was taken, or Wrong.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from tests.support.readers.damage import damaged_json, damaged_text
from tests.support.readers.outcome import Wrong, is_number, judge_answer

SIMULATE = ["simulate", "--pp", "4", "--gbs", "8", "--format", "json"]
SECONDS = ("forward_s", "backward_s", "transfer_s", "output_s", "embedding_s", "reduction_s", "optimizer_s")
STAGE = {**dict.fromkeys(SECONDS, 0.1), "saved_bytes": 10**8, "micro_batch": 1, "layers": 10}
MEASURED = {"hidden_size": 5120, "ffn_hidden_size": 20480, "num_attention_heads": 40, "tensor": 1}
MEASURED |= {"recompute": "none", "precision": "bf16"}
CONFIG: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8}
CONFIG |= {"num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048}
CONFIG |= {"tie_word_embeddings": False, "head_dim": 128}
GPT2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50257}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
ROUTED = {**CONFIG, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "decoder_sparse_step": 1}
# What a layer may be, and keys that are true or false.
KINDS = ("full_attention", "sliding_attention")
FLAGS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias")
GEMMA = {**CONFIG, "model_type": "gemma3_text", "sliding_window": 1024, "layer_types": [*KINDS] * 4}
DEEPSEEK = {**CONFIG, **EXPERTS, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_shared_experts": 1}
DEEPSEEK |= {"first_k_dense_replace": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
DEEPSEEK |= {"v_head_dim": 64, "num_key_value_heads": 8}
MOST = sys.float_info.max
NO_SIZES = ("model_type", "layer_types", *FLAGS)

DEVICE = {"like": "h100-80g", "name": "ours", "between_gb_per_s": 25, "memory_gib": 79.1}
CLUSTER = {"nodes": 1, "gpus_per_node": 4, "device": DEVICE}
TOML = """\
nodes = 1
gpus_per_node = 4

[device]
like = "h100-80g"
name = "ours"
peak_tflops = 989
"""

CALIBRATION = {"format": "bpipe-calibration", "version": 1, "device": "a100-80g", "factor": 1.25}
CALIBRATION |= {"measured_s": 5.0, "predicted_s": 4.0, "source": "run.log", "configuration": {"tensor": 4}}


def profile_texts(_: Path) -> list[str]:
    return [json.dumps({"stages": [STAGE], "measured": MEASURED}), json.dumps({"stages": [STAGE] * 4})]


def config_texts(_: Path) -> list[str]:
    return [json.dumps(one) for one in (CONFIG, GPT2, ROUTED, GEMMA, DEEPSEEK)]


def cluster_texts(_: Path) -> list[str]:
    return [json.dumps(CLUSTER), TOML]


def damaged_cluster(text: str, rng: random.Random) -> str:
    return damaged_json(text, rng) if text.startswith("{") else damaged_text(text, rng)


def _simulated(path: Path, text: str, flag: str, named: Path | None) -> dict[str, Any] | None:
    """What the file says where a simulation takes it, else None; errors must name the path, if one is `named`."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    arguments = [*SIMULATE, "--cluster", "a100-80g:4", "--model", "gpt3-13b", flag, str(path)]
    return json.loads(text) if judge_answer(arguments, named, most=1e21) else None


def judge_profile(path: Path, text: str, _: random.Random) -> bool:
    said = _simulated(path, text, "--profile", None)
    if said is None:
        return False
    for key, value in (item for stage in said["stages"] for item in stage.items()):
        if key not in STAGE or not is_number(value, 0, MOST):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


def judge_config(path: Path, text: str, _: random.Random) -> bool:
    said = _simulated(path, text, "--model", None)
    if said is None:
        return False
    sizes = set(GPT2 if said["model_type"] == "gpt2" else CONFIG) - set(NO_SIZES)
    wrong = {
        key for key in sizes & set(said) if said[key] is not None and (type(said[key]) is not int or said[key] < 1)
    }
    wrong |= {key for key in FLAGS if not isinstance(said.get(key), bool | None)}
    if said["model_type"] == "gemma3_text" and said.get("sliding_window"):
        wrong |= set(said.get("layer_types") or ()) - set(KINDS)
    if wrong:
        raise Wrong(f"{wrong!r:.60} of {text:.600} was accepted")
    return True


def judge_cluster(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".toml" if "[device]" in text and not text.startswith("{") else ".json")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    return judge_answer([*SIMULATE, "--cluster", str(file), "--model", "gpt3-13b"])


def judge_calibration(path: Path, text: str, _: random.Random) -> bool:
    """What is taken follows from its seconds, and is no factor that no cluster has."""
    said = _simulated(path, text, "--calibration", path)
    if said is None:
        return False
    factor, wanted = said["factor"], said["measured_s"]
    follows = not isinstance(factor, bool) and math.isclose(factor * said["predicted_s"], wanted, rel_tol=2e-3)
    if not follows or not 0.5 <= factor <= 2:
        raise Wrong(f"a factor of {factor} was accepted")
    return True
