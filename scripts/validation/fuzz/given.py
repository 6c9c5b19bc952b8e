"""What predictions are made from: profiles, models, clusters, launch scripts.

In: text. Out: whether it was taken, or Wrong.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from bpipe.plan.launch_script import read_launch
from tests.unit.plan.bash_scripts import calls_of, environment_of, stubs
from validation.fuzz.damage import damaged_json, damaged_text
from validation.fuzz.reader import Wrong, judge_numbers, outcome

SIMULATE = ["simulate", "--cluster", "a100-80g:4", "--pp", "4", "--gbs", "8", "--format", "json"]
STAGE = {
    "forward_s": 0.1,
    "backward_s": 0.2,
    "transfer_s": 0.01,
    "output_s": 0.0,
    "embedding_s": 0.0,
    "reduction_s": 0.1,
    "optimizer_s": 0.1,
}
STAGE |= {"saved_bytes": 10**8, "micro_batch": 1, "layers": 10}
MEASURED = {
    "hidden_size": 5120,
    "ffn_hidden_size": 20480,
    "num_attention_heads": 40,
    "tensor": 1,
    "recompute": "none",
    "precision": "bf16",
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIG |= {
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "head_dim": 128,
}


ROUTED = {**CONFIG, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
ROUTED |= {"decoder_sparse_step": 1}
GEMMA = {
    **CONFIG,
    "model_type": "gemma3_text",
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
DEEPSEEK = {
    **CONFIG,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
DEEPSEEK |= {
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
}
DEEPSEEK |= {"v_head_dim": 64, "num_key_value_heads": 8}
# Keys that are true or false, or a list of what layers are.
FLAGS, KINDS = (
    ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias"),
    ("full_attention", "sliding_attention"),
)
NO_SIZES = ("model_type", "layer_types", *FLAGS)


def profile_texts(_: Path) -> list[str]:
    return [
        json.dumps({"stages": [STAGE], "measured": MEASURED}),
        json.dumps({"stages": [{**STAGE, "layers": 10}] * 4}),
    ]


def config_texts(_: Path) -> list[str]:
    gpt2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50257}
    return [json.dumps(one) for one in (CONFIG, gpt2, ROUTED, GEMMA, DEEPSEEK)]


def _simulated(path: Path, text: str, flag: str, named: Path | None) -> dict[str, Any] | None:
    """What the file says where a simulation takes it, else None; errors must name the path, if one is `named`."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome([*SIMULATE, "--model", "gpt3-13b", flag, str(path)], named)
    if printed is None:
        return None
    judge_numbers("", json.loads(printed))
    found: dict[str, Any] = json.loads(text)
    return found


def judge_profile(path: Path, text: str, _: random.Random) -> bool:
    found = _simulated(path, text, "--profile", None)
    if found is None:
        return False
    for stage in found["stages"]:
        for key, value in stage.items():
            if (
                key not in STAGE
                or isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < math.inf
            ):
                raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


def judge_config(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome([*SIMULATE, "--model", str(path)], None)
    if printed is None:
        return False
    judge_numbers("", json.loads(printed))
    found = json.loads(text)
    for key, value in found.items():
        known = (
            key in CONFIG
            if found["model_type"] != "gpt2"
            else key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        )
        if known and key not in NO_SIZES and value is not None and (type(value) is not int or value < 1):
            raise Wrong(f"{key} {value!r:.60} was accepted")
        if key in FLAGS and value is not None and type(value) is not bool:
            raise Wrong(f"{key} {value!r:.60} was accepted")
        asked = key == "layer_types" and found["model_type"] == "gemma3_text" and found.get("sliding_window")
        if asked and not set(value or ()) <= set(KINDS):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


CLUSTER = {
    "nodes": 1,
    "gpus_per_node": 4,
    "device": {"like": "h100-80g", "name": "ours", "between_gb_per_s": 25, "memory_gib": 79.1},
}
TOML = """\
nodes = 1
gpus_per_node = 4

[device]
like = "h100-80g"
name = "ours"
peak_tflops = 989
"""
SCRIPT = """\
#!/bin/bash
GPUS=4
NODES=${NODES:-1}
ARGS=(
    --num-layers 8 --hidden-size 1024 # deep
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
)
ARGS+=(--vocab-size "51200")
BATCH="--micro-batch-size 1 --global-batch-size $((GPUS * 4)) --bf16"
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py ${ARGS[@]} \\
    $BATCH --pipeline-model-parallel-size 4 --bpipe 2>&1 | tee train.log
"""


def damaged_cluster(text: str, rng: random.Random) -> str:
    return damaged_json(text, rng) if text.startswith("{") else damaged_text(text, rng)


def judge_cluster(path: Path, text: str, _: random.Random) -> bool:
    file = path.with_suffix(".toml" if "[device]" in text and not text.startswith("{") else ".json")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(
        ["simulate", "--cluster", str(file), "--pp", "4", "--gbs", "8", "--format", "json", "--model", "gpt3-13b"], None
    )
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


CALIBRATION = {
    "format": "bpipe-calibration",
    "version": 1,
    "device": "a100-80g",
    "factor": 1.25,
    "measured_s": 5.0,
    "predicted_s": 4.0,
}
CALIBRATION |= {"source": "run.log", "configuration": {"tensor": 4}}


def judge_calibration(path: Path, text: str, _: random.Random) -> bool:
    """What is taken follows from its seconds, and is no factor that no cluster has."""
    found = _simulated(path, text, "--calibration", path)
    if found is None:
        return False
    factor, seconds = found["factor"], (found["measured_s"], found["predicted_s"])
    if (
        isinstance(factor, bool)
        or not 0.5 <= factor <= 2
        or not math.isclose(factor * seconds[1], seconds[0], rel_tol=2e-3)
    ):
        raise Wrong(f"a factor of {factor} was accepted")
    return True


KERNEL_TIMES: dict[str, object] = {"format": "bpipe-kernel-times", "version": 1, "device": "a100", "precision": "bf16"}
KERNEL_TIMES |= {"products": [[2048, 15360, 5120, 0.002], [2048, 5120, 5120, 0.0007]]}
KERNEL_TIMES |= {"attention": [["flash", 40, 2048, 128, 0.001, 0.002]], "gathers": [[2, 20971520, 0.0002]]}


def judge_kernel_times(path: Path, text: str, _: random.Random) -> bool:
    """Of what is taken all sizes and seconds are above nothing, and none is a text or a truth."""
    found = _simulated(path, text, "--kernel-times", None)
    if found is None:
        return False
    for row in (*found["products"], *(row[1:] for row in found["attention"]), *found["gathers"]):
        if not all(type(value) in (int, float) and 0 < value < math.inf for value in row):
            raise Wrong(f"{row!r:.60} was accepted")
    return True


ARGUMENTS: dict[str, object] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "micro_batch_size": 1,
    "bf16": True,
}
ARGUMENTS |= {
    "global_batch_size": 16,
    "pipeline_model_parallel_size": 4,
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
}
TRAINED = (
    f"{'-' * 24} arguments {'-' * 24}\n"
    + "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in ARGUMENTS.items())
    + f"{'-' * 20} end of arguments {'-' * 21}\n > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)\n"
    + "".join(
        f" [2026-01-01 00:00:00.0] iteration {number:8d}/      20 | elapsed time per iteration (ms): 10{number % 3}.5 "
        f"| lm loss: 5.5 |\n"
        for number in range(1, 21)
    )
)


def judge_trained(path: Path, text: str, _: random.Random) -> bool:
    """Only that it ends, and how: what of a damaged log is still a training nobody can say."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["calibrate", str(path), "--cluster", "a100-80g:4", "--format", "json"], None)
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


LAUNCH = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 51200 "
    "--micro-batch-size 1 "
    "--global-batch-size 16 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout E(tt|)*3ttL "
    "--num-experts 4 "
    "--moe-layer-freq [0]*2+[1]*6 --moe-ffn-hidden-size 512 --window-size 127,0 --window-attn-skip-freq 4 --bf16 "
    "--recompute-granularity selective --recompute-modules core_attn --bpipe --bpipe-bound 3"
)


def judge_launch(_: Path, text: str, __: random.Random) -> bool:
    """Only that it ends, and how; a system hands over no zero byte, and no word beyond 128 KiB."""
    words = text.replace("\0", "").split()
    if any(len(word) >= 2**17 for word in words):
        return False
    printed = outcome(["simulate", "--cluster", "a100-80g:4", "--format", "json", "--", *words], None)
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


DRAWN = "A=1\ntorchrun a.py --num-layers $A\n"


def judge_drawn(path: Path, text: str, _: random.Random) -> bool:
    """What bash itself hands to the training is what is read, or it is refused."""
    folder = path.parent / "stubs"
    environment = stubs(folder) if not folder.exists() else environment_of(folder)
    try:
        launch = read_launch(text)
    except ValueError:
        return False
    words = list(launch.words)
    while words[0] in ("srun", "exec"):
        words = words[1:]
    if any(map(launch.unknown, words)):
        return False
    for call in calls_of(text, environment, path.parent):
        if call != words:
            raise Wrong(f"{words} was read, and bash runs {call}")
    return True


def judge_script(path: Path, text: str, _: random.Random) -> bool:
    """Only that it ends, and how: what bash would make of a damaged script nobody can say without running it."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["simulate", "--cluster", "a100-80g", "--from-script", str(path), "--format", "json"], None)
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None
