"""The flags of a configuration: each once, with its values; and Megatron's own parser takes them and gives back the configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from bpipe.models.cluster import parse_cluster
from bpipe.models.layout import Setup, split_layers
from bpipe.models.model import PRESETS
from bpipe.plan.megatron_flags import megatron_flags


def setup(name: str, t: int, p: int, chunks: int = 1, **changes: Any) -> Setup:
    model = PRESETS[name]
    layers = split_layers(model.num_layers, p * chunks, allow_uneven=True)
    assert layers is not None
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    cluster = parse_cluster(f"a100-80g:{t * p // 8 or 1}x{min(8, t * p)}")
    return Setup(model, cluster, t, p, 1, 32, model.sequence, layers, schedule=schedule, chunks=chunks, **changes)


SETUPS = [
    setup("gpt3-96b", 4, 8, recompute="selective", attention="unfused", balance="bpipe", precision="fp16"),
    setup("llama3-8b", 2, 4, chunks=2, recompute="none"),
    setup("llama3-405b", 8, 16, recompute="full", distributed_optimizer=False),
]


def test_flags_of_the_papers_case() -> None:
    text = " ".join(megatron_flags(SETUPS[0]))
    assert "--num-layers 80 --hidden-size 9984 --num-attention-heads 104" in text
    assert "--sequence-parallel --bpipe --recompute-granularity selective --recompute-modules core_attn" in text
    assert "--attention-backend unfused --fp16 --use-distributed-optimizer" in text


def test_uneven_layers_are_said_with_two_flags() -> None:
    text = " ".join(megatron_flags(SETUPS[2]))
    assert "--decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7" in text
    odd = replace(setup("gpt3-13b", 1, 4), layers=(10, 11, 9, 10))
    with pytest.raises(ValueError, match="Megatron's flags take one number for the first stage"):
        megatron_flags(odd)


PROGRAM = """
import json, sys
from megatron.scheduling import startup
startup.prepare()
from megatron.scheduling.arguments import add_arguments
from megatron.training.arguments import parse_args
found = []
for flags in json.loads(sys.argv.pop()):
    sys.argv[1:] = flags
    args = parse_args(extra_args_provider=add_arguments)
    names = "num_layers tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size global_batch_size seq_length".split()
    names += "ffn_hidden_size kv_channels bpipe recompute_granularity num_layers_per_virtual_pipeline_stage fp16".split()
    found.append({name: getattr(args, name) for name in names})
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_real_parser_takes_them() -> None:
    """In a process of its own: importing Megatron takes seconds, and changes the process where there is no GPU."""
    flags = json.dumps([megatron_flags(one) for one in SETUPS])
    ended = subprocess.run([sys.executable, "-c", PROGRAM, flags], capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr
    for one, parsed in zip(SETUPS, json.loads(ended.stdout.splitlines()[-1]), strict=True):
        assert parsed["num_layers"] == one.model.num_layers
        assert (parsed["tensor_model_parallel_size"], parsed["pipeline_model_parallel_size"]) == (one.tensor, one.pipeline)
        assert (parsed["micro_batch_size"], parsed["global_batch_size"], parsed["seq_length"]) == (1, 32, one.sequence)
        assert (parsed["ffn_hidden_size"], parsed["kv_channels"]) == (one.model.ffn_hidden_size, one.model.kv_channels)
        assert parsed["bpipe"] is (one.balance == "bpipe")
        assert parsed["recompute_granularity"] == (None if one.recompute == "none" else one.recompute)
        assert parsed["num_layers_per_virtual_pipeline_stage"] == (one.layers[0] if one.chunks > 1 else None)
        assert parsed["fp16"] is (one.precision == "fp16")
