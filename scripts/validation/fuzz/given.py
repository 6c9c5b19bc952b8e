"""What predictions are made from: profiles, models, clusters, launch scripts. In: text. Out: whether it was taken, or Wrong."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from validation.fuzz.damage import damaged_json, damaged_text
from validation.fuzz.reader import Wrong, judge_numbers, outcome

SIMULATE = ["simulate", "--cluster", "a100-80g:4", "--pipeline", "4", "--global-batch", "8", "--format", "json"]
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
MEASURED = {"hidden_size": 5120, "ffn_hidden_size": 20480, "num_attention_heads": 40, "tensor": 1, "recompute": "none", "precision": "bf16"}
CONFIG = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG |= {"intermediate_size": 4096, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False, "head_dim": 128}


def profile_texts(_: Path) -> list[str]:
    return [json.dumps({"stages": [STAGE], "measured": MEASURED}), json.dumps({"stages": [{**STAGE, "layers": 10}] * 4})]


def config_texts(_: Path) -> list[str]:
    gpt2 = {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "n_positions": 1024, "vocab_size": 50257}
    return [json.dumps(CONFIG), json.dumps(gpt2)]


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
            if key not in STAGE or isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
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
        known = key in CONFIG if found["model_type"] != "gpt2" else key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        if known and key not in ("model_type", "tie_word_embeddings") and value is not None and (type(value) is not int or value < 1):
            raise Wrong(f"{key} {value!r:.60} was accepted")
    return True


CLUSTER = {"nodes": 1, "gpus_per_node": 4, "device": {"like": "h100-80g", "name": "ours", "between_gb_per_s": 25, "memory_gib": 79.1}}
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
        ["simulate", "--cluster", str(file), "--pipeline", "4", "--global-batch", "8", "--format", "json", "--model", "gpt3-13b"], None
    )
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None


CALIBRATION = {"format": "bpipe-calibration", "version": 1, "device": "a100-80g", "factor": 1.25, "measured_s": 5.0, "predicted_s": 4.0}
CALIBRATION |= {"source": "run.log", "configuration": {"tensor": 4}}


def judge_calibration(path: Path, text: str, _: random.Random) -> bool:
    """What is taken follows from its seconds, and is no factor that no cluster has."""
    found = _simulated(path, text, "--calibration", path)
    if found is None:
        return False
    factor, seconds = found["factor"], (found["measured_s"], found["predicted_s"])
    if isinstance(factor, bool) or not 0.5 <= factor <= 2 or not math.isclose(factor * seconds[1], seconds[0], rel_tol=2e-3):
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
ARGUMENTS |= {"global_batch_size": 16, "pipeline_model_parallel_size": 4, "recompute_granularity": None, "recompute_modules": ["core_attn"]}
TRAINED = (
    f"{'-' * 24} arguments {'-' * 24}\n"
    + "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in ARGUMENTS.items())
    + f"{'-' * 20} end of arguments {'-' * 21}\n > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)\n"
    + "".join(
        f" [2026-01-01 00:00:00.0] iteration {number:8d}/      20 | elapsed time per iteration (ms): 10{number % 3}.5 | lm loss: 5.5 |\n"
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


def judge_script(path: Path, text: str, _: random.Random) -> bool:
    """Only that it ends, and how: what bash would make of a damaged script nobody can say without running it."""
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    printed = outcome(["simulate", "--cluster", "a100-80g", "--from-script", str(path), "--format", "json"], None)
    if printed is not None:
        judge_numbers("", json.loads(printed), math.inf)
    return printed is not None
