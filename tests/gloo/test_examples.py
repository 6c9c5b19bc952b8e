"""The commands that the examples would run, parsed by torchrun's parser and by Megatron's with our arguments.

The scripts only print their commands (DRY_RUN=1). One process parses them all, because importing Megatron takes
seconds. Scripts that need no Megatron are run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gloo.conftest import finish, free_ports, start

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "train_gpt3_13b.sh",
    "train_gpt3_96b.sbatch",
    "train_gpt3_134b.sbatch",
    "train_llama_65b.sbatch",
    "smoke_8gpu.sh",
)

# A rank's work between torchrun and the first collective: all arguments, placement and refusals.
PARSE = """
import contextlib, io, json, os, sys
from megatron.scheduling import launch
launch.prepare()
from megatron.scheduling.options.arguments import config_from_args
from megatron.training import arguments
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

WANTED = sys.argv[1].split()
for command in json.load(open(sys.argv[2])):
    torchrun = get_args_parser().parse_args(command)
    nodes, gpus = parse_min_max_nnodes(torchrun.nnodes)[1], int(torchrun.nproc_per_node)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(nodes * gpus), LOCAL_WORLD_SIZE=str(gpus))
    sys.argv = [torchrun.training_script, *torchrun.training_script_args]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        args = arguments.parse_args()
        arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    values = {name: getattr(args, name) for name in WANTED}
    # Without a GPU, a transport that needs one would be refused.
    args.bpipe_transport = "auto"
    config = config_from_args(args)
    balance = config.balance is not None
    parsed = {"script": torchrun.training_script, "balance": balance, "num_chunks": config.num_chunks, "said": output.getvalue()}
    print("PARSED", json.dumps(parsed | values))
"""
WANTED = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads world_size data_parallel_size sequence_parallel "
    "tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size global_batch_size seq_length "
    "recompute_granularity normalization swiglu position_embedding_type untie_embeddings_and_output_weights bf16 "
    "add_bias_linear exit_duration_in_mins save load deterministic_mode bpipe_transport timing_log_level"
)


def commands_of(script: str) -> list[list[str]]:
    """Return the trainings that a script would start, as the words after torchrun."""
    environment = {**os.environ, "DRY_RUN": "1", "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", str(ROOT / "examples" / script)],
        capture_output=True,
        text=True,
        timeout=30,
        env=environment,
        check=True,
    )
    commands = []
    for words in map(shlex.split, ended.stdout.splitlines()):
        launcher = next((word for word in ("torchrun", "torch.distributed.run") if word in words), None)
        if launcher:
            commands.append(words[words.index(launcher) + 1 :])
    return commands


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    commands = {script: commands_of(script) for script in SCRIPTS}
    # As common.sh and smoke_8gpu.sh set it; Megatron's --deterministic-mode requires it.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    folder = tmp_path_factory.mktemp("examples")
    script, commands_file = folder / "parse.py", folder / "commands.json"
    script.write_text(PARSE)
    commands_file.write_text(
        json.dumps([command for script_commands in commands.values() for command in script_commands])
    )
    ended = finish(
        start(1, [str(script), WANTED, str(commands_file)], folder, free_ports(1)[0], environment), folder, 240
    )
    assert ended.codes == [0], ended.logs[0][-3000:]
    arguments = [
        json.loads(line.removeprefix("PARSED ")) for line in ended.logs[0].splitlines() if line.startswith("PARSED ")
    ]
    return {script: [arguments.pop(0) for _ in script_commands] for script, script_commands in commands.items()}


# Kim et al. 2023 and, for LLaMA, Touvron et al. 2023: layers, hidden size, heads, GPUs, tensor, pipeline, micro-batch,
# global batch.
CONFIGURATIONS = {
    "train_gpt3_13b.sh": (40, 5120, 40, 8, 1, 8, 1, 32),
    "train_gpt3_96b.sbatch": (80, 9984, 104, 32, 4, 8, 2, 128),
    "train_gpt3_134b.sbatch": (84, 11520, 120, 48, 4, 12, 2, 192),
    "train_llama_65b.sbatch": (80, 8192, 64, 32, 4, 8, 4, 128),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", CONFIGURATIONS)
def test_megatron_understands_the_configuration(parsed: dict[str, list[dict[str, Any]]], script: str) -> None:
    (args,) = parsed[script]
    names = ("num_layers", "hidden_size", "num_attention_heads", "world_size")
    names += ("tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size", "global_batch_size")
    assert tuple(args[name] for name in names) == CONFIGURATIONS[script]
    assert args["script"] == "pretrain_gpt.py"
    assert args["balance"] is True
    assert args["data_parallel_size"] == 1
    assert args["bf16"] is True
    assert args["seq_length"] == 2048
    assert args["sequence_parallel"] is (args["tensor_model_parallel_size"] > 1)
    assert args["save"] == args["load"] is not None
    assert (args["exit_duration_in_mins"] is not None) is script.endswith(".sbatch")
    assert "bpipe: placement adjacent" in args["said"]
    assert "span two nodes" not in args["said"], "a pair's transfers would use the network"


@pytest.mark.timeout(300)
def test_llama_is_a_llama(parsed: dict[str, list[dict[str, Any]]]) -> None:
    (args,) = parsed["train_llama_65b.sbatch"]
    assert args["ffn_hidden_size"] == 22016
    assert args["normalization"] == "RMSNorm"
    assert args["swiglu"] is args["untie_embeddings_and_output_weights"] is True
    assert args["add_bias_linear"] is False
    assert args["position_embedding_type"] == "rope"
    assert args["recompute_granularity"] is None


@pytest.mark.timeout(300)
def test_the_smoke_test_tries_every_transport_in_three_layouts(parsed: dict[str, list[dict[str, Any]]]) -> None:
    runs = parsed["smoke_8gpu.sh"]
    assert all(run["world_size"] == 8 and run["deterministic_mode"] for run in runs)
    layouts = [
        (run["tensor_model_parallel_size"], run["pipeline_model_parallel_size"], run["num_chunks"]) for run in runs
    ]
    assert layouts == [(1, 8, 1)] * 6 + [(2, 4, 1)] * 6 + [(2, 4, 2)] * 6
    tried = [(run["balance"], run["bpipe_transport"], run["timing_log_level"]) for run in runs]
    stock, *balanced = tried[:6]
    assert tried == tried[:6] * 3
    assert stock == (False, "auto", 0)
    assert balanced == [(True, name, 0) for name in ("auto", "nccl", "peer", "host")] + [(True, "nccl", 2)]


def lines_of(example: str) -> list[str]:
    """Run an example that needs no launcher, and return the lines that it prints."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / f"examples/{example}.py")],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout.splitlines()


@pytest.mark.timeout(180)
def test_the_script_of_torchs_pipelining_is_balanced_and_computes_the_same() -> None:
    lines = lines_of("pipelining")
    assert [line.split(":")[1].split() for line in lines[1:3]] == [["4", "3", "2", "1"], ["3", "3", "2", "3"]]
    assert lines[3] == "identical: losses and weights agree to the last bit"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_toy_is_balanced_and_computes_the_same() -> None:
    lines = lines_of("toy")
    assert [line.split() for line in lines[2:6]] == [
        ["0", "4", "3", "3"],
        ["1", "3", "3", "0"],
        ["2", "2", "2", "0"],
        ["3", "1", "3", "0"],
    ]
    losses = lines[6].removeprefix("losses: ").split(", ")
    assert len(set(losses)) == 3, "a loss that does not change would make any two runs equal"
    assert lines[7] == "identical: losses and weights agree to the last bit"
