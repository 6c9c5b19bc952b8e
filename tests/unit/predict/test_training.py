"""Precision, FP8, types of the optimizer's state and switches: bytes, seconds, refusals, and their flags."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.candidates import configuration
from bpipe.plan.predict import steady_timing
from bpipe.predict.cluster import parse_cluster, read_cluster
from bpipe.predict.costs import predict_costs, stage_buckets
from bpipe.predict.flops import layer_parameters
from bpipe.predict.layer_variants import Routing
from bpipe.predict.layers.layer import layer_saved
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.sizes import total
from bpipe.predict.states import parameter_bytes, stage_matrices, stage_parameters
from bpipe.predict.training import SWITCHES, Fp8, StateTypes, Switches
from tests.unit.predict.published import DEEPSEEK_V3, MIXTRAL_8X7B

GPT = Setup(PRESETS["gpt3-13b"], parse_cluster("a100-80g:4x8"), 2, 4, 1, 32, 2048, (10,) * 4)
LLAMA = Setup(PRESETS["llama3-70b"], parse_cluster("h100-80g:8x8"), 8, 4, 1, 64, 8192, (20,) * 4, recompute="none")
SHORT = StateTypes(True, "bf16", "fp32", "bf16", "bf16")
CHUNKS = {"pipeline": 2, "num_chunks": 2, "schedule": "interleaved-1f1b"}


# Weight, gradient, state, and a copy of gradients while weights are updated.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4, 12, 0)),
        ({"switches": Switches(grad_reduce_in_bf16=True)}, (2, 2, 12, 4)),
        ({"precision": "fp16"}, (2, 2, 12, 4)),
        ({"precision": "fp16", "switches": Switches(accumulate_allreduce_grads_in_fp32=True)}, (2, 4, 12, 0)),
        ({"precision": "fp32"}, (4, 4, 8, 0)),
        # Main weights keep only the 16 bits that bf16 lacks.
        ({"state_types": StateTypes(True)}, (2, 4, 10, 0)),
        ({"state_types": StateTypes(True), "precision": "fp16"}, (2, 2, 12, 0)),
        ({"state_types": SHORT}, (2, 2, 6, 0)),
        ({"state_types": replace(SHORT, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")}, (2, 2, 4, 0)),
        ({"state_types": replace(SHORT, main_params_dtype="fp16")}, (2, 2, 6, 0)),
        # Gradients are read as they are kept.
        ({"state_types": StateTypes(True), "switches": Switches(grad_reduce_in_bf16=True)}, (2, 2, 10, 0)),
        # On the CPU the state stays in 32 bits, and so does a copy of shorter gradients.
        ({"state_types": replace(SHORT, main_grads_dtype="fp32", optimizer_cpu_offload=True)}, (2, 4, 12, 0)),
        ({"state_types": replace(SHORT, optimizer_cpu_offload=True)}, (2, 2, 16, 0)),
        # For 8-bit weights Megatron keeps main weights itself, and gives Adam gradients in 32 bits.
        ({"state_types": SHORT, "fp8": Fp8(recipe="tensorwise")}, (2, 2, 8, 4)),
        ({"state_types": SHORT, "fp8": Fp8(recipe="delayed")}, (2, 2, 6, 0)),
        ({"state_types": replace(SHORT, main_params_dtype="fp16"), "fp8": Fp8(recipe="tensorwise")}, (2, 2, 6, 0)),
    ],
)
def test_bytes_per_parameter(changes: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert parameter_bytes(replace(LLAMA, **changes)) == expected


@pytest.mark.parametrize(
    ("setup", "changes", "message"),
    [
        (GPT, {**CHUNKS, "switches": Switches(no_overlap_p2p_communication=True)}, "3 or more pipeline ranks"),
        (
            GPT,
            {"switches": Switches(True, True), "distributed_optimizer": False},
            "--overlap-param-gather needs the distributed optimizer",
        ),
        (GPT, {"switches": Switches(tp_comm_overlap=True), "sequence_parallel": False}, "--tp-comm-overlap"),
        (GPT, {"switches": Switches(grad_reduce_in_bf16=True), "precision": "fp16"}, "the precision is fp16"),
        (LLAMA, {"state_types": SHORT, "distributed_optimizer": False}, "give --use-distributed-optimizer"),
        (LLAMA, {"state_types": SHORT, "precision": "fp32"}, "is for bf16 and fp16"),
        (
            LLAMA,
            {"state_types": SHORT, "switches": Switches(accumulate_allreduce_grads_in_fp32=True)},
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32",
        ),
        (GPT, {"fp8": Fp8()}, "a100-80g has no known FP8 support"),
        (LLAMA, {"fp8": Fp8(recipe="mxfp8")}, "h100-80g has no mxfp8"),
        (LLAMA, {"fp8": Fp8(), "precision": "fp32"}, "FP8 is for training in bf16 or fp16"),
        (LLAMA, {"fp8": Fp8(param_gather=True), "distributed_optimizer": False}, "--fp8-param-gather is for"),
        (LLAMA, {"fp8": Fp8(), "schedule": "zb-h1"}, "zb-h1 splits backwards"),
    ],
)
def test_contradictions_are_refused(setup: Setup, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(setup, **changes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Switches, {"overlap_param_gather": True}, "--overlap-param-gather needs --overlap-grad-reduce"),
        (StateTypes, {"exp_avg_dtype": "fp8"}, "--exp-avg-dtype fp8 needs --use-precision-aware-optimizer"),
        (StateTypes, {"optimizer_cpu_offload": True}, "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
        (StateTypes, {"optimizer_offload_fraction": 1.5}, "--optimizer-offload-fraction 1.5 is no share"),
        (
            StateTypes,
            {"use_precision_aware_optimizer": True, "main_grads_dtype": "fp16"},
            "--main-grads-dtype fp16 is unknown: choose from fp32, bf16",
        ),
        (Fp8, {"recipe": "custom"}, "unknown fp8 recipe 'custom'"),
    ],
)
def test_values_that_do_not_exist_are_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_every_switch_is_offered_read_written_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    ours = replace(GPT, switches=Switches(**dict.fromkeys(SWITCHES, True)))
    flags = megatron_flags(ours)
    options = read_command(flags).options
    assert all(options[name] is True and configuration(ours)[name] is True for name in SWITCHES)
    with pytest.raises(SystemExit):
        main(["simulate", "--help-all"])
    offered = capsys.readouterr().out
    assert all(flag in offered and flag in flags for flag in ours.switches.flags)
    assert len(ours.switches.flags) == len(SWITCHES)
    # Megatron refuses it with one tensor-parallel rank.
    alone = replace(GPT, switches=Switches(tp_comm_overlap=True), tensor=1)
    assert "--tp-comm-overlap" not in megatron_flags(alone)
    assert predict_costs(alone) == predict_costs(replace(GPT, tensor=1))
    reading = read_command([*flags, "--transformer-impl", "local"])
    assert reading.options["tp_comm_overlap"] is False
    assert any("--tp-comm-overlap" in note for note in reading.notes)


def test_gradients_of_the_first_ranks_first_chunk_are_reduced_in_buckets() -> None:
    """Megatron's `DistributedDataParallel` makes buckets of 40 million parameters, or a million per replica; other
    ranks and chunks have one, because they end before the first. With one bucket, 318 TFLOP/s were predicted for a 32B
    model without a pipeline, and 460 measured."""
    overlapped = Switches(overlap_grad_reduce=True)
    model = PRESETS["gpt3-13b"]
    alone = Setup(model, parse_cluster("a100-80g:2x8"), 8, 1, 1, 16, 2048, (40,), "full", switches=overlapped)
    count = stage_parameters(alone)[0]
    assert stage_buckets(alone) == (count // 40_000_000,)
    assert stage_buckets(alone)[0] > 30
    assert stage_buckets(replace(alone, switches=Switches())) == (1,)
    many = replace(alone, cluster=parse_cluster("a100-80g:128x8"), global_batch=128)
    assert stage_buckets(many) == (count // 128_000_000,)
    chunks = replace(alone, pipeline=2, layers=(10,) * 4, num_chunks=2, schedule="interleaved-1f1b", global_batch=16)
    assert stage_buckets(chunks)[0] > 1
    assert stage_buckets(chunks)[1:] == (1, 1, 1)
    # Its last stage is on the first rank, too.
    assert stage_buckets(replace(chunks, schedule="v-half")) == (1,) * 4
    lumped = predict_costs(alone)
    lumped = replace(lumped, stages=tuple(replace(cost, buckets=1) for cost in lumped.stages))
    exposed = [steady_timing(alone, costs).iteration_s for costs in (predict_costs(alone), lumped)]
    assert exposed[1] - exposed[0] > 0.8 * min(lumped.of(0).reduction_s, lumped.of(0).whole_backward_s)


# Two layers on two ranks, measured on CPUs with megatron-core 0.19.2: 27.32 MiB for two micro-batches of the first stage.
SOFTMAX = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 "
    "--global-batch-size 4 --pipeline-model-parallel-size 2 --bf16 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 512 --vocab-size 255 "
    "--transformer-impl local --attention-backend unfused"
)


@pytest.mark.parametrize(
    ("more", "kernels", "mib"),
    [
        ("--attention-softmax-in-fp32 --no-masked-softmax-fusion", "cpu", 27.32),
        ("--attention-softmax-in-fp32", "cpu", 27.32),
        ("--apply-query-key-layer-scaling", "cpu", 27.32),
        ("", "cpu", 11.32),
        # The fused kernel computes in 32 bits and keeps 16.
        ("--attention-softmax-in-fp32", "gpu", 9.76),
        ("--attention-softmax-in-fp32 --no-masked-softmax-fusion", "gpu", 25.76),
    ],
)
def test_a_softmax_in_32_bits_is_saved_beside_its_probabilities(
    more: str, kernels: str, mib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cluster", "a100-80g:1x2", "--kernels", kernels, "--format", "json"]
    assert main(["simulate", *options, "--", *f"{SOFTMAX} {more}".split()]) == 0
    saved = json.loads(capsys.readouterr().out)["stages"][0]["activations_bytes"]
    assert saved / 2**20 == pytest.approx(mib, abs=0.005)


@pytest.mark.parametrize(
    ("more", "bytes_of_a_score"),
    [
        # Transformer Engine's kernel takes these, whatever Megatron's flags say of its own.
        ("", 2),
        ("--attention-softmax-in-fp32 --no-masked-softmax-fusion", 2),
        ("--seq-length 8192", 2),
        # These are computed and kept in 32 bits, and kept in 16, too.
        ("--num-attention-heads 6", 6),
        ("--seq-length 16384", 6),
        ("--seq-length 16384 --transformer-impl local", 2),
    ],
)
def test_transformer_engines_unfused_softmax_asks_none_of_megatrons_flags(
    more: str, bytes_of_a_score: int, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = f"{SOFTMAX} --hidden-size 96 --transformer-impl transformer_engine {more}"
    words = launch.split()
    heads, tokens = (
        int(words[len(words) - words[::-1].index(name)]) for name in ("--num-attention-heads", "--seq-length")
    )
    saved = {}
    for recompute in ("none", "selective"):
        options = ["--cluster", "a100-80g:1x2", "--recompute", recompute, "--format", "json"]
        assert main(["simulate", *options, "--", *words]) == 0
        saved[recompute] = json.loads(capsys.readouterr().out)["stages"][0]["activations_bytes"]
    # For two micro-batches; what else is saved if the core is recomputed is far smaller.
    assert (saved["none"] - saved["selective"]) / (2 * heads * tokens**2) == pytest.approx(bytes_of_a_score, rel=0.1)


@pytest.mark.parametrize("model", [DEEPSEEK_V3, MIXTRAL_8X7B])
def test_experts_and_latent_attention_keep_less_too(model: Any) -> None:
    layers = tuple(model.num_layers // 8 + (stage < model.num_layers % 8) for stage in range(8))
    wide = Setup(model, parse_cluster("h100-80g:8x8"), 1, 8, 1, 64, 4096, layers, recompute="none", routing=Routing(8))
    low = replace(wide, fp8=Fp8())
    for kind, _ in model.kinds():
        names = {row.name for row in layer_saved(low, None, kind)}
        assert total(layer_saved(low, None, kind)) < total(layer_saved(wide, None, kind))
        assert "inputs of the matrices behind them, in FP8" in names
    matrices = sum(stage_matrices(low))
    down = 0 if model.latent is None else model.hidden_size * model.latent.down_size
    kinds = [(layer_parameters(model, kind), number) for kind, number in model.kinds()]
    assert matrices == sum(number * (layer.matrices + down + layer.experts // 8) for layer, number in kinds)


def test_commands_take_fp8(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common = ["--model", "llama3-8b", "--cluster", "h100-80g:8", "--gbs", "32"]
    assert main(["simulate", *common, "--tp", "2", "--pp", "2", "--fp8-format", "hybrid", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["peak_flops_per_s"] == 1979e12
    expected = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": False}
    assert expected.items() <= result["configuration"].items()
    assert main(["simulate", *common, "--pp", "4", "--fp8-format", "hybrid", "--balance", "bpipe"]) == 0
    assert "comes back unchanged (--bpipe-verify)" in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", *common, "--pp", "2", "--fp8-param-gather"]) == 2
    assert "give --fp8-format, too" in capsys.readouterr().err
    plan = ["plan", *common, "--fp8-format", "hybrid", "--max-micro-batch", "1", "--rows", "1"]
    assert main([*plan, "--format", "json"]) == 0
    families = {family["schedule"] for family in json.loads(capsys.readouterr().out)["families"]}
    assert "1f1b" in families
    assert not {"zb-h1", "zb-v", "v-half"} & families
    assert main([*plan, "--schedule", "zb-h1"]) == 2
    assert "zb-h1 splits backwards" in capsys.readouterr().err
    # A custom device.
    path = tmp_path / "cluster.toml"
    path.write_text('nodes = 1\ngpus_per_node = 8\n[device]\nlike = "a100-80g"\nfp8_tflops = 600\n')
    assert read_cluster(path).device.fp8_flops_per_s == 600e12
    assert (
        main(["simulate", *common[:2], "--cluster", str(path), *common[4:], "--pp", "2", "--fp8-format", "e4m3"]) == 0
    )
