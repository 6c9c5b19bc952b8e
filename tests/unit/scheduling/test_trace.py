"""Megatron's own stages at full size, traced without memory, compared with what the formulas predict."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bpipe import cli
from bpipe.cli import parsers
from bpipe.commands import trace
from bpipe.config.flags.flag import options_of
from bpipe.predict.activations import stage_bytes
from bpipe.predict.states import stage_parameters

ROOT = Path(__file__).parents[3]
# The largest relative error of a formula.
APART = 0.01
SHORT = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256"
LAUNCH = f"-- {SHORT} --micro-batch-size 2 --pipeline-model-parallel-size 2 --bf16 --vocab-size 1024"

# Importing Megatron and tracing all of them takes half a minute on an idle machine.
pytestmark = pytest.mark.timeout(300)

MODELS = ROOT / "tests/data/models"
DEEPSEEK = f"--model {MODELS}/deepseek_v3.json --pp 4"

# A published run of a model like DeepSeek-V3, in 14 layers.
AHEAD = """-- --num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --normalization RMSNorm --swiglu
--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --seq-length 2048
--max-position-embeddings 4096 --num-experts 256 --moe-layer-freq ([0]*3+[1]*11) --moe-ffn-hidden-size 2048
--moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type seq_aux_loss --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--attention-dropout 0 --hidden-dropout 0 --vocab-size 129280 --pipeline-model-parallel-size 4
--expert-model-parallel-size 16 --bf16 --micro-batch-size 1 --mtp-num-layers 1"""
QUICK = (
    "--model llama3-8b --tp 1 --pp 4 --mbs 1 --seq 8192 --attention flash",
    "--model llama3-70b --tp 8 --pp 4 --vp 5 --mbs 1 --seq 8192 --attention flash",
    "--model llama3-8b --tp 2 --pp 4 --cp 2 --mbs 1 --seq 8192 --attention flash --recompute selective",
    f"--model {MODELS}/mixtral.json --tp 2 --pp 4 --mbs 1 --ep 4 --etp 1 --attention unfused",
    f"--model {MODELS}/qwen3_moe.json --tp 2 --pp 4 --mbs 1 --ep 8 --etp 1 --moe-token-dispatcher-type allgather",
    f"{DEEPSEEK} --tp 2 --mbs 1 --ep 32 --etp 1 --attention flash --recompute full --mtp-num-layers 1",
    "--model llama3-8b --tp 2 --pp 2 --mbs 1 --attention flash --mtp-num-layers 2 --mtp-use-repeated-layer",
)
LONG = (
    "--model gpt3-13b --tp 2 --pp 4 --vp 5 --mbs 2 --attention flash",
    "--model gpt3-96b --tp 8 --pp 8 --mbs 2 --attention unfused --recompute selective",
    "--model llama-65b --tp 4 --pp 8 --mbs 2 --attention flash",
    "--model llama3-70b --tp 8 --pp 4 --mbs 1 --seq 8192 --attention flash --recompute full:block:2",
    f"{DEEPSEEK} --tp 2 --mbs 1 --ep 32 --etp 1 --attention flash --recompute selective",
    f"{AHEAD} --pipeline-model-parallel-layout Ett|(tt|)*6mL",
    f"{AHEAD} --pipeline-model-parallel-layout Ettt|(tt|)*5tm|L",
)
EVERY = (*QUICK, *(pytest.param(flags, marks=pytest.mark.slow) for flags in LONG))
LATENT = "--multi-latent-attention --attention-dropout 0"
UNKNOWN = f"{LAUNCH} {LATENT}"
EXPERTS = f"{LAUNCH} --num-experts 8 --moe-router-topk 2 --disable-bias-linear --moe-grouped-gemm --swiglu"
# Launches by the beginning of their refusal.
REFUSED = {
    "--moe-token-dispatcher-type flex: ": f"{EXPERTS} --moe-token-dispatcher-type flex --moe-router-dtype fp32",
    "--recompute-modules moe_act: ": f"{EXPERTS} --recompute-granularity selective --recompute-modules moe_act",
    "--recompute-modules mlp: ": f"{LAUNCH} --recompute-granularity selective --recompute-modules core_attn mlp",
    "--v-head-dim 64: ": f"{LAUNCH} {LATENT} --qk-head-dim 128 --v-head-dim 64 --trace-attention unfused",
    "--moe-router-load-balancing-type sinkhorn: ": (
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0"
    ),
    "--cp-comm-type a2a: ": f"{LAUNCH} --context-parallel-size 2 --cp-comm-type a2a",
    "--hybrid-layer-pattern M*-M*-M*: ": f"{LAUNCH} --hybrid-layer-pattern M*-M*-M*",
    "--bpipe-vocabulary 1: ": f"{LAUNCH} --bpipe-vocabulary 1",
}


FUSED = f"{LAUNCH} --cross-entropy-loss-fusion"
GATHERED = f"{LAUNCH} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
OTHERS = (*QUICK, LAUNCH, FUSED, GATHERED, UNKNOWN, *REFUSED.values())


def launch_of(flags: str) -> Any:
    parser, _ = parsers("trace")
    return trace._launch(options_of(parser, ["trace", *flags.split()]))


def traced(flags: str) -> Any:
    return _traced(LONG if flags in LONG else OTHERS)[flags]


@functools.cache
def _traced(every: tuple[str, ...]) -> dict[str, Any]:
    """Trace all launches in one process: importing Megatron takes as long as tracing some of them."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.unit.scheduling.trace_many"],
        input=json.dumps([[*launch_of(flags).flags] for flags in every]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return dict(zip(every, json.loads(process.stdout), strict=True))


@pytest.mark.parametrize("flags", EVERY)
def test_formulas_give_what_the_model_saves_and_its_parameters(flags: str) -> None:
    setup, stages = launch_of(flags).setup, traced(flags)["stages"]
    assert [stage["parameters"] for stage in stages] == [*stage_parameters(setup)]
    for stage, formula in zip(stages, stage_bytes(setup), strict=True):
        assert abs(formula - stage["saved_bytes"]) <= APART * stage["saved_bytes"]


@pytest.mark.parametrize("flags", EVERY)
def test_what_is_saved_is_held_and_the_backward_needs_more(flags: str) -> None:
    """Counted in two ways: by following every operation, and from the graph."""
    for stage in traced(flags)["stages"]:
        assert stage["saved_bytes"] <= stage["held_bytes"] < stage["peak_bytes"]


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_traced_is_refused(reason: str) -> None:
    assert reason in traced(REFUSED[reason])


def test_the_stage_of_further_tokens_is_the_fullest_of_a_real_launch() -> None:
    """It was shown as the emptiest stage, with the advice to leave the further tokens out."""
    (flags,) = [flags for flags in LONG if flags.endswith("mL")]
    parameters = stage_parameters(launch_of(flags).setup)
    assert parameters[-1] == max(parameters) == 2_893_779_968


def test_what_formulas_do_not_know_or_only_nearly_is_traced() -> None:
    plain, unknown = traced(LAUNCH)["stages"], traced(UNKNOWN)["stages"]
    assert len(plain) == len(unknown) == 2
    assert unknown[1]["saved_bytes"] != plain[1]["saved_bytes"] > 0
    assert unknown[1]["parameters"] != plain[1]["parameters"]


def test_a_fused_loss_saves_what_the_other_does() -> None:
    """So the prediction ignores the flag."""
    assert traced(FUSED)["stages"][-1]["saved_bytes"] == traced(LAUNCH)["stages"][-1]["saved_bytes"]


def test_overlapping_the_gathering_of_weights_changes_no_stage() -> None:
    """The traced replica has its weights: gathering them on a device without kernels ended in a NotImplementedError."""
    assert traced(GATHERED)["stages"] == traced(LAUNCH)["stages"]


@pytest.mark.parametrize("flags", QUICK[:2])
def test_a_trace_gives_simulate_and_plan_what_stages_save_and_have(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject, file = launch_of(flags), str(tmp_path / "traced.json")
    # As if Megatron saved more than the formulas say, and had more weights.
    stages = [
        {**stage, "saved_bytes": stage["saved_bytes"] + 2**30, "parameters": stage["parameters"] + 10**8}
        for stage in traced(flags)["stages"]
    ]
    trace.write_profile(file, {**traced(flags), "stages": stages}, subject)
    cluster = ["--cluster", "a100-80g:8x8", "--format", "json"]
    command = ["simulate", *flags.split(), "--gbs", "128", *cluster]
    results = {}
    for name, more in (("formulas", []), ("trace", ["--profile", file])):
        assert cli.main([*command, *more]) == 0
        results[name] = json.loads(capsys.readouterr().out)
    formulas, measured = (results[name]["stages"] for name in ("formulas", "trace"))
    for rank, (before, after) in enumerate(zip(formulas, measured, strict=True)):
        chunks = len(stages) // len(formulas)
        assert after["weights_bytes"] - before["weights_bytes"] == pytest.approx(2 * 10**8 * chunks, rel=1e-2), rank
        assert after["activations_bytes"] - before["activations_bytes"] > 2**29 * chunks, rank
    # A plan has the same row, and others by formula.
    cut = {name: results["trace"]["configuration"][name] for name in ("tensor", "pipeline", "chunks", "micro_batch")}
    sizes = f"--tp {cut['tensor']} --pp {cut['pipeline']} --vp {cut['chunks']} --mbs 1,{cut['micro_batch']}".split()
    model = flags.split()[: flags.split().index("--tp")]
    recompute = ["--recompute", results["trace"]["configuration"]["recompute"]]
    attention = ["--attention", results["trace"]["configuration"]["attention"]]
    plan = ["plan", *model, *sizes, *recompute, *attention, "--gbs", "128", "--memory", "2000", "--rows", "50"]
    assert cli.main([*plan, *cluster, "--balance", "none", "--profile", file]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["configuration"]["micro_batch"] for row in rows} == {1, cut["micro_batch"]}
    free = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"), True)
    (same,) = [row for row in rows if row["configuration"] == results["trace"]["configuration"] | free]
    assert [stage["peak_bytes"] for stage in same["stages"]] == [stage["peak_bytes"] for stage in measured]


def test_a_trace_is_refused_for_another_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, file = QUICK[1], str(tmp_path / "traced.json")
    trace.write_profile(file, traced(flags), launch_of(flags))
    command = ["simulate", "--cluster", "a100-80g:8x8", "--gbs", "128", "--profile", file, *flags.split()]
    for more, message in (
        (["--mbs", "2"], "traced with micro_batch 1, but the setup has 2: trace that, too"),
        (["--vp", "2"], "traced with layers 4,4,4"),
        (["--recompute", "full"], "traced with recompute none, but the setup has full: trace that, too"),
        (["--slices", "2"], "traced without slices"),
    ):
        assert cli.main([*command, *more]) == 2
        assert message in capsys.readouterr().err


def test_a_trace_of_what_the_formulas_do_not_know_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--output: simulate and plan cannot use a trace of this launch"):
        trace.write_profile(str(tmp_path / "traced.json"), traced(UNKNOWN), launch_of(UNKNOWN))


@pytest.mark.parametrize(
    ("flags", "unrecorded"),
    [(QUICK[2], "context parallelism"), (QUICK[3], "experts"), (QUICK[-1], "further tokens")],
)
def test_a_trace_that_a_file_cannot_tell_from_others_is_not_written(
    tmp_path: Path, flags: str, unrecorded: str
) -> None:
    """A file records no expert parallelism, so it was taken for a launch with another."""
    with pytest.raises(ValueError, match=f"--output: a profile does not record {unrecorded}"):
        trace.write_profile(str(tmp_path / "traced.json"), traced(flags), launch_of(flags))
