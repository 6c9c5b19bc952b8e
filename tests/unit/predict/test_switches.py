"""What Megatron's switches change of times and bytes, that contradictions are refused, and that each stands in one
place."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bpipe.cli import main
from bpipe.config.launch.megatron_command import read_command
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.plan.document import configuration
from bpipe.plan.timing import steady_timing
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.costs import predict_costs
from bpipe.predict.layout import Setup
from bpipe.predict.model import PRESETS
from bpipe.predict.replicas import stage_buckets
from bpipe.predict.states import stage_parameters
from bpipe.predict.training import SWITCHES, Switches


def setup(*on: str, **changes: Any) -> Setup:
    sizes = {"tensor": 2, "pipeline": 4, "micro_batch": 1, "global_batch": 32, "sequence": 2048, "layers": (10,) * 4}
    switches = Switches(**dict.fromkeys(on, True))
    return Setup(PRESETS["gpt3-13b"], parse_cluster("a100-80g:4x8"), **{**sizes, "switches": switches, **changes})


@pytest.mark.parametrize(
    ("on", "changes", "message"),
    [
        (
            ("no_overlap_p2p_communication",),
            {"pipeline": 2, "num_chunks": 2, "layers": (10,) * 4, "schedule": "interleaved-1f1b"},
            "needs 3 or more pipeline ranks",
        ),
        (("overlap_param_gather",), {}, "--overlap-param-gather needs --overlap-grad-reduce"),
        (
            ("overlap_grad_reduce", "overlap_param_gather"),
            {"distributed_optimizer": False},
            "needs the distributed optimizer",
        ),
        (("tp_comm_overlap",), {"sequence_parallel": False}, "--tp-comm-overlap is for sequence parallelism"),
        (("grad_reduce_in_bf16",), {"precision": "fp16"}, "--grad-reduce-in-bf16 is for bf16, the precision is fp16"),
    ],
)
def test_contradictions_are_refused(on: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        setup(*on, **changes)


def test_every_switch_is_offered_read_written_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    mine = setup(*SWITCHES)
    flags = megatron_flags(mine)
    options = read_command(flags).options
    assert all(options[name] is True and configuration(mine)[name] is True for name in SWITCHES)
    with pytest.raises(SystemExit):
        main(["simulate", "--help-all"])
    offered = capsys.readouterr().out
    assert all(flag in offered and flag in flags for flag in mine.switches.flags)
    assert len(mine.switches.flags) == len(SWITCHES)
    # Megatron refuses it where there is one tensor-parallel rank.
    alone = setup("tp_comm_overlap", tensor=1)
    assert "--tp-comm-overlap" not in megatron_flags(alone)
    assert predict_costs(alone) == predict_costs(setup(tensor=1))
    reading = read_command([*flags, "--transformer-impl", "local"])
    assert reading.options["tp_comm_overlap"] is False
    assert any("--tp-comm-overlap" in note for note in reading.notes)


def test_gradients_of_the_first_ranks_first_chunk_are_reduced_in_buckets() -> None:
    """As Megatron cuts them (`DistributedDataParallel`): 40 million parameters, or a million a replica; of all other
    ranks and chunks in one, for these have computed before the first. Without pipeline that was 318 TFLOP/s of a 32B
    model in place of 460 measured."""
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
    # Its first stage is Megatron's last.
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
    given = ["--cluster", "a100-80g:1x2", "--kernels", kernels, "--format", "json"]
    assert main(["simulate", *given, "--", *f"{SOFTMAX} {more}".split()]) == 0
    saved = json.loads(capsys.readouterr().out)["stages"][0]["activations_bytes"]
    assert saved / 2**20 == pytest.approx(mib, abs=0.005)
