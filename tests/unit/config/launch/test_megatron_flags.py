"""The flags of a configuration: Megatron's own parser and validation accept them, and they mean the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.search import search
from bpipe.plan.space import Space
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import EVENLY, Setup, split_layers
from bpipe.predict.model import PRESETS
from bpipe.schedule.layout import Vocabulary
from tests.unit.config.launch.megatron_parser import parsed, predicted


def setup(name: str, t: int, p: int, chunks: int = 1, **changes: Any) -> Setup:
    model = PRESETS[name]
    layers = split_layers(model.num_layers, p * chunks, allow_uneven=True)
    assert layers is not None
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    cluster = parse_cluster(f"a100-80g:{t * p // 8 or 1}x{min(8, t * p)}")
    return Setup(model, cluster, t, p, 1, 32, model.sequence, layers, schedule=schedule, num_chunks=chunks, **changes)


def uneven(layers: tuple[int, ...], pipeline: int) -> Setup:
    """A small model with these layers, in chunks if there are more stages than ranks."""
    model = replace(PRESETS["gpt3-13b"], num_layers=sum(layers))
    chunks = len(layers) // pipeline
    schedule = "interleaved-1f1b" if chunks > 1 else "1f1b"
    sizes = (model, parse_cluster(f"a100-80g:{pipeline}"), 1, pipeline, 1, 32, 2048, layers)
    return Setup(*sizes, schedule=schedule, num_chunks=chunks)


# Every way to give layers to Megatron, with one stage per rank and with chunks.
UNEVEN = [
    uneven((3, 4, 4, 3), 4),
    uneven((5, 6), 2),
    uneven((3, 4, 5, 3), 4),
    uneven((1, *(2,) * 6, 1), 4),
    uneven((1, *(2,) * 7), 4),
    uneven((*(2,) * 7, 1), 4),
    uneven((1, 2, 2, 3) * 2, 4),
    uneven((1, 1, 1, 2, 2, 2, 2, 1), 4),
    uneven((1, 2, 1, 1, 1, 1, 1, 1), 4),
]

AHEAD = setup("llama3-8b", 2, 4)
AHEAD = replace(AHEAD, model=replace(AHEAD.model, mtp_num_layers=1))

SETUPS = [
    setup("gpt3-96b", 4, 8, recompute="selective", attention="unfused", balance=EVENLY, precision="fp16"),
    setup("llama3-8b", 2, 4, chunks=2, recompute="none"),
    setup("llama3-8b", 2, 4, recompute="none", vocabulary=Vocabulary.ONE, balance=EVENLY),
    setup("llama3-405b", 8, 16, recompute="full", distributed_optimizer=False),
    setup("llama3-8b", 2, 4, recompute="full:block:3"),
    setup("llama3-8b", 2, 4, chunks=2, recompute="full:uniform:2"),
    setup("llama3-8b", 2, 4, recompute="selective:mlp+layernorm"),
    setup("llama3-8b", 2, 4, slices=4),
    setup("llama3-8b", 2, 4, balance=EVENLY, cuda_graph_impl="full_iteration"),
    setup("llama3-8b", 2, 4, chunks=2, slices=2, slice_lengths=(4608, 3584), balance=EVENLY),
    replace(AHEAD, model=replace(AHEAD.model, mtp_num_layers=2, mtp_use_repeated_layer=True)),
    replace(AHEAD, layers=(11, 11, 10, 0)),
    replace(AHEAD, layers=(16, 16, 0, 0), mtp_stage=2),
]


def test_flags_of_the_papers_case() -> None:
    text = " ".join(megatron_flags(SETUPS[0]))
    assert "--num-layers 80 --hidden-size 9984 --num-attention-heads 104" in text
    assert "--sequence-parallel --bpipe --recompute-granularity selective --recompute-modules core_attn" in text
    assert "--attention-backend unfused --fp16 --use-distributed-optimizer" in text


def rows_of_plans() -> list[Setup]:
    """The first rows of real searches: GPT and LLaMA, old and new attention, even and uneven layers, and balanced rows
    alone."""
    spaces = [
        Space(PRESETS[model], parse_cluster(cluster), batch, sequence, **more)
        for model, cluster, batch, sequence, more in (
            ("gpt3-96b", "a100-80g:4x8", 128, 2048, {"attention": "unfused", "precision": "fp16"}),
            (
                "gpt3-13b",
                "a100-40g:1x8",
                32,
                2048,
                {"attention": "unfused", "balances": ("bpipe",), "precision": "fp32"},
            ),
            ("llama3-70b", "h100-80g:8x8", 256, 8192, {"max_micro_batch": 4}),
            ("llama-65b", "a100-80g:4x8", 128, 2048, {"balances": ("bpipe",), "max_micro_batch": 4}),
            ("llama3-405b", "h100-80g:32x8", 256, 8192, {"max_micro_batch": 2, "distributed_optimizer": False}),
        )
    ]
    return [result.setup for space in spaces for result in search(space, num_rows=4).rows]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_megatron_validates_them_and_means_the_same() -> None:
    rows = SETUPS + UNEVEN + rows_of_plans()
    assert len(rows) >= 15
    # Apart from rows that are balanced within a budget.
    assert {row.balance for row in rows if row.activation_budget is None} == {None, EVENLY}
    assert any(row.num_chunks > 1 for row in rows)
    result = parsed([(row.cluster.num_devices, megatron_flags(row)) for row in rows])
    for row, args in zip(rows, result, strict=True):
        assert args == expected(row), " ".join(megatron_flags(row))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_validated_arguments_are_predicted_as_the_flags_are() -> None:
    """Validation sets further arguments, and changes some that flags set."""
    more = ("--bpipe --bpipe-memory 70", "--bpipe-schedule bitpipe")
    launches = [(row.cluster.num_devices, megatron_flags(row)) for row in SETUPS]
    launches += [(8, [*megatron_flags(SETUPS[4]), *words.split()]) for words in more]
    for by_flags, by_args in predicted(launches):
        assert by_args == by_flags


def expected(setup: Setup) -> dict[str, Any]:
    model = setup.model
    return {
        "layers": list(setup.layers),
        "balanced": setup.balance is not None,
        "num_layers": model.num_layers,
        "tensor_model_parallel_size": setup.tensor,
        "pipeline_model_parallel_size": setup.pipeline,
        "data_parallel_size": setup.data,
        "micro_batch_size": setup.micro_batch,
        "global_batch_size": setup.global_batch,
        "seq_length": setup.sequence,
        "ffn_hidden_size": model.ffn_hidden_size,
        "kv_channels": model.kv_channels,
        "num_query_groups": model.num_query_groups if model.num_query_groups != model.num_attention_heads else 1,
        "recompute_granularity": None if setup.recompute == "none" else setup.recompute.split(":")[0],
        "recompute_method": setup.recomputed.method,
        "recompute_num_layers": setup.recomputed.num_layers if setup.recomputed.method else None,
        "recompute_modules": list(setup.recomputed.modules) or None,
        "virtual_pipeline_model_parallel_size": setup.num_chunks if setup.num_chunks > 1 else None,
        "fp16": setup.precision == "fp16",
        "bf16": setup.precision == "bf16",
        "sequence_parallel": setup.tensor > 1,
        "use_distributed_optimizer": setup.distributed_optimizer,
        "swiglu": model.gated,
        "normalization": "RMSNorm" if model.rms_norm else "LayerNorm",
        "add_bias_linear": model.linear_bias,
        "untie_embeddings_and_output_weights": not model.tied_embedding,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
        "attention_dropout": 0.1 if model.dropout else 0.0,
        "vocab_size": model.vocabulary,
    }
