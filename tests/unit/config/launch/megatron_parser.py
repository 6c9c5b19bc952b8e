"""Parse and validate launches as a rank does before its first collective: by Megatron's own parser with our flags, and
by its validation and ours. Reads (processes, flags) of launches as JSON from stdin, and prints a line for each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from subprocess import run
from typing import Any

from bpipe.config.launch.megatron_settings import MegatronSettings
from bpipe.plan.options import setup_from

YOURS = "--lr 1e-4 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --eval-interval 100"
NAMES = """
num_layers tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size micro_batch_size
global_batch_size seq_length ffn_hidden_size kv_channels num_query_groups recompute_granularity
virtual_pipeline_model_parallel_size fp16 bf16 sequence_parallel use_distributed_optimizer swiglu normalization
add_bias_linear untie_embeddings_and_output_weights position_embedding_type attention_dropout recompute_modules
recompute_method recompute_num_layers vocab_size
"""


def parsed(launches: Sequence[tuple[int, Sequence[str]]]) -> list[dict[str, Any]]:
    """Return Megatron's arguments for each launch, a number of processes and flags."""
    return [{name: value for name, value in reading.items() if name != "setups"} for reading in _readings(launches)]


def predicted(launches: Sequence[tuple[int, Sequence[str]]]) -> list[list[str]]:
    """Return the setup of each launch by its flags, and by Megatron's arguments."""
    return [reading["setups"] for reading in _readings(launches)]


def _readings(launches: Sequence[tuple[int, Sequence[str]]]) -> list[dict[str, Any]]:
    """Read launches in a process of its own: importing Megatron takes seconds, and changes the process without a GPU."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ended = run(
        [sys.executable, "-m", __name__],
        input=json.dumps(launches),
        capture_output=True,
        text=True,
        timeout=350,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line for line in ended.stdout.splitlines() if line.startswith("PARSED ")]
    return [json.loads(line.removeprefix("PARSED ")) for line in lines]


def _setup(launch: Callable[[], Sequence[str] | MegatronSettings], world_size: int) -> str:
    """Return the setup of a launch, or why there is none."""
    nodes = max(1, world_size // 8)
    try:
        return repr(setup_from(launch(), f"h100-80g:{nodes}x{world_size // nodes}", 50257, "cpu"))
    except ValueError as error:
        return str(error)


def main() -> None:
    from megatron.scheduling import launch

    launch.prepare()
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build as num_layers
    from megatron.training import arguments

    from megatron.scheduling.options.arguments import config_from_args

    for world_size, flags in json.load(sys.stdin):
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(min(world_size, 8))
        )
        sys.argv = ["pretrain_gpt.py", *YOURS.split(), *flags]
        with contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args()
            arguments.validate_args(args, {})
        read = {name: getattr(args, name) for name in NAMES.split()}
        config = arguments.core_transformer_config_from_args(args)
        chunks, ranks = config.virtual_pipeline_model_parallel_size or 1, range(args.pipeline_model_parallel_size)
        layout = config.pipeline_model_parallel_layout
        read["layers"] = [
            num_layers(config, chunk if chunks > 1 else None, rank)
            if layout is None
            else layout.layout[rank][chunk].count(LayerType.decoder)
            for chunk in range(chunks)
            for rank in ranks
        ]
        read["setups"] = [
            _setup(lambda: sys.argv[1:], world_size),
            _setup(lambda: MegatronSettings.from_args(args), world_size),  # noqa: B023
        ]
        # A budget is planned for this machine's own kernels, which are a CPU's.
        balanced = args.bpipe if args.bpipe_memory else config_from_args(args).balance is not None
        print("PARSED", json.dumps({"balanced": balanced, **read}))


if __name__ == "__main__":
    main()
