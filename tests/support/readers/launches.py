"""Launches: captured ones, Megatron's flags, and the log of a training.

In: text. Out: whether it was taken, or Wrong. Where nobody can say what a damaged one means, only that it ends, and how.
"""

import json
import random
from pathlib import Path

from tests.support.readers.outcome import judge_answer

LAUNCH = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 51200 "
    "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 4 "
    "--pipeline-model-parallel-layout E(tt|)*3ttL --num-experts 4 --moe-layer-freq [0]*2+[1]*6 "
    "--moe-ffn-hidden-size 512 --window-size 127,0 --window-attn-skip-freq 4 --bf16 "
    "--recompute-granularity selective --recompute-modules core_attn --bpipe --bpipe-bound 3"
)
CAPTURED = json.dumps(
    {"launches": [{"words": ["torchrun", "pretrain_gpt.py", *LAUNCH.split()], "environment": {"NCCL_X": "1"}}]}
)
ARGUMENTS: dict[str, object] = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
ARGUMENTS |= {"micro_batch_size": 1, "bf16": True, "global_batch_size": 16, "pipeline_model_parallel_size": 4}
ARGUMENTS |= {"recompute_granularity": None, "recompute_modules": ["core_attn"]}
TRAINED = "\n".join(
    (
        f"{'-' * 24} arguments {'-' * 24}",
        *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in ARGUMENTS.items()),
        f"{'-' * 20} end of arguments {'-' * 21}",
        " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)",
        *(
            f" [2026-01-01 00:00:00.0] iteration {number:8d}/      20 | "
            f"elapsed time per iteration (ms): 10{number % 3}.5 | lm loss: 5.5 |"
            for number in range(1, 21)
        ),
        "",
    )
)


def judge_trained(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return judge_answer(["calibrate", str(path), "--cluster", "a100-80g:4", "--format", "json"])


def judge_captured(path: Path, text: str, _: random.Random) -> bool:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return judge_answer(["simulate", "--cluster", "a100-80g:4", "--launch", str(path), "--format", "json"])


def judge_launch(_: Path, text: str, __: random.Random) -> bool:
    """A system hands over no zero byte, and no word beyond 128 KiB."""
    words = text.replace("\0", "").split()
    if any(len(word) >= 2**17 for word in words):
        return False
    return judge_answer(["simulate", "--cluster", "a100-80g:4", "--format", "json", "--", *words])
