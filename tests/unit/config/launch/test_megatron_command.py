"""Megatron's command line, read as our options: round trips of setups, contradictions refused, and tables checked
against Megatron."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.cli import main
from bpipe.config.flags.flag import parser_of_launch
from bpipe.config.flags.trainer import READ, SWITCHED_OFF, argument_of
from bpipe.config.flags.values import read_budget
from bpipe.config.launch.megatron_command import Reading, read_command, read_settings
from bpipe.config.launch.megatron_flags import megatron_flags
from bpipe.config.launch.megatron_settings import REFUSED, WITHOUT_INFLUENCE, MegatronSettings, names
from bpipe.plan.options import setup_from
from bpipe.predict.cluster import parse_cluster
from bpipe.predict.layout import EVENLY, Setup
from bpipe.predict.model import Model
from bpipe.predict.training import FP8_FORMATS, FP8_RECIPES, Fp8

SMALL = ("--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 1000").split()


def read(*flags: str) -> Reading:
    return read_command([*SMALL, *flags])


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Draw a setup that Megatron's flags can express."""
    pipeline, chunks, tensor = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2])),
    )
    chunks = chunks if pipeline > 1 else 1
    heads, groups = 8, draw(st.sampled_from([2, 8]))
    gated, rotary, dropout = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    layers = draw(st.lists(st.integers(1, 3), min_size=pipeline * chunks, max_size=pipeline * chunks))
    attention = draw(st.sampled_from(["flash", "unfused"]))
    precision, distributed = draw(st.sampled_from(["bf16", "fp16", "fp32"])), draw(st.booleans())
    recipes = st.builds(
        Fp8,
        st.sampled_from(FP8_FORMATS),
        st.sampled_from(FP8_RECIPES[:3]),
        st.booleans() if distributed else st.just(False),
    )
    # On at most eight devices.
    context = draw(st.sampled_from([1, 2])) if attention == "flash" and pipeline * tensor < 8 else 1
    ways = ["p2p", "all_gather", *(["a2a"] if groups % (tensor * context) == 0 else [])]
    drawn = (draw(st.sampled_from([32, 64])), draw(st.sampled_from([1024, 2048])))
    sizes = (sum(layers), 512, heads, groups, *drawn, 1000, 256)
    switches = (gated, draw(st.booleans()), draw(st.booleans()), not rotary, draw(st.booleans()), dropout)
    fp8 = draw(st.none() | recipes) if precision != "fp32" else None
    scopes = ["none", "selective", "full", "full:uniform:2", "full:block:3"]
    scopes += ["selective:core_attn+layernorm"] if fp8 is None else []
    return Setup(
        model=Model("custom", *sizes, *switches),
        cluster=parse_cluster("h100-80g:1x8"),
        fp8=fp8,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=draw(st.sampled_from([1, 2])),
        global_batch=64,
        sequence=256,
        layers=tuple(layers),
        recompute=draw(st.sampled_from(scopes)),
        attention=attention,
        context=context,
        cp_comm_type=draw(st.sampled_from(ways)) if context > 1 else "p2p",
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        balance=draw(st.sampled_from([None, EVENLY])),
        precision=precision,
        distributed_optimizer=distributed,
        sequence_parallel=tensor > 1 and draw(st.booleans()),
    )


@settings(deadline=None, max_examples=150)
@given(setups())
def test_what_we_write_we_read(setup: Setup) -> None:
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *megatron_flags(setup), "--vocab-size", "1000"]
    reading = read_command(words)
    assert (reading.not_considered, reading.devices) == ((), (1, 8))
    assert setup_from(words, setup.cluster, 1000, "gpu") == setup


def arguments(**more: object) -> SimpleNamespace:
    """Return Megatron's arguments for the flags of SMALL and more."""
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 1000}
    return SimpleNamespace(**sizes, **more)


def test_what_validation_sets_to_a_parallel_size_is_no_flag_that_was_given() -> None:
    """Every launch with tensor parallelism was refused because of these arguments."""
    sizes = {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 2}
    settings = MegatronSettings.from_args(arguments(**sizes, expert_tensor_parallel_num_weight_shards=2))
    assert read_settings(settings).options["tensor"] == 2
    more = arguments(**sizes, expert_tensor_parallel_num_weight_shards=4)
    with pytest.raises(ValueError, match="--expert-tensor-parallel-num-weight-shards 4 is not modelled"):
        read_settings(MegatronSettings.from_args(more))


def test_arguments_are_read_as_the_flags_are() -> None:
    """Validation replaces types by torch's and sets what bf16 implies; some switches set arguments to False."""
    by_flags = read(*"--disable-bias-linear --fp8-format hybrid --bf16 --bpipe --bpipe-memory 70".split()).options
    args = arguments(
        add_bias_linear=False,
        fp8="hybrid",
        bf16=True,
        accumulate_allreduce_grads_in_fp32=True,
        main_grads_dtype="torch.float32",
        optimizer="adam",
        muon_scalar_optimizer="adam",
        num_query_groups=None,
        bpipe=True,
        bpipe_memory=read_budget("70"),
    )
    assert read_settings(MegatronSettings.from_args(args)).options == by_flags


def test_two_pipes_of_arguments_are_counted_as_the_schedule_counts_them() -> None:
    by_flags = read("--pipeline-model-parallel-size", "4", "--bpipe-schedule", "chimera").options
    pipes = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "bpipe_num_pipes": 2}
    args = arguments(**pipes, bpipe_schedule="chimera")
    assert read_settings(MegatronSettings.from_args(args)).options == by_flags


def test_shards_of_the_output_layer_are_read() -> None:
    assert read("--bpipe-vocabulary", "interlaced").options["vocabulary_parallel"] == "interlaced"
    assert "input_shards" not in read("--bpipe-vocabulary", "1").options
    assert read("--bpipe-vocabulary", "1", "--bpipe-vocabulary-input").options["input_shards"] is True
    assert "vocabulary_parallel" not in read().options
    with pytest.raises(ValueError, match="--bpipe-vocabulary"):
        read("--bpipe-vocabulary", "3")


def test_megatrons_defaults() -> None:
    options = read().options
    assert (options["ffn_hidden_size"], options["kv_channels"], options["num_query_groups"]) == (256, 16, 4)
    assert (options["precision"], options["attention"], options["recompute"]) == ("fp32", "flash", "none")
    assert (options["rotary"], options["no_dropout"], options["no_distributed_optimizer"]) == (False, False, True)
    assert "global_batch" not in options
    assert read("--group-query-attention").options["num_query_groups"] == 1
    assert read("--transformer-impl", "local").options["attention"] == "unfused"
    assert read("--use-rotary-position-embeddings").options["rotary"] is True
    assert read("--recompute-activations").options["recompute"] == "selective"
    # If no number is given, Megatron recomputes layer by layer.
    assert read("--recompute-granularity", "full", "--recompute-method", "uniform").options["recompute"] == "full"
    # In a model without experts Megatron accepts the name, and nothing is recomputed.
    dense = read("--recompute-granularity", "selective", "--recompute-modules", "moe", "mlp", "core_attn")
    assert dense.options["recompute"] == "selective:core_attn+mlp"
    assert "--recompute-modules moe recomputes nothing in a model without experts" in dense.notes
    assert read_command([*SMALL[:-2], "--tokenizer-type", "GPT2BPETokenizer"]).options["vocabulary"] == 50257


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp16 --bf16", "--fp16 and --bf16 exclude each other"),
        ("--recompute-activations --recompute-granularity full", "--recompute-granularity full exclude each other"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--moe-latent-size 8", "--moe-latent-size 8 is not modelled: experts of a smaller hidden size"),
        ("--num-experts 8 --moe-layer-freq [2]", "is not a pattern of layers"),
        ("--num-experts 8 --moe-router-topk 9", "each token goes to 9 experts"),
        ("--window-size 127", "--window-size 127 is not a window"),
        ("--spec my_layers stack", "--spec my_layers stack: layers of a custom specification"),
        ("--mtp-hybrid-override-pattern M*", "multi-token prediction"),
        ("--heterogeneous-layers-config-encoded-json {}", "layers of different kinds"),
        ("--attention-output-gate", "--attention-output-gate is not modelled: a gate after attention"),
        ("--fp4-format e2m1", "--fp4-format e2m1 is not modelled: 4-bit training"),
        ("--fp8-format hybrid --first-last-layers-bf16", "--first-last-layers-bf16 is not modelled: 4-bit training"),
        ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe custom is not modelled"),
        ("--fp8-format e5m2", "argument --fp8-format"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "--cp-comm-type a2a.p2p: only one of p2p, all_gather"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a p2p", "--cp-comm-type p2p a2a p2p: only one of"),
        ("--hybrid-context-parallel", "--hybrid-context-parallel is not modelled: context parallelism whose size"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp is not modelled: sharding by FSDP"),
        ("--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2", "exclude each other"),
        ("--pipeline-model-parallel-size 3", "--num-layers 8 cannot be divided evenly over"),
        ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size: '0' must be"),
        ("--hidden-size x", "argument --hidden-size: 'x' must be a whole number"),
        ("--normalization Batch", "argument --normalization"),
        ("--num-attention-heads 5", "--num-attention-heads 5 does not divide --hidden-size 64"),
        ("--num-layers 0", "--num-layers: '0' must be a whole number, at least 1"),
        ("--micro-batch-size -1", "--micro-batch-size: '-1' must be a whole number, at least 1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: '0' must be"),
    ],
)
def test_contradictions_and_what_is_not_modelled_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*flags.split())


def test_neutral_values_of_refused_flags_are_none() -> None:
    neutral = ("--context-parallel-size", "1", "--expert-model-parallel-size=1", "--cpu-offloading-num-layers", "0")
    assert read(*neutral).not_considered == ()
    pipeline = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "2")
    assert read(*pipeline, "--microbatch-group-size-per-virtual-pipeline-stage", "2").options["chunks"] == 2
    with pytest.raises(ValueError, match="larger groups of micro-batches"):
        read(*pipeline, "--microbatch-group-size-per-virtual-pipeline-stage", "4")


def test_the_command_line_replaces_the_launch(capsys: pytest.CaptureFixture[str]) -> None:
    launch = ["--", "torchrun", "--nproc-per-node=8", "train.py", *SMALL, "--pipeline-model-parallel-size", "4"]
    launch += ["--micro-batch-size", "2", "--global-batch-size", "32", "--recompute-granularity", "full"]
    uniform = ["--recompute-method", "uniform", "--recompute-num-layers", "2"]
    assert main(["simulate", "--cluster", "a100-80g", "--format", "json", *launch, *uniform]) == 0
    assert json.loads(capsys.readouterr().out)["configuration"]["recompute"] == "full:uniform:2"
    assert main(["simulate", "--cluster", "a100-80g", *launch, "--recompute-method", "block"]) == 2
    error = capsys.readouterr().err
    assert (
        "--recompute-method block without --recompute-num-layers is not modelled: choose what to predict instead"
        in error
    )
    command = ["simulate", "--cluster", "a100-80g", "--recompute", "none", "--format", "json"]
    assert main([*command, *launch, *uniform, "--my-own-flag"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = {
        "recompute": "none",
        "micro_batch": 2,
        "pipeline": 4,
        "data": 2,
        "layers": [2, 2, 2, 2],
        "precision": "fp32",
    }
    assert expected.items() <= result["configuration"].items()
    assert result["launch"] == {
        "notes": [
            "--attention-backend auto is predicted as flash",
            "Megatron's parser does not know --my-own-flag; ignore this if your script adds it",
        ],
        "not_considered": ["--my-own-flag"],
    }
    assert main([*command, "--pp", "8", *launch, *uniform]) == 0
    assert json.loads(capsys.readouterr().out)["configuration"]["layers"] == [1] * 8, (
        "layers of 4 stages say nothing of 8"
    )


def test_what_nobody_says_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["simulate", "--cluster", "a100-80g:8", "--model", "gpt3-13b"], "--pp, --gbs missing"),
        (["plan", "--cluster", "a100-80g:8", "--model", "gpt3-13b"], "--gbs missing"),
        (["simulate", "--cluster", "a100-80g:8", "--", *SMALL[:-2]], "give --vocab-size N"),
        (["simulate", "--cluster", "a100-80g", "--", *SMALL], "is not DEVICE:NODESxDEVICES"),
        (["simulate", "--cluster", "a100-80g:8", "--", *SMALL[2:]], "Megatron's flags lack --num-layers"),
        (["simulate", "--cluster", "a100-80g:8", "--", "bash", "run.sh"], "'bash' is not a flag, and no training"),
        (["simulate", "--cluster", "a100-80g:8", "--launch", "launch.json", "--", *SMALL], "say the same"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_plan_shows_the_launch_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    launch = (
        "--num-layers 80 --hidden-size 9984 --num-attention-heads 104 --seq-length 2048 --vocab-size 51200 "
        "--fp16 --sequence-parallel"
    )
    launch += (
        " --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 --micro-batch-size 2 --global-batch-size 128"
    )
    launch += " --attention-backend unfused --use-distributed-optimizer --recompute-activations"
    arguments = ["plan", "--cluster", "a100-80g:4x8", "--rows", "2", "--schedule", "1f1b", "interleaved-1f1b"]
    assert main([*arguments, "--", *launch.split()]) == 0
    text = capsys.readouterr().out
    assert "does not fit: rank 0 needs 81.4" in text
    assert "t=4 p=8 d=1 b=2 recompute selective 1f1b balanced" in text
    assert main([*arguments, "--format", "json", "--", *launch.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["launch"]["as_it_stands"]["fits"] is False
    assert result["rows"][0]["fits"] is True
    assert main(["plan", "--cluster", "a100-80g:3x8", "--rows", "1", "--schedule", "1f1b", "--", *launch.split()]) in (
        0,
        3,
    )
    assert "the launch as it is: t*p = 4*8 = 32 does not divide the 24 devices" in capsys.readouterr().out


# Every flag of the installed Megatron's parser, ours among them.
FLAGS = """
import argparse, contextlib, io, json
with contextlib.redirect_stdout(io.StringIO()):
    from megatron.scheduling import launch
    launch.prepare()
    from megatron.scheduling.options.flags import add_arguments
    from megatron.training.arguments import add_megatron_arguments
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
def plain(value):
    return getattr(value, "name", value)
print("FLAGS", json.dumps({
    flag: {
        "dest": action.dest,
        "nargs": action.nargs,
        "type": getattr(action.type, "__name__", None),
        "default": plain(action.default),
        "choices": action.choices and sorted(str(plain(choice)) for choice in action.choices),
        "switch": type(action).__name__,
    }
    for action in parser._actions for flag in action.option_strings
}, default=str))
"""


@pytest.fixture(scope="module")
def megatrons() -> dict[str, dict[str, Any]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", FLAGS], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("FLAGS "))
    result: dict[str, dict[str, Any]] = json.loads(line.removeprefix("FLAGS "))
    return result


@pytest.mark.timeout(120)
def test_every_flag_is_megatrons_with_its_type_and_default(megatrons: dict[str, dict[str, Any]]) -> None:
    ours = {flag: action for action in parser_of_launch(READ.values())._actions for flag in action.option_strings}
    assert set(ours) == set(READ)
    for flag, action in ours.items():
        theirs = megatrons[flag]
        assert action.nargs == theirs["nargs"], flag
        if theirs["nargs"] == 0:
            # A switch that turns something off is on by default.
            assert theirs["default"] is (theirs["switch"] == "_StoreFalseAction"), flag
            continue
        assert action.default == theirs["default"], flag
        assert (action.choices and sorted(action.choices)) == theirs["choices"], flag
        # Our types also limit the size of numbers.
        kind = getattr(action.type, "__name__", None)
        assert kind == "str" or theirs["type"] in (
            kind,
            {"positive": "int", "counted": "int", "fraction": "float", "factor": "float", None: "str"}.get(kind),
        ), flag


@pytest.mark.timeout(120)
def test_arguments_have_the_names_by_which_settings_are_read(megatrons: dict[str, dict[str, Any]]) -> None:
    for flag in (*READ, *REFUSED):
        switches_off = megatrons[flag]["switch"] == "_StoreFalseAction"
        assert switches_off == (flag in SWITCHED_OFF), flag
        assert megatrons[flag]["dest"] == (SWITCHED_OFF[flag] if switches_off else argument_of(flag)), flag


@pytest.mark.timeout(120)
def test_the_other_tables_name_flags_that_exist(megatrons: dict[str, dict[str, Any]]) -> None:
    assert set(REFUSED) <= set(megatrons)
    for pattern in WITHOUT_INFLUENCE:
        assert any(fnmatchcase(flag, pattern) for flag in megatrons), pattern
    without = {flag for flag in megatrons if any(fnmatchcase(flag, pattern) for pattern in WITHOUT_INFLUENCE)}
    assert not without & (set(READ) | set(REFUSED))
    words = tuple(("recompute offload fp8 fp4 moe expert fsdp shard dtype fusion overlap cuda-graph mtp").split())
    # No influence: how a scale comes from past values, how text is generated, and when a graph is captured.
    scales = {"--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--mtp-loss-scaling-factor"}
    scales |= {"--cuda-graph-warmup-steps"}
    inference = {flag for flag in without if flag.startswith("--mamba-inference-")}
    assert [
        flag for flag in without - scales - inference if any(word in flag for word in words) and "ckpt" not in flag
    ] == []


@pytest.mark.timeout(120)
def test_the_names_are_those_of_the_installed_megatron_and_ours(megatrons: dict[str, dict[str, Any]]) -> None:
    assert names() == {flag for flag in megatrons if flag.startswith("--")}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--bpipe-reprot x", "unknown flag --bpipe-reprot, did you mean '--bpipe-report'?"),
        ("--bpipe-xyzzy", "unknown flag --bpipe-xyzzy: leave it out"),
        ("--cpu-offloading-num-layers 1", "--cpu-offloading-num-layers 1 is not modelled: offloading"),
    ],
)
def test_a_mistyped_or_unmodelled_flag_is_no_silent_one(flags: str, message: str) -> None:
    """A typo was listed as not considered and predicted as if it were not there; 1 counted as off for every flag."""
    with pytest.raises(ValueError, match=re.escape(message)):
        read(*flags.split())


def test_all_flags_that_megatron_does_not_know_are_named_at_once() -> None:
    """A script may have flags of its own, even if they resemble Megatron's."""
    *_, note = read("--sequence-paralel", "--bpip", "--num_layers", "4", "--my-own", "x").notes
    assert note == (
        "Megatron's parser does not know --sequence-paralel (did you mean '--sequence-parallel'?), --bpip (did you "
        "mean '--bpipe'?), --num_layers (did you mean '--num-layers'?), --my-own; ignore this if your script adds them"
    )
    *_, note = read(*(f"--own-{number}" for number in range(101))).notes
    assert note.endswith("--own-19, 81 more; ignore this if your script adds them")


def test_absurd_numbers_are_refused() -> None:
    """Ranks were listed one by one, which never ended for 10^30 nodes."""
    sizes = ["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
    with pytest.raises(ValueError, match="nodes of 8 processes: give at most 99999 of each"):
        read_command(["torchrun", "--nproc_per_node", "8", "--nnodes", "1" * 30, "pretrain_gpt.py", *sizes])
    with pytest.raises(
        ValueError, match=r"--num-layers: '1+' must be a whole number, at least 1 and at most 1000000000000"
    ):
        read_command([*sizes, "--num-layers", "1" * 30])


# Each of these takes or saves gigabytes in a large model.
LARGE = (
    *("--optimizer muon", "--optimizer sgd", "--cuda-graph-impl local", "--cuda-graph-impl transformer_engine"),
    *("--enable-cuda-graph", "--external-cuda-graph", "--cpu-offloading-num-layers 1"),
    *("--fine-grained-activation-offloading", "--cross-entropy-fusion-impl te"),
    *("--fp32-residual-connection", "--defer-embedding-wgrad-compute", "--num-distributed-optimizer-instances 2"),
    *("--overlap-moe-expert-parallel-comm", "--use-megatron-fsdp", "--distribute-saved-activations"),
    *("--use-transformer-engine-op-fuser", "--no-bias-swiglu-fusion", "--use-kitchen-attention", "--qk-l2-norm"),
    *("--moe-expert-rank-capacity-factor 2", "--moe-ncclep-static-shape", "--mlp-chunks-for-training 2"),
    *("--no-clone-scatter-output-in-embedding", "--logits-load-dir x", "--logits-save-dir x", "--no-fp8-wgrad"),
    "--ddp-reduce-scatter-with-fp32-accumulation",
)


@pytest.mark.parametrize("flag", LARGE)
def test_a_flag_of_gigabytes_is_never_left_out_silently(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag}.* is not modelled: .*; leave the flag out"):
        read_command([*SMALL, *flag.split()])
